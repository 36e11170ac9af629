"""Sockets between any two hosts: several streams, straight from and into pool memory.

This file has the transport and the sending end; `tcp_stream` has what the two ends exchange, and the receiving
end. A write is done when the listener has acknowledged that every byte is in memory.
"""

import fcntl
import ipaddress
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool, TransportConfig, check_bounds, need_cpu_memory
from tandem.kvtransfer.transports.tcp_stream import TcpListener, TcpOffer
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

# Below this a second stream costs more than it brings.
SHARE_BYTES = 4 << 20
SIOCGIFADDR = 0x8915  # netdevice(7)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


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
        PeerLost: The listener there does not accept us.
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


# ── network interfaces ───────────────────────────────────────────────────────────────────────────


def address_of(name: str, family: socket.AddressFamily) -> str:
    """Return the IPv4 (AF_INET) or IPv6 (AF_INET6) address of a network interface.

    Raises:
        ConfigInvalid: There is no such interface, or it has no such address.
    """
    names = [each for _, each in socket.if_nameindex()]
    if name not in names:
        raise ConfigInvalid(
            f"--transfer-interface {name}: there is no such network interface; "
            f"there are: {', '.join(names)}"
        )
    if found := _ipv6(name) if family is socket.AF_INET6 else _ipv4(name):
        return found
    kind, other = ("IPv6", "0.0.0.0") if family is socket.AF_INET6 else ("IPv4", "::")
    raise ConfigInvalid(
        f"--transfer-interface {name} has no {kind} address; --host says which kind: try {other}"
    )


def family_of(host: str) -> socket.AddressFamily:
    """Return which kind of address a host is; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _ipv4(name: str) -> str:
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(name: str) -> str:
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return ""
    for line in lines:
        digits, _, _, _, _, interface = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        # Link-local ones mean something else on each host.
        if interface == name and not address.is_link_local:
            return str(address)
    return ""
