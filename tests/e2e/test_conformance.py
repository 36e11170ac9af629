"""Real nodes pass the conformance suite, run as docs/protocol.md shows."""

import subprocess
import sys

from tandem.cli.up import free_ports
from tests.e2e.clients import QUIET, SIMULATED
from tests.e2e.cluster import running


def test_both_kinds_of_node_conform(tiny_model, pytestconfig):
    flags = ("--model", str(tiny_model("llama")), *SIMULATED, *QUIET)
    bootstrap = ("--bootstrap-port", str(free_ports(1)[0]))
    with (
        running("prefill", *bootstrap, *flags) as (prefill, _),
        running("decode", *flags) as (decode, _),
    ):
        nodes = ("--prefill-url", prefill, "--decode-url", decode)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "tests/conformance", *nodes],
            cwd=pytestconfig.rootpath,
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert " passed" in last
    assert "skipped" not in last
