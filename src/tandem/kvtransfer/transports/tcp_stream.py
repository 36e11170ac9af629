"""The protocol of a transfer over a TCP stream, and its receiving end.

```
 listener ──▶ 16 random bytes
 sender   ──▶ peer key (16), blake2b of those bytes keyed with the peer's secret (32)
 listener ──▶ one byte: ACCEPTED, or end of stream
 sender   ──▶ room int64, number of copies int64, then for each copy int64 offset and int64 size,
              then the bytes themselves, copy after copy                         ┐ repeated
 listener ──▶ one byte: LANDED, or REFUSED and end of stream                     ┘
```

Integers are little-endian. The secret is not sent on the stream: the offer contains it.

One thread accepts streams, and one thread per stream reads it directly into the pool. Bytes are read only if
their table lies inside a valid grant of that peer; anything else ends the stream and is counted. A stream that
reads into pages is marked with their room, so that a revocation or a fence can shut it down and wait until it
no longer uses the pages.

Transports that move bytes by other means use this listener too: peers authenticate and announce each batch on a
stream, and a `Lane` moves the bytes (`lanes.py`).
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

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.threads import start_thread
from tandem.kvtransfer.transports.base import PeerAdmission, PeerKey, Permits, Pool, new_peer_key
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

# A batch is checked and acknowledged as a whole: large enough to hide the round trip.
BATCH_BYTES = 64 << 20
# A table of 128 KiB. Senders make no larger one, so a listener rejects it.
MAX_COPIES = 8192
# The kernel's limit for one system call.
MAX_IOVECS = 1024
HANDSHAKE_TIMEOUT_S = 5.0
# Limit of unauthenticated streams; each holds a thread for at most 5 s.
MAX_STRANGERS = 64
ACCEPT_RETRY_S = 0.1


# ── the stream ───────────────────────────────────────────────────────────────────────────────────


def proof(secret: bytes, challenge: bytes) -> bytes:
    """Return the proof that the caller knows `secret`."""
    return hashlib.blake2b(challenge, key=secret, digest_size=PROOF_BYTES).digest()


def receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """Return the next `size_bytes` bytes. The socket's timeout limits the time for all of them.

    Raises:
        PeerLost: The stream ended, broke or timed out first.
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
            if timeout_s is not None:  # each call restarts the timeout, even after one byte
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
    """Wake the threads that send or receive on the socket, which closing does not."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def table_of(room: int, batch: CopyPlan) -> bytes:
    """Return the header and table of one batch."""
    table = np.stack((batch.destination_offset, batch.size_bytes), axis=1)
    return HEADER.pack(room, len(batch)) + table.astype("<i8").tobytes()


def plan_of(table: bytes) -> CopyPlan:
    """Return the plan of a received table; its sources are 0, because the stream is the source."""
    columns = np.frombuffer(table, "<i8").reshape(-1, 2)
    return CopyPlan(np.zeros(len(columns), np.int64), columns[:, 0], columns[:, 1])


# C's `struct msghdr` on 64 bits: name and size, iovecs and count, control data and size, flags.
_Message = ctypes.c_size_t * 7
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def receive_into(sock: socket.socket, address: Int64s, size_bytes: Int64s) -> None:
    """Fill ranges of this process's memory, which the caller has checked, from a stream without a timeout.

    Raises:
        PeerLost: The stream ended or broke first.
    """
    _move(_libc.recvmsg, sock, socket.MSG_WAITALL, address, size_bytes)


def send_from(sock: socket.socket, address: Int64s, size_bytes: Int64s) -> None:
    """Send ranges of this process's memory, which the caller has checked, over a stream without a timeout.

    Raises:
        PeerLost: The stream broke.
    """
    _move(_libc.sendmsg, sock, socket.MSG_NOSIGNAL, address, size_bytes)


def _move(
    call: Callable[..., int], sock: socket.socket, flags: int, address: Int64s, size_bytes: Int64s
) -> None:
    # The methods of `sock` need one object per range, which costs a tenth of moving 16 KiB.
    iovecs = np.stack((address, size_bytes), axis=1)
    ends = np.cumsum(size_bytes)
    num_moved = 0
    while num_moved < ends[-1]:
        first = int(np.searchsorted(ends, num_moved, "right"))
        part = iovecs[first : first + MAX_IOVECS].copy()
        num_moved_of_first = num_moved - (ends[first] - size_bytes[first])
        part[0] += num_moved_of_first, -num_moved_of_first
        message = _Message(0, 0, part.ctypes.data, len(part))
        moved = call(sock.fileno(), message, flags)
        if moved == 0:
            raise PeerLost("the stream ended")
        if moved < 0 and (number := ctypes.get_errno()) != errno.EINTR:
            raise PeerLost(f"the stream broke: {os.strerror(number)}")
        num_moved += max(0, moved)


# ── the listener ─────────────────────────────────────────────────────────────────────────────────


class TcpOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptor of an offer: the listener's address, and the peer's key and secret."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    peer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    secret: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


OpenPages = Callable[[CopyPlan], AbstractContextManager[None]]
"""Opens the destinations of a batch, or of a part of it, while they are written."""


class Lane(Protocol):
    """Moves the data of batches announced on a stream. Used by one thread at a time."""

    def send(self, room: Room, batch: CopyPlan) -> None:
        """At the sender: announce a batch and send it. Its sources are not read after this returns.

        Raises:
            PeerLost: The stream or the lane broke, or the stream was shut down.
            TransferRefused: The pages are not granted to this room.
        """
        ...

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """At the listener: fill the destinations of a batch. They are written only while they are open.

        Open them before reading anything: opening checks them. Shutting the stream down must end every wait
        for the peer.

        Raises:
            PeerLost: The stream or the lane broke.
            TransferRefused: The pages are not granted.
        """
        ...

    def close(self) -> None:
        """Release the lane's resources. The caller closes the stream, which may be shut down already."""
        ...


