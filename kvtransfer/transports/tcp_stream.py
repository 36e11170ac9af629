"""What the two ends of a TCP stream exchange, and the receiving end.

```
 listener ──▶ 16 random bytes
 sender   ──▶ peer key (16), blake2b of those bytes keyed with the peer's secret (32)
 listener ──▶ one byte: ACCEPTED, or the end
 sender   ──▶ room int64, number of copies int64, then for each copy int64 offset and int64 size,
              then the bytes themselves, copy after copy                         ┐ repeated
 listener ──▶ one byte: LANDED, or REFUSED and the end                           ┘
```

Integers are little-endian. The secret itself never travels here: it came with the offer.

A thread accepts, and one more serves each stream, which it reads straight into the pool. Bytes are
read only when their table lies inside a live grant of that peer; anything else ends the stream and is
counted. A stream that reads into pages is marked with their room, so that a revocation or a fence can
cut it and wait until it has let go of the pages.

Transports that move bytes by other means listen here too: peers prove themselves and announce each
batch on a stream, and a `Lane` beside it brings the bytes (`lanes.py`).
"""

import contextlib
import ctypes
import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Protocol

import msgspec
import numpy as np

from tandem.kvtransfer.control import start_thread
from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Admission, PeerKey, Permits, Pool, new_peer_key
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferFailed, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

log = get_logger("kvtransfer.tcp")

HEADER = struct.Struct("<qq")
CHALLENGE_BYTES = 16
KEY_BYTES = 16
PROOF_BYTES = 32
COPY_BYTES = 16
ACCEPTED, LANDED, REFUSED = b"\x02", b"\x01", b"\x00"

# A batch is checked and acknowledged as a whole: long enough to hide the round trip.
BATCH_BYTES = 64 << 20
# A table of 128 KiB. No honest sender passes it, so a listener reads no larger one.
MAX_COPIES = 8192
# The kernel's limit for one system call.
MAX_IOVECS = 1024
HANDSHAKE_TIMEOUT_S = 5.0
# Streams that have not yet proved who they are; each holds a thread for at most 5 s.
MAX_STRANGERS = 64
ACCEPT_RETRY_S = 0.1


# ── what is on a stream ──────────────────────────────────────────────────────────────────────────


def proof(secret: bytes, challenge: bytes) -> bytes:
    """Return what shows that the caller knows `secret`."""
    return hashlib.blake2b(challenge, key=secret, digest_size=PROOF_BYTES).digest()


def receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """Return the next `size_bytes` bytes. A timeout of the socket is the time for all of them.

    Raises:
        PeerLost: The stream ended, broke or timed out before.
    """
    data = bytearray(size_bytes)
    left = memoryview(data)
    timeout_s = sock.gettimeout()
    until_s = time.monotonic() + (timeout_s or 0.0)
    try:
        while left:
            if not (received := sock.recv_into(left, 0, socket.MSG_WAITALL)):
                raise PeerLost("the stream ended")
            left = left[received:]
            if timeout_s is not None:  # each call would begin it again, for a byte
                sock.settimeout(max(0.0, until_s - time.monotonic()) if left else timeout_s)
    except OSError as error:
        raise PeerLost(f"the stream broke: {error}") from error
    return bytes(data)


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Send all of `data`.

    Raises:
        PeerLost: The stream broke.
    """
    try:
        sock.sendall(data)
    except OSError as error:
        raise PeerLost(f"the stream broke: {error}") from error


def shut_down(sock: socket.socket) -> None:
    """Wake the threads that send or receive on the socket; closing alone does not."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def table_of(room: int, batch: CopyPlan) -> bytes:
    """Return the header and table of one batch."""
    table = np.stack((batch.destination_offset, batch.size_bytes), axis=1)
    return HEADER.pack(room, len(batch)) + table.astype("<i8").tobytes()


def plan_of(table: bytes) -> CopyPlan:
    """Return the destinations in a received table; the source side is the stream."""
    columns = np.frombuffer(table, "<i8").reshape(-1, 2)
    return CopyPlan(np.zeros(len(columns), np.int64), columns[:, 0], columns[:, 1])


# C's `struct msghdr` on 64 bits: name and its size, pieces and their number, control data and its size, flags.
_Message = ctypes.c_size_t * 7
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def receive_into(sock: socket.socket, address: Int64s, size_bytes: Int64s) -> None:
    """Fill pieces of this process's memory, which the caller has checked, from a stream without a timeout.

    Raises:
        PeerLost: The stream ended or broke before.
    """
    _move(_libc.recvmsg, sock, socket.MSG_WAITALL, address, size_bytes)


def send_from(sock: socket.socket, address: Int64s, size_bytes: Int64s) -> None:
    """Send pieces of this process's memory, which the caller has checked, over a stream without a timeout.

    Raises:
        PeerLost: The stream broke.
    """
    _move(_libc.sendmsg, sock, socket.MSG_NOSIGNAL, address, size_bytes)


