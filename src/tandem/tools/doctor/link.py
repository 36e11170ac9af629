"""The link test: hand-offs between a prefill agent and a decode agent, as between nodes.

```
 --listen    PushEnd, the source: a prefill agent that expects grants for fixed rooms. It pushes noise to a link that
             grants a room, and then expects the next grant for that room
 --connect   GrantEnd, the sink: for each transport, a process with a decode agent, which grants pages and times their
             landing
 neither     for each transport, a process with both ends, on loopback
```

The prompt always fills the pool. For a smaller hand-off, decode reports that it already has the rest
(`have_tokens`). Checksums are off, so that only the link is measured; instead, the pages of the last hand-off
are compared. Each transport is measured in a separate process: a library that crashes or hangs costs one row.
"""

import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent, SenderTimeouts
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.events import PushDone, RoomFailed, RoomLanded, RoomLost, RoomReleased
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Transport, TransportConfig
from tandem.kvtransfer.transports.registry import known, transports
from tandem.telemetry import log as logs
from tandem.tools.doctor.report import Finding, Status
from tandem.wire.channel import Waker, tcp_address
from tandem.wire.errors import (
    ConfigInvalid,
    KVCorrupted,
    TandemError,
    TransferRefused,
    TransferTimeout,
)
from tandem.wire.generation import Room, new_epoch
from tandem.wire.hosts import reason_of
from tandem.wire.keys import cluster_key, is_loopback

FINGERPRINT = "tandem-doctor-1"
# Pages of 64 KiB, as small models have: at this size the cost per page is still visible. The pool exceeds most
# last-level caches, so that the test measures memory.
LAYOUT = KVLayout(
    num_pages=2048,
    page_size=16,
    num_layers=4,
    num_kv_heads=8,
    head_dim=32,
    dtype="float16",
    itemsize=2,
)
# Both ends use these rooms in turn; the source expects a used room again long before its next turn.
ROOMS = [Room(number) for number in range(1, 65)]
SIZES = (1, 64, 2048)
MIN_ROUNDS, ROUNDS_S = 3, 0.2
# Time limit of a transport's process, which includes loading the library and connecting.
PROCESS_TIMEOUT_S = 60.0
HAND_OFF_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
FOREVER_S = 1e9


class HostPort(msgspec.Struct, frozen=True):
    """A host and a port; an IPv6 host has no brackets."""

    host: str
    port: int


