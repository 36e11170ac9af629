"""Two network namespaces and a link between them that delays, loses packets, and can be cut.

Each namespace has a TUN device; a thread of this process carries the packets across. Needs root and
/dev/net/tun, and no module of the kernel besides.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
HOSTS = ("10.213.7.1", "10.213.7.2")
MTU = 32768
TURN_S = 0.02
# What a router would hold before it drops: far more than two senders keep under way here.
QUEUE_PACKETS = 1000


class BadLink:
    """Makes both namespaces; `close` removes them.

    Args:
        delay_s: One way.
        loss: Share of packets, 0 to 1, drawn from `seed`.

    Attributes:
        namespaces: Their names; the hosts in them are `HOSTS`.
    """

    def __init__(self, delay_s=0.0, loss=0.0, seed=0):
        self._delay_s, self._loss, self._draw = delay_s, loss, random.Random(seed)
        unique = f"{os.getpid()}-{id(self):x}"
        self.namespaces = (f"tandem-a-{unique}", f"tandem-b-{unique}")
        self.num_lost = 0
        self._tuns, self._is_cut, self._is_closing = [], False, False
        self._thread = threading.Thread(target=self._carry)
        try:
            for name, host, other in zip(self.namespaces, HOSTS, HOSTS[::-1], strict=True):
                ip("netns", "add", name)
                self._tuns.append(_in_new_thread(lambda name=name: _open_tun(name)))
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "addr", "add", host, "peer", other, "dev", "wan0")
                ip("-n", name, "link", "set", "wan0", "mtu", str(MTU), "up")
        except BaseException:
            self._remove()
            raise
        self._thread.start()

    def cut(self):
        """From now on every packet is lost, and nobody is told."""
        self._is_cut = True

    def mend(self):
        self._is_cut = False

    def close(self):
        self._is_closing = True
        self._thread.join()
        self._remove()

    def _remove(self):
        for tun in self._tuns:
            os.close(tun)
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _carry(self):
        first, second = self._tuns
        other, queues = {first: second, second: first}, {first: deque(), second: deque()}
        while not self._is_closing:
            due_s = min((queue[0][0] for queue in queues.values() if queue), default=float("inf"))
            wait_s = min(TURN_S, max(0.0, due_s - time.monotonic()))
            for tun in select.select(self._tuns, [], [], wait_s)[0]:
                packet = os.read(tun, MTU)
                is_lost = self._is_cut or self._draw.random() < self._loss
                if is_lost or len(queues[tun]) >= QUEUE_PACKETS:
                    self.num_lost += 1
                else:
                    queues[tun].append((time.monotonic() + self._delay_s, packet))
            for tun, queue in queues.items():
                while queue and queue[0][0] <= time.monotonic():
                    os.write(other[tun], queue.popleft()[1])


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _in_new_thread(call):
    """Return what `call` returns; the thread's network namespace ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def _open_tun(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    finally:
        os.close(fd)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"wan0", IFF_TUN | IFF_NO_PI))
    return tun