def _move(
    call: Callable[..., int], sock: socket.socket, flags: int, address: Int64s, size_bytes: Int64s
) -> None:
    # Not the methods of `sock`: they want an object for each piece, which costs a tenth of moving 16 KiB.
    iovecs = np.stack((address, size_bytes), axis=1)
    ends = np.cumsum(size_bytes)
    num_moved = 0
    while num_moved < ends[-1]:
        first = int(np.searchsorted(ends, num_moved, "right"))
        some = iovecs[first : first + MAX_IOVECS].copy()
        begun = num_moved - (ends[first] - size_bytes[first])
        some[0] += begun, -begun
        message = _Message(0, 0, some.ctypes.data, len(some))
        moved = call(sock.fileno(), message, flags)
        if moved == 0:
            raise PeerLost("the stream ended")
        if moved < 0 and (number := ctypes.get_errno()) != errno.EINTR:
            raise PeerLost(f"the stream broke: {os.strerror(number)}")
        num_moved += max(0, moved)


# ── the listener ─────────────────────────────────────────────────────────────────────────────────


class TcpOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptor: where to connect, and as whom."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    peer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    secret: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


OpenPages = Callable[[CopyPlan], AbstractContextManager[None]]
"""Opens the destinations of a batch, or of part of it, for as long as they are written."""


class Lane(Protocol):
    """Brings the bytes of the batches that one stream announces. One thread at a time uses it."""

    def send(self, room: Room, batch: CopyPlan) -> None:
        """At the sender: announce a batch and send it. No byte of its sources is read afterwards.

        Raises:
            PeerLost: The stream or the lane broke, or the stream was shut down meanwhile.
            TransferRefused: The pages are not granted to this room.
        """
        ...

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """At the listener: fill the destinations of a batch. They are touched only while they are open.

        Nothing is read before they were opened once, since that checks them. Waiting for the peer
        ends when the stream is shut down.

        Raises:
            PeerLost: The stream or the lane broke.
            TransferRefused: The pages are not granted.
        """
        ...

    def close(self) -> None:
        """Give back what the lane holds. The stream may be shut down, and is its caller's to close."""
        ...


OpenLane = Callable[[socket.socket, MemoryRegion], Lane]
"""Makes a lane beside a stream whose ends have accepted each other, for the own pool; raises PeerLost."""


class TcpLane:
    """The stream itself: the bytes follow their table."""

    def __init__(self, stream: socket.socket, region: MemoryRegion) -> None:
        self._stream = stream
        self._memory = region.array()  # stays mapped with it
        self._address = region.address

    def send(self, room: Room, batch: CopyPlan) -> None:
        """Send table and bytes in one go, and wait for the answer."""
        table = np.frombuffer(table_of(room, batch), np.uint8)
        address = np.append(table.ctypes.data, batch.source_offset + self._address)
        lost: PeerLost | None = None
        try:
            send_from(self._stream, address, np.append(len(table), batch.size_bytes))
        except PeerLost as error:
            lost = error  # a listener that refuses hangs up, but its answer is there to read
        if receive_exactly(self._stream, 1) == REFUSED:
            raise TransferRefused(f"the pages are not granted to room {room}") from lost

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """Read straight into the pages."""
        with open_pages(batch):
            receive_into(self._stream, batch.destination_offset + self._address, batch.size_bytes)

    def close(self) -> None:
        """Do nothing: the stream is closed by its owner."""


@dataclass(slots=True)
class _Peer:
    """One admitted peer. `reading` has its streams, and the room whose pages each reads into."""

    secret: bytes
    permits: Permits
    is_fenced: bool = False
    reading: dict[socket.socket, Room | None] = field(default_factory=dict)


