"""The sender's connection for transports that announce batches on a TCP stream.

```
 sender   ──▶ header and table (`tcp_stream`); on a TCP lane the bytes follow at once     ┐
 listener ──▶ one byte: READY, or REFUSED and end of stream            not on a TCP lane  │ repeated
     lane ══▶ the bytes                                                not on a TCP lane  │
 listener ──▶ one byte: LANDED                                                            ┘
```

The stream authenticates the peer and detects its death, whatever moves the bytes.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import check_bounds, read_offer
from tandem.kvtransfer.transports.tcp_stream import Lane, OpenLane, TcpOffer
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

READY = b"\x03"
# Limit for a message of a handshake; addresses and names are far smaller.
MAX_BLOB_BYTES = 64 << 10
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
# For smaller writes a second stream costs more than it gains.
SHARE_BYTES = 4 << 20


class StreamConnection:
    """Streams to one listener, each with its own lane. Large writes are split among them.

    Args:
        offer: Offer of a `TcpListener`.
        source_host: Address to send from; empty for the one that routing picks.

    Raises:
        TransferRefused: The listener cannot be reached, or does not accept this peer.
    """

    def __init__(
        self,
        offer: TransportOffer,
        region: MemoryRegion,
        open_lane: OpenLane,
        num_streams: int = 1,
        source_host: str = "",
    ) -> None:
        self._size_bytes = region.size_bytes
        self._streams: list[socket.socket] = []
        self._lanes: list[Lane] = []
        facts = read_offer(offer, TcpOffer)
        with contextlib.ExitStack() as opened:
            try:
                for _ in range(num_streams):
                    stream = opened.enter_context(open_stream(facts, source_host))
                    lane = open_lane(stream, region)
                    opened.callback(lane.close)
                    self._streams.append(stream)
                    self._lanes.append(lane)
            except (OSError, PeerLost) as error:
                raise TransferRefused(f"cannot connect: {error}") from error
            self._threads = opened.enter_context(ThreadPoolExecutor(num_streams, "kv-stream"))
            self._opened = opened.pop_all()
        self._writing = threading.Lock()
        self._is_closed = False

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Distribute the batches over the streams and wait for every acknowledgement."""
        check_bounds(self._size_bytes, plan.source_offset, plan.size_bytes)
        num_streams = len(self._streams)
        share = max(SHARE_BYTES, -(-plan.total_bytes // num_streams))
        batches = list(plan.batches(min(share, frames.BATCH_BYTES), frames.MAX_COPIES))
        with self._writing:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            if num_streams == 1 or len(batches) == 1:  # a small write needs no thread
                return self._send(0, room, batches)
            futures = [
                self._threads.submit(self._send, number, room, batches[number::num_streams])
                for number in range(num_streams)
            ]
            # Wait for all, even if one fails: after an error no byte may be in flight.
            errors = [error for future in futures if (error := future.exception())]
        if errors:
            # TransferRefused promises that nothing is in flight, which does not hold if another stream broke.
            raise next((e for e in errors if not isinstance(e, TransferRefused)), errors[0])
        return None

    def _send(self, number: int, room: Room, batches: list[CopyPlan]) -> None:
        try:
            for batch in batches:
                self._lanes[number].send(room, batch)
        except PeerLost:
            frames.shut_down(
                self._streams[number]
            )  # the ends may disagree on the position in the stream
            raise

    def close(self) -> None:
        """Shut the streams down: a write in flight fails."""
        self._is_closed = True
        for stream in self._streams:
            frames.shut_down(stream)
        with self._writing:  # wait for the write: the numbers of closed descriptors are reused
            self._opened.close()


def open_stream(facts: TcpOffer, source_host: str = "") -> socket.socket:
    """Return a stream on which the listener has accepted this peer.

    Raises:
        OSError: The listener cannot be reached.
        PeerLost: The listener does not accept this peer.
    """
    stream = socket.create_connection(
        (facts.host, facts.port),
        frames.HANDSHAKE_TIMEOUT_S,
        source_address=(source_host, 0) if source_host else None,
    )
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = frames.receive_exactly(stream, frames.CHALLENGE_BYTES)
        stream.sendall(facts.peer.encode() + frames.proof(bytes.fromhex(facts.secret), challenge))
        frames.receive_exactly(stream, len(frames.ACCEPTED))
        stream.settimeout(None)
    except (OSError, PeerLost):
        stream.close()
        raise
    return stream


@contextlib.contextmanager
def announced(stream: socket.socket, room: Room, batch: CopyPlan) -> Iterator[None]:
    """Announce a batch, let the block send its bytes, and wait until they have landed.

    Raises:
        PeerLost: The stream broke, or the listener stopped in the middle of the batch.
        TransferRefused: The pages are not granted to this room.
    """
    frames.send_bytes(stream, frames.table_of(room, batch))
    if frames.receive_exactly(stream, 1) != READY:
        raise TransferRefused(f"the pages are not granted to room {room}")
    yield
    if frames.receive_exactly(stream, 1) != frames.LANDED:
        raise PeerLost("the listener stopped in the middle of a batch")


@contextlib.contextmanager
def handshake(stream: socket.socket) -> Iterator[None]:
    """Limit the time of each of the peer's answers in the block to `HANDSHAKE_TIMEOUT_S`."""
    stream.settimeout(frames.HANDSHAKE_TIMEOUT_S)
    yield
    stream.settimeout(None)


def send_blob(stream: socket.socket, blob: bytes) -> None:
    """Send bytes, preceded by their number."""
    frames.send_bytes(stream, len(blob).to_bytes(4, "little") + blob)


def receive_blob(stream: socket.socket) -> bytes:
    """Return the bytes that the peer sent with `send_blob`.

    Raises:
        PeerLost: The stream ended, or the peer announced more than `MAX_BLOB_BYTES`.
    """
    size_bytes = int.from_bytes(frames.receive_exactly(stream, 4), "little")
    if size_bytes > MAX_BLOB_BYTES:
        raise PeerLost(f"a handshake message has {size_bytes} bytes; the limit is {MAX_BLOB_BYTES}")
    return frames.receive_exactly(stream, size_bytes)