class LinkTest(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement that one process makes. `peer` is the listening end; None: the process runs both ends."""

    name: str
    config: TransportConfig
    peer: HostPort | None
    is_insecure: bool


class PushEnd:
    """Prefill's end: pushes to every decode agent that grants one of `ROOMS`.

    Raises:
        ConfigInvalid: The address cannot be bound, or requires a secret.
    """

    def __init__(
        self, host: str, port: int, allowed: Sequence[Transport], *, is_insecure: bool = False
    ) -> None:
        key = cluster_key(host, is_insecure=is_insecure, flag="--listen")
        self._region = MemoryRegion.private(LAYOUT.pool_bytes)
        self._region.array()[:] = noise()
        self._waker = Waker()
        end = SenderEnd(new_epoch(), FINGERPRINT, LAYOUT, self._region, allowed)
        self._agent = PrefillAgent(
            tcp_address(host, port),
            end,
            waker=self._waker,
            key=key,
            timeouts=SenderTimeouts(grant_s=FOREVER_S),
            verify="off",
        )
        self.port = self._agent.port
        for room in ROOMS:
            self._expect(room)

    def serve(self) -> None:
        """Push forever."""
        while True:
            select.select([self._waker], [], [])
            self._waker.clear()
            for event in self._agent.events():
                if isinstance(event, PushDone | RoomReleased):
                    self._expect(event.room)

    def close(self) -> None:
        """Close all links and release the memory."""
        self._agent.close()
        self._region.close()

    def _expect(self, room: Room) -> None:
        self._agent.expect(room)
        self._agent.push(room, range(LAYOUT.num_pages), first_page_index=0)
        self._agent.finish(room, first_token=0, seed=0)


class GrantEnd:
    """Decode's end: grants pages to a source, and times their landing.

    Raises:
        ConfigInvalid: The transport cannot be used here, or the peer requires a secret.
    """

    def __init__(
        self, name: str, config: TransportConfig, peer: HostPort, *, is_insecure: bool = False
    ) -> None:
        self._peer, self._waker, self._num_done = peer, Waker(), 0
        self._key = cluster_key(peer.host, is_insecure=is_insecure, flag="--connect")
        self._rng, self._page_ids = np.random.default_rng(0), list[int]()
        try:
            self._open(name, config, MemoryRegion.private(LAYOUT.pool_bytes))
        except ConfigInvalid:  # some transports need a file to map
            self._open(name, config, MemoryRegion.shared(LAYOUT.pool_bytes, "doctor"))

    def _open(self, name: str, config: TransportConfig, region: MemoryRegion) -> None:
        self._region = region
        self._agent = DecodeAgent(
            epoch=new_epoch(),
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            region=region,
            transports=transports(name, config),
            waker=self._waker,
            key=self._key,
            verify="off",
        )

    def take(self, num_pages: int) -> float:
        """Receive a hand-off into random pages; return its duration in seconds.

        Raises:
            TandemError: The hand-off failed or timed out.
        """
        room = ROOMS[self._num_done % len(ROOMS)]
        self._num_done += 1
        self._page_ids = self._rng.permutation(LAYOUT.num_pages)[:num_pages].tolist()
        held = (LAYOUT.num_pages - num_pages) * LAYOUT.page_size
        began_s = time.perf_counter()
        self._agent.request(room, self._peer.host, self._peer.port, self._page_ids, held)
        while (took_s := time.perf_counter() - began_s) < HAND_OFF_TIMEOUT_S:
            select.select([self._waker], [], [], HAND_OFF_TIMEOUT_S - took_s)
            self._waker.clear()
            for event in self._agent.events():
                if isinstance(event, RoomLanded):
                    return time.perf_counter() - began_s
                if isinstance(event, RoomFailed | RoomLost):
                    raise event.error
        raise TransferTimeout(f"no hand-off within {HAND_OFF_TIMEOUT_S:.0f} s")

    def verify(self) -> None:
        """Compare the pages of the last hand-off with the source's bytes.

        Raises:
            KVCorrupted: The bytes differ.
        """
        shape = (LAYOUT.num_pages, LAYOUT.page_bytes)
        arrived = self._region.array().reshape(shape)[self._page_ids]
        if not np.array_equal(arrived, noise().reshape(shape)[-len(self._page_ids) :]):
            raise KVCorrupted("the bytes that arrived are not those that were sent")

    def close(self) -> None:
        """Close the link to the source and release the memory."""
        self._agent.close()
        self._region.close()


def noise() -> NDArray[np.uint8]:
    """Return the bytes that every source pushes; they are always the same, so a sink can verify them."""
    drawn = np.random.default_rng(1).integers(0, 2**63, LAYOUT.pool_bytes // 8, np.uint64)
    return drawn.view(np.uint8)


def listen(
    address: HostPort, backends: Sequence[str], settings: TransportConfig, *, is_insecure: bool
) -> None:
    """Run prefill's end of a link test until Ctrl-C, with the transports whose libraries are installed.

    Raises:
        ConfigInvalid: The address cannot be bound, or requires a secret.
    """
    host, allowed = address.host, list[Transport]()
    for name in backends or known():
        with contextlib.suppress(TandemError, ImportError):
            allowed += transports(name, settings)
    source = PushEnd(host, address.port, allowed, is_insecure=is_insecure)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    where = tcp_address(shown, source.port).removeprefix("tcp://")
    note = " (this host only; for others use --listen HOST:PORT)" if is_loopback(host) else ""
    sys.stderr.write(f"listening; at the other end: tandem doctor --connect {where}{note}\n")
    sys.stderr.flush()
    try:
        source.serve()
    finally:
        source.close()


def reach(peer: HostPort) -> Finding:
    """Try to connect to the listening end."""
    name = tcp_address(peer.host, peer.port).removeprefix("tcp://")
    try:
        socket.create_connection((peer.host, peer.port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return Finding(
            area="link",
            name=name,
            status="failed",
            found=f"cannot be reached ({reason_of(error)})",
            advice="run tandem doctor --listen there, and open its port",
        )
    return Finding(area="link", name=name, found="can be reached")


def measure(test: LinkTest) -> Finding:
    """Measure one transport in a separate process."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.tools.doctor.link"],
            input=msgspec.json.encode(test),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROCESS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _broken(test.name, f"not finished within {PROCESS_TIMEOUT_S:.0f} s")
    if done.returncode:
        return _broken(test.name, f"its process ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Finding)


def judge(measured: Sequence[Finding], required: Sequence[str]) -> list[Finding]:
    """Mark transports that are not ok as failed, if transports are required or none works."""
    if not required and any(each.status == "ok" for each in measured):
        return list(measured)
    replace = msgspec.structs.replace
    return [each if each.status == "ok" else replace(each, status="failed") for each in measured]


# ── in a separate process ────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Measure the link that standard input describes, and write its row to standard output."""
    logs.configure("error", "json")
    test = msgspec.json.decode(sys.stdin.buffer.read(), type=LinkTest)
    with os.fdopen(os.dup(1), "wb") as output, open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)  # libraries may print
        output.write(msgspec.json.encode(_measured(test)))
    os._exit(0)  # the source's thread never ends, and a library may hang at exit