OpenLane = Callable[[socket.socket, MemoryRegion], Lane]
"""Makes the lane of an authenticated stream, for the own pool; raises PeerLost."""


class TcpLane:
    """The lane of `tcp`: the bytes follow their table on the stream."""

    def __init__(self, stream: socket.socket, region: MemoryRegion) -> None:
        self._stream = stream
        self._memory = region.array()  # keeps the region mapped
        self._address = region.address

    def send(self, room: Room, batch: CopyPlan) -> None:
        """Send table and bytes together, and wait for the answer."""
        table = np.frombuffer(table_of(room, batch), np.uint8)
        address = np.append(table.ctypes.data, batch.source_offset + self._address)
        lost: PeerLost | None = None
        try:
            send_from(self._stream, address, np.append(len(table), batch.size_bytes))
        except PeerLost as error:
            lost = error  # a listener that refuses closes the stream after its answer
        if receive_exactly(self._stream, 1) == REFUSED:
            raise TransferRefused(f"the pages are not granted to room {room}") from lost

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """Read directly into the pages."""
        with open_pages(batch):
            receive_into(self._stream, batch.destination_offset + self._address, batch.size_bytes)

    def close(self) -> None:
        """Do nothing: the owner closes the stream."""


@dataclass(slots=True)
class _AdmittedPeer:
    """One admitted peer. `reading` maps each of its streams to the room whose pages it reads into, or None."""

    secret: bytes
    permits: Permits
    is_fenced: bool = False
    reading: dict[socket.socket, Room | None] = field(default_factory=dict)


