"""Real nodes pass the conformance suite, as users run it."""

import subprocess
import sys

from tandem.up import free_ports
from tests.e2e.clients import QUIET, SIMULATED
from tests.e2e.cluster import running


def test_both_kinds_of_node_conform(tiny_model, tmp_path):
    flags = ("--model", str(tiny_model("llama")), *SIMULATED, *QUIET)
    bootstrap = ("--bootstrap-port", str(free_ports(1)[0]))
    with (
        running("prefill", *bootstrap, *flags) as (prefill, _),
        running("decode", *flags) as (
            decode,
            _,
        ),
    ):
        nodes = ("--prefill-url", prefill, "--decode-url", decode)
        suite = ("-p", "tandem.conformance.plugin", "--pyargs", "tandem.conformance", *nodes)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", *suite, "-k", "not test_transport"],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