def _measured(test: LinkTest) -> Finding:
    try:
        with contextlib.closing(_sink(test)) as sink:
            times = [
                (num_pages * LAYOUT.page_bytes, _hand_off_s(sink, num_pages)) for num_pages in SIZES
            ]
            sink.verify()
    except (ConfigInvalid, TransferRefused, ImportError) as error:
        # The registry's messages begin with a node's flag, which was not given here.
        reason = str(error).removeprefix(f"--transfer-backend {test.name} ")
        return _transport(test.name, "missing", "not usable", reason or type(error).__name__)
    except TandemError as error:
        return _broken(test.name, str(error))
    rate = times[-1][0] / times[-1][1] / 1e9
    shown = ", ".join(
        f"{1000 * took_s:.2f} ms for {size_bytes >> 10:,} KiB" for size_bytes, took_s in times
    )
    return _transport(test.name, "ok", f"{rate:.2f} GB/s: {shown}")


def _sink(test: LinkTest) -> GrantEnd:
    peer = test.peer
    if peer is None:
        host = test.config.host
        source = PushEnd(host, 0, transports(test.name, test.config))
        threading.Thread(target=source.serve, daemon=True).start()
        peer = HostPort(host, source.port)
    return GrantEnd(test.name, test.config, peer, is_insecure=test.is_insecure)


def _hand_off_s(sink: GrantEnd, num_pages: int) -> float:
    """Return the median time of hand-offs of this size, from the grant to the landing of all pages."""
    sink.take(num_pages)  # warm-up, not counted
    end_s, times = time.monotonic() + ROUNDS_S, list[float]()
    while len(times) < MIN_ROUNDS or time.monotonic() < end_s:
        times.append(sink.take(num_pages))
    return statistics.median(times)


def _broken(name: str, reason: str) -> Finding:
    return _transport(name, "warning", "broke", reason)


def _transport(name: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(area="transport", name=name, status=status, found=found, advice=advice)


if __name__ == "__main__":
    main()
