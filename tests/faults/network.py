"""A network of the test's own: a namespace for each host, joined by a switch that can do them harm.

Without root or without TUN devices there is none, and all processes share loopback: what needs a network
is then not run, and is said not to have been.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = "client"


class Network:
    """Hosts by name, each with an address.

    Args:
        hosts: One namespace each; `CLIENT` is ours.
    """

    is_real = True

    def __init__(self, hosts: Sequence[str]) -> None:
        # Of the range for benchmarks (RFC 2544): no network's own. By process, so that two runs get on.
        self._names = [*hosts, CLIENT]
        subnet = os.getpid() % 250 + 1
        self.addresses = {name: f"198.18.{subnet}.{i + 1}" for i, name in enumerate(self._names)}
        self._namespaces = {name: f"tandem-{os.getpid()}-{name}" for name in hosts}
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "add", namespace], check=True)
        words = [f"{self._namespaces.get(n, '-')}={self.addresses[n]}" for n in self._names]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.switch", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == b"up\n"

    def namespace(self, host: str) -> str:
        """Return the file of a host's namespace."""
        return f"/run/netns/{self._namespaces[host]}"

    def set_link(self, host: str, **how: float) -> None:
        """Change a host's link, and return when it is so; see `switch.Port`."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        order = {"host": self.addresses[host], **how}
        self._switch.stdin.write(json.dumps(order).encode() + b"\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == b"done\n"

    def close(self) -> None:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.close()
        self._switch.wait()
        self._switch.stdout.close()
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


class Loopback:
    """All hosts are this one."""

    is_real = False

    def __init__(self, hosts: Sequence[str]) -> None:
        self.addresses = dict.fromkeys([*hosts, CLIENT], "127.0.0.1")

    def namespace(self, host: str) -> str:
        del host
        return ""

    def set_link(self, host: str, **how: float) -> None:
        raise NotImplementedError("there is one host, and no link")

    def close(self) -> None:
        pass


@functools.cache
def has_network() -> bool:
    """Tell whether namespaces and TUN devices can be made here."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK) and _has_netns()


def _has_netns() -> bool:
    name = f"tandem-{os.getpid()}-try"
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(
            ["ip", "netns", "add", name], check=False, capture_output=True
        ).returncode:
            return False
        return not subprocess.run(["ip", "netns", "delete", name], check=False).returncode
    return False


def sweep() -> None:
    """End what a run that was killed has left in its namespaces, and the namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    for namespace, pid in re.findall(r"^(tandem-(\d+)-\w+)", listed.stdout, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            inside = ["ip", "netns", "pids", namespace]
            found = subprocess.run(inside, check=False, capture_output=True, text=True)
            for left in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(left), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


@contextlib.contextmanager
def network_of(hosts: Sequence[str], *, is_wanted: bool = True) -> Iterator[Network | Loopback]:
    """Make a network, if there can be one."""
    is_real = is_wanted and has_network()
    if is_real:
        sweep()
    network = Network(hosts) if is_real else Loopback(hosts)
    try:
        yield network
    finally:
        network.close()
