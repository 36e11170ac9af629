"""Sockets between any two hosts: several streams, straight from and into pool memory.

This file has the transport and the sending end; `tcp_listener` receives, `tcp_frames` has what is
said on a stream. A write is done when the listener has acknowledged that every byte is in memory.
"""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_frames as frames
from tandem.kvtransfer.transports.base import Pool, TransportConfig, check_bounds, need_cpu_memory
from tandem.kvtransfer.transports.interfaces import address_of, family_of
from tandem.kvtransfer.transports.tcp_listener import TcpListener, TcpOffer
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tandem.wire.ids import Room

# Below this a second stream costs more than it brings.
SHARE_BYTES = 4 << 20


class TcpTransport:
    """TCP with scatter and gather.

    Raises:
        ConfigInvalid: There is no such network interface, or it has no address.
    """

    name = "tcp"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config = config or TransportConfig()
        self._host = config.host
        if config.interface:
            self._host = address_of(config.interface, family_of(config.host))

    def listen(self, pool: Pool) -> TcpListener:
        """Begin to receive on a free port.

        Raises:
            ConfigInvalid: The host is not an address of this machine, or the pool is not the CPU's.
        """
        need_cpu_memory(self.name, pool)
        return TcpListener(pool, self._host)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "TcpConnection":
        """Open the streams.

        Raises:
            TransferRefused: Nobody answers at the offer's address.
        """
        return TcpConnection(offer, region, self._config)


class TcpConnection:
    """Streams to one listener, each fed by a thread of its own."""

    def __init__(
        self, offer: TransportOffer, region: MemoryRegion, config: TransportConfig
    ) -> None:
        self._view = region.buffer
        self._streams: list[socket.socket] = []
        try:
            facts = msgspec.convert(offer.descriptor, TcpOffer)
            for _ in range(config.num_streams):
                self._streams.append(open_stream(facts, config.interface))
        except (msgspec.ValidationError, OSError, PeerLost, ConfigInvalid) as error:
            self._hang_up()
            raise TransferRefused(f"cannot open a stream: {error}") from error
        self._threads = ThreadPoolExecutor(config.num_streams, "kv-stream")
        self._writing = threading.Lock()
        self._is_closed = False

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Deal the batches out to the streams and wait for every acknowledgement."""
        check_bounds(len(self._view), plan.source_offset, plan.size_bytes)
        share = max(SHARE_BYTES, -(-plan.total_bytes // len(self._streams)))
        batches = list(plan.batches(min(share, frames.BATCH_BYTES), frames.MAX_COPIES))
        with self._writing:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            if len(batches) == 1:  # no thread for what is small
                return self._send(self._streams[0], room, batches)
            futures = [
                self._threads.submit(self._send, stream, room, batches[i :: len(self._streams)])
                for i, stream in enumerate(self._streams)
            ]
            # All of them, also when one fails: after an error no byte of ours may be under way.
            errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise errors[0]
        return None

    def _send(self, stream: socket.socket, room: Room, batches: list[CopyPlan]) -> None:
        for batch in batches:
            views = [self._view[begin : begin + size] for begin, _, size in batch.copies()]
            lost: PeerLost | None = None
            try:
                frames.send_from(stream, [memoryview(frames.table_of(room, batch)), *views])
            except PeerLost as error:
                lost = error  # a listener that refuses hangs up, but its answer is there to read
            if frames.receive_exactly(stream, 1) == frames.REFUSED:
                raise TransferRefused(f"the pages are not granted to room {room}") from lost

    def close(self) -> None:
        """Cut the streams: a write under way fails."""
        self._is_closed = True
        for stream in self._streams:
            frames.shut_down(stream)
        with self._writing:  # no thread may still use a descriptor whose number goes to others
            self._hang_up()
            self._threads.shutdown()

    def _hang_up(self) -> None:
        for stream in self._streams:
            stream.close()


def open_stream(facts: TcpOffer, interface: str = "") -> socket.socket:
    """Return a stream on which the listener has accepted us.

    Args:
        interface: To send from; empty for the one that routing picks.

    Raises:
        OSError: Nobody answers there.
        PeerLost: Whoever does, does not accept us.
        ConfigInvalid: There is no such interface.
    """
    # From the interface's address: binding to the device itself takes rights that nodes should not need.
    source = (address_of(interface, family_of(facts.host)), 0) if interface else None
    stream = socket.create_connection(
        (facts.host, facts.port), frames.HANDSHAKE_TIMEOUT_S, source_address=source
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