class TcpListener:
    """Listens on one port for all peers of a pool.

    Args:
        name: Of the transport, for its offers.

    Attributes:
        num_violations: Streams ended because of what they sent.
    """

    def __init__(
        self,
        pool: Pool,
        host: str,
        name: str = "tcp",
        open_lane: OpenLane = TcpLane,
    ) -> None:
        self._pool, self._host = pool, host.strip("[]")
        self._name, self._open_lane = name, open_lane
        self._peers: dict[PeerKey, _Peer] = {}
        self._num_streams = 0  # of peers, fenced ones too
        self._changed = threading.Condition()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._closing = threading.Event()
        self.num_violations = 0
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._server = socket.create_server(
                (self._host, 0), family=family, backlog=128, dualstack_ipv6=self._host == "::"
            )
        except OSError as error:
            raise ConfigInvalid(
                f"cannot listen on {host}: {error.strerror}; --host must be an address of this machine"
            ) from error
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def admit(self, toward_host: str) -> Admission:
        """Make a secret for one more peer."""
        key, secret = new_peer_key(), secrets.token_bytes(32)
        with self._changed:
            self._peers[key] = _Peer(secret, Permits(self._pool))
        offer = TcpOffer(
            host=address_toward(toward_host, self._host),
            port=self._server.getsockname()[1],
            peer=key,
            secret=secret.hex(),
        )
        descriptor = msgspec.structs.asdict(offer)
        return Admission(key, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Accept headers of `room` inside these pages."""
        with self._changed:
            self._peers[peer].permits.permit(room, page_ids)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Accept none any more; cut a stream that breaks its word and still sends."""
        with self._changed:
            if (known := self._peers.get(peer)) is None:
                return
            known.permits.revoke(room)
            for stream, reads in known.reading.items():
                if reads == room:
                    shut_down(stream)
            self._changed.wait_for(lambda: room not in known.reading.values())

    def fence(self, peer: PeerKey) -> None:
        """Forget the secret, cut the streams, wait until none has pages open."""
        with self._changed:
            if (known := self._peers.pop(peer, None)) is None:
                return
            known.is_fenced = True
            for stream in known.reading:
                shut_down(stream)
            self._changed.wait_for(lambda: all(room is None for room in known.reading.values()))

    def close(self) -> None:
        """Stop listening, fence everybody, and wait for the threads of their streams, which look at the pool."""
        self._closing.set()
        shut_down(self._server)
        self._acceptor.join()
        self._server.close()
        for peer in list(self._peers):
            self.fence(peer)
        with self._changed:
            self._changed.wait_for(lambda: not self._num_streams, HANDSHAKE_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._server.accept()
            except OSError as error:  # closed, or no descriptor is free: one may be, later
                if self._closing.wait(ACCEPT_RETRY_S):
                    return
                log.warning("kv_stream.not_accepted", reason=error.strerror)
                continue
            if not self._strangers.acquire(blocking=False):
                stream.close()
                continue
            try:
                start_thread("kv-receive", partial(self._serve, stream))
            except TransferFailed as error:  # there may be one, later
                self._strangers.release()
                stream.close()
                log.warning("kv_stream.not_accepted", reason=str(error))

    def _serve(self, stream: socket.socket) -> None:
        with stream:
            try:
                peer = self._greet(stream)
            except (PeerLost, TransferRefused) as error:
                return self._count(error)
            finally:
                self._strangers.release()
            try:
                send_bytes(stream, ACCEPTED)
                with contextlib.closing(self._open_lane(stream, self._pool.region)) as lane:
                    self._receive_batches(stream, peer, lane)
            except PeerLost:
                return None
            finally:
                with self._changed:
                    del peer.reading[stream]
                    self._num_streams -= 1
                    self._changed.notify_all()

    def _greet(self, stream: socket.socket) -> _Peer:
        # Answers are a byte each: without it the second waits 40 ms for the first to be acknowledged.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(HANDSHAKE_TIMEOUT_S)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        send_bytes(stream, challenge)
        answer = receive_exactly(stream, KEY_BYTES + PROOF_BYTES)
        key = PeerKey(answer[:KEY_BYTES].decode("ascii", "replace"))
        with self._changed:
            peer = self._peers.get(key)
            # Compared even for the unknown, so that the time it takes reveals nothing.
            expected = proof(peer.secret if peer else bytes(32), challenge)
            if not hmac.compare_digest(expected, answer[KEY_BYTES:]) or peer is None:
                raise TransferRefused("a stream without the secret of a live peer")
            stream.settimeout(None)
            peer.reading[stream] = None  # from here on `_serve` sees to it that it goes again
            self._num_streams += 1
        return peer

    def _receive_batches(self, stream: socket.socket, peer: _Peer, lane: Lane) -> None:
        try:
            while True:
                self._receive_batch(stream, peer, lane)
        except TransferRefused as error:
            self._count(error)
            send_bytes(stream, REFUSED)

    def _receive_batch(self, stream: socket.socket, peer: _Peer, lane: Lane) -> None:
        room, num_copies = HEADER.unpack(receive_exactly(stream, HEADER.size))
        if not 0 < num_copies <= MAX_COPIES:
            raise TransferRefused(f"a table of {num_copies} copies")
        batch = plan_of(receive_exactly(stream, num_copies * COPY_BYTES))
        lane.receive(batch, partial(self._open_pages, stream, peer, Room(room)))
        send_bytes(stream, LANDED)

    @contextlib.contextmanager
    def _open_pages(
        self, stream: socket.socket, peer: _Peer, room: Room, batch: CopyPlan
    ) -> Iterator[None]:
        with self._changed:
            if peer.is_fenced:
                raise PeerLost("fenced")
            peer.permits.check(room, batch)
            peer.reading[stream] = room
        try:
            yield
        finally:
            # Before the answer: a revocation that follows it must not find the stream reading.
            with self._changed:
                peer.reading[stream] = None
                self._changed.notify_all()

    def _count(self, error: PeerLost | TransferRefused) -> None:
        self.num_violations += 1
        log.warning("kv_stream.refused", reason=str(error))


def address_toward(host: str, bound: str) -> str:
    """Return the address of this machine that `host` can connect to."""
    if bound not in ("0.0.0.0", "::"):
        return bound
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((bare, 9))  # a datagram socket sends nothing: it only picks a route
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # no such host, or no name of one
        return socket.gethostname()
