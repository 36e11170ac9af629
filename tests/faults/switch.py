"""A switch between network namespaces, in one process: each port is a TUN device, packets go by address.

```
 python -m tests.faults.switch tandem-1-d0=198.18.1.4 ... < orders
 order: {"host": "198.18.1.4", "mbit": 0, "is_cut": false, "delay_ms": 100, "loss": 0.05}, one a line
```

An order says how all packets fare that leave or reach a host, from now on. What is lost is lost in
silence, as a network loses it. Ends with its standard input. Needs root and /dev/net/tun.
"""

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

# Of <linux/if_tun.h>: TUNSETIFF; a device of IP packets, without a header before each.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Jumbo frames, as clusters have: with 200 ms and 5 % of loss TCP carries in proportion to it.
MTU = 9000
# What a port holds back for a slow link before it drops, as routers do.
QUEUE_S = 0.1
# What a port takes before others have their turn.
AT_ONCE = 32


@dataclass(slots=True)
class Port:
    """One host's link to the switch.

    Attributes:
        mbit: Of either direction; 0 is as fast as it goes.
        delay_ms: Of either direction.
        loss: Share of the packets of either direction.
        free_at_s: When the last packet has passed the link: from the host, and to it.
    """

    fd: int
    is_cut: bool = False
    mbit: float = 0
    delay_ms: float = 0
    loss: float = 0
    free_at_s: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def passed_at(self, at_s: float, num_bytes: int, direction: int, draw: float) -> float | None:
        """Return when a packet that comes at `at_s` has passed the link; None if it is lost."""
        if self.is_cut or draw < self.loss:
            return None
        if self.mbit:
            begin_s = max(at_s, self.free_at_s[direction])
            if begin_s - at_s > QUEUE_S:
                return None
            at_s = self.free_at_s[direction] = begin_s + num_bytes * 8e-6 / self.mbit
        return at_s + self.delay_ms / 1000


class Switch:
    """Forwards until standard input ends."""

    def __init__(self, ports: dict[str, Port], seed: int = 0) -> None:
        self._ports = ports
        self._by_fd = {port.fd: port for port in ports.values()}
        self._rng = random.Random(seed)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        poller = select.poll()
        for fd in (sys.stdin.fileno(), *self._by_fd):
            poller.register(fd, select.POLLIN)
        rest = b""
        while True:
            left_ms = max(0.0, self._due[0][0] - time.monotonic()) * 1000 if self._due else None
            for fd, _ in poller.poll(left_ms):
                if fd in self._by_fd:
                    self._take(self._by_fd[fd])
                    continue
                data = os.read(fd, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._deliver()

    def _obey(self, order: dict) -> None:
        port = self._ports[order.pop("host")]
        for name, value in order.items():
            setattr(port, name, value)
        sys.stdout.write("done\n")
        sys.stdout.flush()

    def _take(self, source: Port) -> None:
        for _ in range(AT_ONCE):
            try:
                packet = os.read(source.fd, 1 << 16)
            except BlockingIOError:
                return
            target = self._ports.get(socket.inet_ntoa(packet[16:20]))
            if packet[0] >> 4 != 4 or target is None:
                continue
            now = time.monotonic()
            left_s = source.passed_at(now, len(packet), 0, self._rng.random())
            if left_s is not None:
                due_s = target.passed_at(left_s, len(packet), 1, self._rng.random())
                if due_s is not None:
                    heapq.heappush(self._due, (due_s, next(self._order), target.fd, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._due)
            try:
                os.write(fd, packet)
            except OSError:  # the host's queue is full, or the host is gone
                continue


def open_port(namespace: str, address: str, index: int) -> int:
    """Make the device `tandem` in a namespace (`-`: ours) and return its descriptor."""
    name = f"tandem-{os.getpid()}-{index}"[:15]
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    inside = []
    if namespace != "-":
        subprocess.run(["ip", "link", "set", name, "netns", namespace], check=True)
        inside = ["-n", namespace]
        subprocess.run(["ip", *inside, "link", "set", "lo", "up"], check=True)
    for words in (
        ("address", "add", f"{address}/24", "dev", name),
        ("link", "set", name, "mtu", str(MTU), "up"),
    ):
        subprocess.run(["ip", *inside, *words], check=True)
    return fd


def main() -> None:
    """Make the ports, say so, forward."""
    ports = {}
    for index, word in enumerate(sys.argv[1:]):
        namespace, _, address = word.partition("=")
        ports[address] = Port(open_port(namespace, address, index))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    Switch(ports).run()


if __name__ == "__main__":
    main()
