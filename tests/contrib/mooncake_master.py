"""A real master of a Mooncake Store, and a process that lends memory to it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

MASTER = Path(find_spec("mooncake").submodule_search_locations[0]) / "mooncake_master"


class MooncakeMaster:
    """One master on loopback."""

    def __init__(self) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            self.port, self._metrics_port = one.getsockname()[1], other.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(MASTER), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not self._listens():
            assert self._process.poll() is None, f"{command} ended"

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def a_master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    try:
        master.start()
        yield master
    finally:
        master.kill()


LENDER = """
import sys
from tandem_mooncake_store import MooncakeTier, parse_url
from tests.kvtier.pool import SPACE, SmallPool, some_keys, some_pages
tier = MooncakeTier("mooncake", parse_url(sys.argv[1]), SmallPool(), SPACE)
num_pages = int(sys.argv[2])
assert tier.put(some_keys(num_pages), some_pages(num_pages)) == num_pages
print("lent", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def a_lender(master: MooncakeMaster, num_pages: int) -> Iterator[subprocess.Popen[str]]:
    """A process that lends memory and has put the first of `some_keys`."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", LENDER, f"{master.url}?segment=64MiB", str(num_pages)]
    places = {"PYTHONPATH": os.pathsep.join(sys.path)}  # as pytest has set it
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | places,
    ) as lender:
        try:
            assert lender.stdout.readline() == "lent\n"
            yield lender
        finally:
            lender.kill()
