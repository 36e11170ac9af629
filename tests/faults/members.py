"""One process tree of a cluster under test: a node or a router on a host, a disk and a log of its own."""

import contextlib
import datetime as dt
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.patience import eventually
from tests.processes import Process, children, is_alive

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
        self._argv = argv
        self._log = disk.path / "log"
        self._how: dict[str, Any] = {"log": self._log, "env": env | {"TMPDIR": str(disk.path)}}
        self._how |= {"namespace": namespace, "shared_memory": shared_memory}
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running()

    def start(self) -> None:
        self._process = Process(*self._argv, **self._how)

    def tree(self) -> list[int]:
        return self.process.tree()

    def children(self) -> list[int]:
        """Return the processes that its first one started: an engine, or edge workers."""
        return sorted(children(self.pid))

    def kill(self) -> None:
        """End all of it at once."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> int:
        """Stop as an operator would; return the exit status."""
        return self.process.stop()

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
    """Return whether processes that are not our children end in time."""
    return eventually(lambda: not any(map(is_alive, pids)), within_s=within_s)
