"""What two-sided transports share: a stream announces each batch, a lane beside it brings the bytes.

```
 sender   ──▶ header and table, as on a TCP stream (tcp_stream)                  ┐
 listener ──▶ one byte: READY, or REFUSED and the end                            │ repeated
     lane ══▶ the bytes                                                          │
 listener ──▶ one byte: LANDED                                                   ┘
```

The stream authenticates the peer and shows when it is gone, whatever the lane runs on.
This file has the sending end; `tcp_stream` has the receiving one.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np

from tandem.kvtransfer import plan
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import check_bounds
from tandem.kvtransfer.transports.tcp import open_stream
from tandem.kvtransfer.transports.tcp_stream import TcpOffer
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

READY = b"\x03"
# The largest message of a handshake: addresses and names, far below this.
MAX_BLOB_BYTES = 64 << 10
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class SendingLane(Protocol):
    """Takes the bytes of the batches that one stream announces. One thread uses it."""

    def send(self, batch: CopyPlan) -> None:
        """Send the sources of a batch; however it ends, no byte of them is read after it.

        Raises:
            PeerLost: The stream or the lane broke, or the stream was shut down meanwhile.
        """
        ...

    def close(self) -> None:
        """Give back what the lane holds. The stream may be shut down, and is its caller's to close."""
        ...


class LaneConnection:
    """The sending end: one stream, and one lane beside it.

    Args:
        offer: Of a `TcpListener`.
        open_lane: Called with a stream on which the listener has accepted us, and `region`; raises
            PeerLost.
    """

    def __init__(
        self,
        offer: TransportOffer,
        region: MemoryRegion,
        open_lane: Callable[[socket.socket, MemoryRegion], SendingLane],
    ) -> None:
        self._size_bytes = region.size_bytes
        with contextlib.ExitStack() as opened:
            try:
                facts = msgspec.convert(offer.descriptor, TcpOffer)
                self._stream = opened.enter_context(open_stream(facts))
                lane = open_lane(self._stream, region)
            except (msgspec.ValidationError, OSError, PeerLost) as error:
                raise TransferRefused(f"cannot connect: {error}") from error
            opened.callback(lane.close)
            self._lane, self._opened = lane, opened.pop_all()
        self._writing = threading.Lock()
        self._is_closed = False

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Announce and send batch after batch."""
        check_bounds(self._size_bytes, plan.source_offset, plan.size_bytes)
        with self._writing:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            for batch in plan.batches(frames.BATCH_BYTES, frames.MAX_COPIES):
                try:
                    self._send(room, batch)
                except PeerLost:
                    frames.shut_down(self._stream)  # the ends may differ on where the stream is
                    raise

    def _send(self, room: Room, batch: CopyPlan) -> None:
        frames.send_from(self._stream, [memoryview(frames.table_of(room, batch))])
        if frames.receive_exactly(self._stream, 1) != READY:
            raise TransferRefused(f"the pages are not granted to room {room}")
        self._lane.send(batch)
        if frames.receive_exactly(self._stream, 1) != frames.LANDED:
            raise PeerLost("the listener stopped in the middle of a batch")

    def close(self) -> None:
        """Cut the stream: a write under way fails."""
        self._is_closed = True
        frames.shut_down(self._stream)
        with self._writing:
            self._opened.close()


@contextlib.contextmanager
def handshake(stream: socket.socket) -> Iterator[None]:
    """Give a peer that has proved itself a few seconds for each answer in the block."""
    stream.settimeout(frames.HANDSHAKE_TIMEOUT_S)
    yield
    stream.settimeout(None)


def send_blob(stream: socket.socket, blob: bytes) -> None:
    """Send bytes whose number the other end does not know.

    Raises:
        PeerLost: The stream broke.
    """
    frames.send_from(stream, [memoryview(len(blob).to_bytes(4, "little") + blob)])


def receive_blob(stream: socket.socket) -> bytes:
    """Return what `send_blob` sent.

    Raises:
        PeerLost: The stream ended, or the peer announced more than it may.
    """
    size_bytes = int.from_bytes(frames.receive_exactly(stream, 4), "little")
    if size_bytes > MAX_BLOB_BYTES:
        raise PeerLost(f"{size_bytes} bytes in a handshake")
    return frames.receive_exactly(stream, size_bytes)


def gather(memory: Any, batch: CopyPlan, staging: Any) -> None:
    """Copy the sources of a batch, one after the other, to the start of `staging`.

    Args:
        memory: The pool's bytes: a numpy array, or a device's tensor.
        staging: The same kind.
    """
    if isinstance(memory, np.ndarray):
        return plan.gather(memory, batch, staging)
    at = 0
    for begin, _, size in batch.copies():
        staging[at : at + size] = memory[begin : begin + size]
        at += size
    return None


def scatter(staging: Any, batch: CopyPlan, memory: Any) -> None:
    """Copy the start of `staging` out to the destinations of a batch: the inverse of `gather`."""
    if isinstance(memory, np.ndarray):
        return plan.scatter(staging, batch, memory)
    at = 0
    for _, to, size in batch.copies():
        memory[to : to + size] = staging[at : at + size]
        at += size
    return None
