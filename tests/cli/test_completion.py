"""`tandem completion`, run by a real shell."""

import subprocess
import sys


def test_bash_completes_commands_and_their_flags():
    script = subprocess.run(
        [sys.executable, "-P", "-m", "tandem", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    probe = """
complete_at() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _shtab_tandem
  printf '%s\n' "${COMPREPLY[@]}"
}
complete_at tandem pre
complete_at tandem decode --page
"""
    done = subprocess.run(
        ["bash"], input=script + probe, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["prefill", "--page-size"]