class TcpListener:
    """Listens on one port for all peers of a pool.

    Args:
        name: Name of the transport in offers.
        port: Port to listen on; 0: any free port.

    Attributes:
        num_violations: Number of streams ended because of their content.
    """

    def __init__(
        self,
        pool: Pool,
        host: str,
        name: str = "tcp",
        open_lane: OpenLane = TcpLane,
        port: int = 0,
    ) -> None:
        self._pool, self._host = pool, host.strip("[]")
        self._name, self._open_lane = name, open_lane
        self._peers: dict[PeerKey, _AdmittedPeer] = {}
        self._num_streams = 0  # authenticated streams, including those of fenced peers
        self._changed = threading.Condition()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._closing = threading.Event()
        self.num_violations = 0
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._server = socket.create_server(
                (self._host, port), family=family, backlog=128, dualstack_ipv6=self._host == "::"
            )
        except OSError as error:
            raise ConfigInvalid(
                f"cannot listen on {host}, port {port}: {error.strerror}; --host must be an address of this machine, "
                "and --transfer-port a free port"
            ) from error
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def admit(self, toward_host: str) -> PeerAdmission:
        """Make a key and a secret for one more peer."""
        key, secret = new_peer_key(), secrets.token_bytes(32)
        with self._changed:
            self._peers[key] = _AdmittedPeer(secret, Permits(self._pool))
        offer = TcpOffer(
            host=address_toward(toward_host, self._host),
            port=self._server.getsockname()[1],
            peer=key,
            secret=secret.hex(),
        )
        descriptor = msgspec.structs.asdict(offer)
        return PeerAdmission(key, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Accept batches of `room` inside these pages."""
        with self._changed:
            self._peers[peer].permits.permit(room, page_ids)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Refuse further batches of `room`; shut down a stream that still sends one, against the protocol."""
        with self._changed:
            if (known := self._peers.get(peer)) is None:
                return
            known.permits.revoke(room)
            for stream, reads in known.reading.items():
                if reads == room:
                    shut_down(stream)
            self._changed.wait_for(lambda: room not in known.reading.values())

    def fence(self, peer: PeerKey) -> None:
        """Delete the secret, shut the streams down, and wait until none has pages open."""
        with self._changed:
            if (known := self._peers.pop(peer, None)) is None:
                return
            known.is_fenced = True
            for stream in known.reading:
                shut_down(stream)
            self._changed.wait_for(lambda: all(room is None for room in known.reading.values()))

    def close(self) -> None:
        """Stop listening, fence all peers, and wait for the threads of their streams, which use the pool."""
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
            except OSError as error:  # closed, or no descriptor is free now
                if self._closing.wait(ACCEPT_RETRY_S):
                    return
                log.warning("kv_stream.not_accepted", reason=error.strerror)
                continue
            if not self._strangers.acquire(blocking=False):
                stream.close()
                continue
            try:
                start_thread("kv-receive", partial(self._serve, stream))
            except TransferFailed as error:  # no thread is available now
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

    def _greet(self, stream: socket.socket) -> _AdmittedPeer:
        # Answers are one byte each: without this option the second waits 40 ms for the ACK of the first.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(HANDSHAKE_TIMEOUT_S)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        send_bytes(stream, challenge)
        answer = receive_exactly(stream, KEY_BYTES + PROOF_BYTES)
        key = PeerKey(answer[:KEY_BYTES].decode("ascii", "replace"))
        with self._changed:
            peer = self._peers.get(key)
            # Compare even for an unknown peer, so that the time reveals nothing.
            expected = proof(peer.secret if peer else bytes(32), challenge)
            if not hmac.compare_digest(expected, answer[KEY_BYTES:]) or peer is None:
                raise TransferRefused("the stream did not prove the secret of an admitted peer")
            stream.settimeout(None)
            peer.reading[stream] = None  # `_serve` removes it
            self._num_streams += 1
        return peer

    def _receive_batches(self, stream: socket.socket, peer: _AdmittedPeer, lane: Lane) -> None:
        try:
            while True:
                self._receive_batch(stream, peer, lane)
        except TransferRefused as error:
            self._count(error)
            send_bytes(stream, REFUSED)

    def _receive_batch(self, stream: socket.socket, peer: _AdmittedPeer, lane: Lane) -> None:
        room, num_copies = HEADER.unpack(receive_exactly(stream, HEADER.size))
        if not 0 < num_copies <= MAX_COPIES:
            raise TransferRefused(f"a table has {num_copies} copies; the limit is {MAX_COPIES}")
        batch = plan_of(receive_exactly(stream, num_copies * COPY_BYTES))
        lane.receive(batch, partial(self._open_pages, stream, peer, Room(room)))
        send_bytes(stream, LANDED)

    @contextlib.contextmanager
    def _open_pages(
        self, stream: socket.socket, peer: _AdmittedPeer, room: Room, batch: CopyPlan
    ) -> Iterator[None]:
        with self._changed:
            if peer.is_fenced:
                raise PeerLost("the peer is fenced")
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
            probe.connect((bare, 9))  # selects a route; a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # unknown host, or an invalid name
        return socket.gethostname()
