"""Servers under measurement: started, waited for, stopped."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# A first start converts the model and may compile: minutes on two cores.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load.

    Attributes:
        pid: Of its first process, where it was started here.
    """

    name: str
    url: str
    pid: int = 0

    @property
    def port(self) -> int:
        """Of its URL."""
        return int(self.url.rpartition(":")[2])


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def get(url: str) -> bytes:
    """Return the body of a GET.

    Raises:
        OSError: There is no answer, or not 200.
    """
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


@contextlib.contextmanager
def tandem(name: str, argv: Sequence[str], core: str = "") -> Iterator[Target]:
    """Run `tandem` with these arguments and a free port; yield it when it serves; stop it."""
    port = free_port()
    pin = ["taskset", "-c", core] if core else []
    command = [*pin, sys.executable, "-P", "-m", "tandem", *argv, "--port", str(port)]
    with running(name, command, port, dict(os.environ)) as target:
        yield target


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str]
) -> Iterator[Target]:
    """Run a server; yield it when it serves; stop it."""
    with tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment)
        )
        try:
            target = Target(name, f"http://127.0.0.1:{port}", process.pid)
            wait_serving(target, process, log.name)
            yield target
        finally:
            stop(process)


def wait_serving(target: Target, process: subprocess.Popen[bytes], log_path: str) -> None:
    """Return when /health answers 200; end the program with the log when it never will."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            get(f"{target.url}/health")
            return
        time.sleep(0.2)
    with open(log_path, encoding="utf-8") as log:
        raise SystemExit(f"{target.name} does not serve:\n{log.read()[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop as Ctrl-C does; force when that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
