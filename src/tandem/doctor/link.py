"""The link test: hand-offs between a prefill agent and a decode agent, as between nodes.

```
 --listen    Source: a prefill agent that expects the rooms, pushes noise to any link that grants a room,
             and then expects the room again
 --connect   for each transport, a process with a decode agent, which grants pages and times their landing
 neither     for each transport, a process with both agents, on loopback
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
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.doctor.config import Address
from tandem.doctor.report import Finding, HandOff, TransportRow
from tandem.kvtransfer.bootstrap import SenderEnd
from tandem.kvtransfer.events import Failed, Landed, Lost, PushDone, Released
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent, SenderTimeouts
from tandem.kvtransfer.transports.base import Transport, TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.telemetry import log as logs
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


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement that one process makes. `peer` is the listening end; None: the process runs both ends."""

    name: str
    config: TransportConfig
    peer: Address | None
    is_insecure: bool


class Source:
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
                if isinstance(event, PushDone | Released):
                    self._expect(event.room)

    def close(self) -> None:
        """Close all links and release the memory."""
        self._agent.close()
        self._region.close()

    def _expect(self, room: Room) -> None:
        self._agent.expect(room)
        self._agent.push(room, range(LAYOUT.num_pages), first_page_index=0)
        self._agent.finish(room, first_token=0, seed=0)


class Sink:
    """Decode's end: grants pages to a source, and times their landing.

    Raises:
        ConfigInvalid: The transport cannot be used here, or the peer requires a secret.
    """

    def __init__(
        self, name: str, config: TransportConfig, peer: Address, *, is_insecure: bool = False
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
                if isinstance(event, Landed):
                    return time.perf_counter() - began_s
                if isinstance(event, Failed | Lost):
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


def usable(names: Sequence[str], config: TransportConfig) -> list[Transport]:
    """Return the transports that work with the libraries of this machine."""
    found: list[Transport] = []
    for name in names:
        with contextlib.suppress(TandemError, ImportError):
            found += transports(name, config)
    return found


def reach(peer: Address) -> Finding:
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


def measure(asked: Link) -> TransportRow:
    """Measure one transport in a separate process."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.doctor.link"],
            input=msgspec.json.encode(asked),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROCESS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _broken(asked.name, f"no end within {PROCESS_TIMEOUT_S:.0f} s")
    if done.returncode:
        return _broken(asked.name, f"its process ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=TransportRow)


def judge(rows: Sequence[TransportRow], wanted: Sequence[str]) -> list[TransportRow]:
    """Mark rows that are not ok as failed, if transports were named or no transport works."""
    if not wanted and any(row.status == "ok" for row in rows):
        return list(rows)
    return [
        row if row.status == "ok" else msgspec.structs.replace(row, status="failed") for row in rows
    ]


# ── in a separate process ────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Measure the link that standard input describes, and write its row to standard output."""
    logs.configure("error", "json")
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Link)
    with os.fdopen(os.dup(1), "wb") as output, open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)  # libraries may print
        output.write(msgspec.json.encode(_measured(asked)))
    os._exit(0)  # the source's thread never ends, and a library may hang at exit


def _measured(asked: Link) -> TransportRow:
    try:
        with contextlib.closing(_sink(asked)) as sink:
            found = list(_hand_offs(sink))
            sink.verify()
    except (ConfigInvalid, TransferRefused, ImportError) as error:
        return _missing(asked.name, error)
    except TandemError as error:
        return _broken(asked.name, str(error))
    rate = found[-1].size_bytes / found[-1].ms / 1e6
    return TransportRow(name=asked.name, status="ok", hand_offs=found, gigabytes_per_s=rate)


def _sink(asked: Link) -> Sink:
    peer = asked.peer
    if peer is None:
        host = asked.config.host
        source = Source(host, 0, transports(asked.name, asked.config))
        threading.Thread(target=source.serve, daemon=True).start()
        peer = Address(host, source.port)
    return Sink(asked.name, asked.config, peer, is_insecure=asked.is_insecure)


def _hand_offs(sink: Sink) -> Iterator[HandOff]:
    for num_pages in SIZES:
        sink.take(num_pages)  # warm-up, not counted
        end_s, times = time.monotonic() + ROUNDS_S, list[float]()
        while len(times) < MIN_ROUNDS or time.monotonic() < end_s:
            times.append(sink.take(num_pages))
        yield HandOff(num_pages * LAYOUT.page_bytes, 1000 * statistics.median(times))


def _broken(name: str, reason: str) -> TransportRow:
    return TransportRow(name=name, status="warning", advice=f"broke: {reason}")


def _missing(name: str, error: Exception) -> TransportRow:
    # The registry's messages begin with a node's flag, which was not given here.
    reason = str(error).removeprefix(f"--transfer-backend {name} ") or type(error).__name__
    return TransportRow(name=name, status="missing", advice=reason)


def listening_words(host: str, port: int) -> str:
    """Return the message with the command for the other end."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = tcp_address(shown, port).removeprefix("tcp://")
    note = " (from this host only: --listen HOST:PORT is for others)" if is_loopback(host) else ""
    return f"listening; at the other end: tandem doctor --connect {address}{note}"


if __name__ == "__main__":
    main()
