"""A process of a Tandem command, with its log and all processes that it started. `tests/e2e/cluster.py` has clusters.

It imports no module of Tandem: vLLM's environment uses it, too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fork_server import Forked
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


class Process:
    """One process with a log of its own.

    Args:
        argv: Arguments of the module.
        log: File that its output is appended to; None: a temporary one.
        env: In addition to ours.
        is_fresh: Started as a user does; others are forked, see `tests/fork_server.py`.
        python: Interpreter of a fresh process.
        where: Namespace and shared memory of a forked process.
    """

    def __init__(
        self,
        *argv: str,
        module: str = "tandem",
        log: Path | None = None,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
        is_fresh: bool = False,
        python: str = sys.executable,
        **where: str,
    ) -> None:
        self.argv = argv
        self._is_interrupted = False
        # A temporary file lasts until its last descriptor is closed, which `stop` does.
        self.log = log.open("ab") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._log_path = log
        how: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **(env or {})}}
        how |= dict.fromkeys(("stdout", "stderr"), self.log.fileno())
        self._popen = (
            subprocess.Popen([python, "-P", "-m", module, *argv], **how)
            if is_fresh
            else Forked([module, *argv], **how, **where)
        )
        if log is not None:
            self.log.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def output(self) -> str:
        if self._log_path is not None:
            return self._log_path.read_text(errors="replace")
        # Read at an offset of our own: the process appends at the file's position.
        number = self.log.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self._popen.wait(timeout_s)

    def is_running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process only."""
        self._popen.send_signal(number)

    def tree(self) -> list[int]:
        """Return the process and all its descendants, parents first."""
        found, left = [], [self.pid]
        while left:
            pid = left.pop()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                left += children(pid)
                found.append(pid)
        return found

    def signal_tree(self, number: int) -> None:
        """Send a signal to the process and all its descendants, children first."""
        for pid in reversed(self.tree()) if self.is_running() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> int:
        """End the process and its descendants at once; return the exit status."""
        self.signal_tree(signal.SIGKILL)
        return self.wait()

    def interrupt(self) -> None:
        """Begin to stop, as Ctrl-C does; once, because a second one forces."""
        if self.is_running() and not self._is_interrupted:
            self.signal(signal.SIGINT)
        self._is_interrupted = True

    def stop(self) -> int:
        """Stop as Ctrl-C does; return the exit status."""
        self.interrupt()
        try:
            status = self.wait()
        except subprocess.TimeoutExpired:
            status = self.kill()
        self.log.close()
        return status


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def is_alive(pid: int) -> bool:
    """Return whether a process, of anybody, has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
