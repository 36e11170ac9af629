"""One process tree of a cluster under test: a node or a router on a host, a disk and a log of its own."""

import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.clients import children
from tests.faults.network import ROOT
from tests.fork_server import Forked
from tests.patience import PATIENCE_S

# Logs of an hour, metrics and scratch files take a tenth of it.
DISK_BYTES = 32 << 20


class Disk:
    """A directory for what a process writes: a file system of its own where that can be had."""

    def __init__(self, path: Path, *, is_real: bool) -> None:
        self.path, self.is_real = path, is_real
        self._ballast = path / "ballast"
        path.mkdir()
        if is_real:
            size = f"size={DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tandem", path], check=True)

    def fill(self) -> None:
        """Leave no byte."""
        assert self.is_real
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT)
        try:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(fd, bytes(size))
        finally:
            os.close(fd)
        # The log's last page has room that no other file can take.
        with contextlib.suppress(OSError), (self.path / "log").open("ab", buffering=0) as log:
            while True:
                log.write(b"\n")

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_real:
            subprocess.run(["umount", "--lazy", self.path], check=False)


class Member:
    """A `tandem` command that can be started again and again.

    Attributes:
        role: prefill, decode or router.
        url: Where it answers.

    Args:
        namespace: A file of the network namespace that it runs in; empty for ours.
        shared_memory: A directory that it finds as /dev/shm; empty for the machine's.
    """

    def __init__(
        self,
        name: str,
        role: str,
        url: str,
        argv: Sequence[str],
        disk: Disk,
        env: dict[str, str],
        *,
        namespace: str = "",
        shared_memory: str = "",
    ) -> None:
        self.name, self.role, self.url, self.disk = name, role, url, disk
        self._argv = ["tandem", *argv]
        self._where = {"namespace": namespace, "shared_memory": shared_memory}
        self._env = {**os.environ, **env, "TMPDIR": str(disk.path)}
        self._popen: Forked | None = None
        self._log = disk.path / "log"

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        with self._log.open("ab") as log:
            file = log.fileno()
            self._popen = Forked(
                self._argv, stdout=file, stderr=file, cwd=ROOT, env=self._env, **self._where
            )

    def tree(self) -> list[int]:
        """Return all processes of it, parents first."""
        found, left = [], [self.pid]
        while left:
            pid = left.pop()
            with contextlib.suppress(FileNotFoundError):
                left += children(pid)
                found.append(pid)
        return found

    def children(self) -> list[int]:
        """Return the processes that its first one started: an engine, or edge workers."""
        return sorted(children(self.pid))

    def kill(self) -> None:
        """End all of it at once."""
        for pid in reversed(self.tree()) if self.is_running else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()

    def stop(self) -> int:
        """Stop as an operator would; return the exit status."""
        assert self._popen is not None
        if self.is_running:
            self._popen.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(PATIENCE_S)
        self.kill()
        return self._popen.wait()

    def events(self, since_s: float) -> Iterator[dict]:
        """Yield what it logged since a time, as `time.time()` tells it; the time is in `at_s`."""
        for line in self._log.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                event["at_s"] = time_of(event["timestamp"])
                if event["at_s"] >= since_s:
                    yield {**event, "of": self.name}

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")


def time_of(stamp: str) -> float:
    """Return the time of a log line, which is in UTC."""
    return dt.datetime.fromisoformat(stamp).timestamp()


def wait_ended(pids: Sequence[int], within_s: float = 10) -> bool:
    """Tell whether processes that are not our children end in time."""
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)  # another's child: nothing to wait on
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
