"""The suite as users run it."""

import subprocess
import sys


def test_without_a_node_the_whole_suite_is_skipped(tmp_path):
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "tandem.conformance.plugin"]
    done = subprocess.run(
        [*command, "--pyargs", "tandem.conformance"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert "skipped" in last
    assert "passed" not in last
