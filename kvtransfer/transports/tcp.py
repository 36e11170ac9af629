"""Sockets between any two hosts: several streams, straight from and into pool memory.

Here is the sending end; `tcp_stream` has the listener and what goes over a stream. A write is done when the
listener has acknowledged that every byte is in memory.
"""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import psutil

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import (
    Pool,
    TransportConfig,
    check_bounds,
    need_cpu_memory,
    read_offer,
)
from tandem.kvtransfer.transports.tcp_stream import TcpListener, TcpOffer
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

# One stream fills 10 Gbit/s; several are for the links above that.
NUM_STREAMS = 4
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
        """Begin to receive on a free port."""
        need_cpu_memory(self.name, pool)
        return TcpListener(pool, self._host)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "TcpConnection":
        """Open the streams."""
        source_host = ""
        if interface := self._config.interface:
            # By address: binding to the device itself takes rights that nodes should not need.
            try:
                source_host = address_of(interface, family_of(str(offer.descriptor.get("host"))))
            except ConfigInvalid as error:
                raise TransferRefused(f"cannot open a stream: {error}") from error
        return TcpConnection(offer, region, source_host)


class TcpConnection:
    """Streams to one listener, which share large writes.

    Args:
        source_host: Address to send from; empty for the one that routing picks.

    Raises:
        TransferRefused: Nobody answers, or the listener there does not accept us.
    """

    def __init__(self, offer: TransportOffer, region: MemoryRegion, source_host: str) -> None:
        self._source = region.buffer
        self._streams: list[socket.socket] = []
        facts = read_offer(offer, TcpOffer)
        with contextlib.ExitStack() as opened:
            try:
                for _ in range(NUM_STREAMS):
                    self._streams.append(opened.enter_context(open_stream(facts, source_host)))
            except (OSError, PeerLost) as error:
                raise TransferRefused(f"cannot connect: {error}") from error
            self._threads = opened.enter_context(ThreadPoolExecutor(NUM_STREAMS, "kv-stream"))
            self._opened = opened.pop_all()
        self._writing = threading.Lock()
        self._is_closed = False

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Deal the batches out to the streams and wait for every acknowledgement."""
        check_bounds(len(self._source), plan.source_offset, plan.size_bytes)
        share = max(SHARE_BYTES, -(-plan.total_bytes // NUM_STREAMS))
        batches = list(plan.batches(min(share, frames.BATCH_BYTES), frames.MAX_COPIES))
        with self._writing:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            if len(batches) == 1:  # no thread for what is small
                return self._send(self._streams[0], room, batches)
            futures = [
                self._threads.submit(self._send, stream, room, batches[number::NUM_STREAMS])
                for number, stream in enumerate(self._streams)
            ]
            # All of them, also when one fails: after an error no byte of ours may be under way.
            errors = [error for future in futures if (error := future.exception())]
        if errors:
            # A refusal promises that nothing is under way: not where another stream broke.
            raise next((e for e in errors if not isinstance(e, TransferRefused)), errors[0])
        return None

    def _send(self, stream: socket.socket, room: Room, batches: list[CopyPlan]) -> None:
        try:
            for batch in batches:
                self._send_batch(stream, room, batch)
        except PeerLost:
            frames.shut_down(stream)  # the ends may differ on where the stream is
            raise

    def _send_batch(self, stream: socket.socket, room: Room, batch: CopyPlan) -> None:
        """Send table and bytes in one go, and wait for the answer."""
        views = [self._source[begin : begin + size] for begin, _, size in batch.copies()]
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
            self._opened.close()


def open_stream(facts: TcpOffer, source_host: str = "") -> socket.socket:
    """Return a stream on which the listener has accepted us.

    Raises:
        OSError: Nobody answers there.
        PeerLost: The listener there does not accept us.
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


# ── network interfaces ───────────────────────────────────────────────────────────────────────────


def address_of(name: str, family: socket.AddressFamily) -> str:
    """Return the IPv4 (AF_INET) or IPv6 (AF_INET6) address of a network interface.

    Raises:
        ConfigInvalid: There is no such interface, or it has no such address.
    """
    found = psutil.net_if_addrs()
    if name not in found:
        raise ConfigInvalid(
            f"--transfer-interface {name}: there is no such network interface; "
            f"there are: {', '.join(found)}"
        )
    for each in found[name]:
        # Link-local ones mean something else on each host.
        if each.family is family and not ip_address(each.address).is_link_local:
            return str(each.address)
    kind, other = ("IPv6", "0.0.0.0") if family is socket.AF_INET6 else ("IPv4", "::")
    raise ConfigInvalid(
        f"--transfer-interface {name} has no {kind} address; --host says which kind: try {other}"
    )


def family_of(host: str) -> socket.AddressFamily:
    """Return which kind of address a host is; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
