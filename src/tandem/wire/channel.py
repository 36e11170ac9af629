"""A framed channel over ZMQ: typed messages, a size limit, liveness and close.

```
 Link (DEALER, connects) ───── one msgpack frame per message ─────▶ Inbox (ROUTER, binds)
 AsyncLink (async_link.py): the connecting end for asyncio
```

This file sets the socket options and does not interpret messages. Nothing here is thread-safe: a socket
belongs to the thread that created it. Another thread interrupts `wait` through a `Waker`.

All links of a process share libzmq's one I/O thread, which must never block. A link therefore takes an IP
address: libzmq would resolve a host name in that thread.

Liveness is the heartbeat of ZMTP. The I/O thread answers it while our loop computes, so a busy peer stays
connected. A dead, stopped or unreachable peer is disconnected after `Heartbeat.timeout_s`.
"""

import contextlib
import errno
import itertools
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq

from tandem.telemetry.log import get_logger
from tandem.wire.errors import (
    ConfigInvalid,
    MessageInvalid,
    MessageTooLarge,
    PeerBehind,
    PeerLost,
)
from tandem.wire.handshakes import Handshakes
from tandem.wire.hosts import is_address, listener_on
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

log = get_logger(__name__)

# The largest message is a prompt: 1M token ids are 5 MB of msgpack.
MAX_MESSAGE_BYTES = 16 << 20
# Unread messages per peer. A step is one message: at 100 steps/s a peer may stall for 80 s before it counts
# as lost and its queue is freed.
HIGH_WATER_MARK = 8192
# Limit of frames that a loop reads per turn, so that a flooding peer does not delay its other work. An inbox alternates
# between peers, so each of up to this many peers is read in every turn and does not seem silent.
FRAMES_PER_TURN = 4096
# Time for the I/O thread to close a port. None of its tasks takes longer than a millisecond.
UNBIND_TIMEOUT_S = 5.0
# Time for the last messages of a closed socket, which take microseconds on a connection that works.
LINGER_MS = 100
MIN_INTERVAL_S = 0.02
MAX_INTERVAL_S = 60.0
# File descriptors of a connecting link: the connection, libzmq's socket and both ends of its monitor. At the
# bound end a link takes one.
DESCRIPTORS_PER_LINK = 4
# Descriptors for everything but links and clients: torch holds about 40; the rest is headroom.
OTHER_DESCRIPTORS = 128
OPEN_FILES_REMEDY = "raise its limit of open files (ulimit -n, or LimitNOFILE= in a systemd unit)"

In = TypeVar("In", bound=Message)


def raise_descriptor_limit(num_needed: int, used_for: str) -> None:
    """Raise the soft limit of open files to the hard limit; log a warning if that is too low.

    Args:
        num_needed: Descriptors needed in addition to `OTHER_DESCRIPTORS`.
        used_for: Their use, such as `40 nodes and 4096 clients`.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # some kernels report a hard limit and then reject it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = OTHER_DESCRIPTORS + num_needed
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        log.warning(
            "descriptors.too_few",
            limit=limit,
            needed=needed,
            used_for=used_for,
            effect="connections and links beyond the limit are refused",
            action=f"ulimit -n {needed}, or LimitNOFILE={needed} in a systemd unit",
            see="docs/troubleshooting.md#open-files",
        )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat timing of a process's links.

    Attributes:
        interval_s: Seconds between heartbeats. A lost peer is detected within four intervals.
        pause_s: Additional silence that is no loss, for a peer whose death ends its connection.
        busy_s: Seconds for which the peer of a KV link may send nothing while it stays connected.
    """

    interval_s: float = 0.5
    pause_s: float = 0.0
    busy_s: float = 10.0

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for the answer to a heartbeat. The next one after a peer's death is sent within an interval."""
        return 3 * self.interval_s + self.pause_s

    @property
    def silence_s(self) -> float:
        """Silence after which a peer counts as lost, if it is polled several times an interval."""
        return 3.5 * self.interval_s + self.pause_s


DEFAULT_HEARTBEAT = Heartbeat()


def heartbeat_of(interval_ms: float) -> Heartbeat:
    """Return the timing for a value of `--heartbeat-interval-ms`.

    Raises:
        ConfigInvalid: The interval is too short for a busy machine, or too long to be useful.
    """
    interval_s = interval_ms / 1000
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigInvalid(
            f"--heartbeat-interval-ms {interval_ms:g} is out of range: use {MIN_INTERVAL_S * 1000:g} to "
            f"{MAX_INTERVAL_S * 1000:g}"
        )
    return Heartbeat(interval_s)


class Codec(Generic[In]):
    """Encodes every message and decodes the messages of one direction.

    Args:
        incoming: Union of the message structs to accept.
    """

    def __init__(self, incoming: Any, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._limit_bytes = limit_bytes

    def encode(self, message: Message) -> bytes:
        """Return the frame of `message`.

        Raises:
            MessageTooLarge: The frame exceeds the limit.
        """
        frame = self._encoder.encode(message)
        if len(frame) > self._limit_bytes:
            raise MessageTooLarge(len(frame), self._limit_bytes)
        return frame

    def decode(self, frame: bytes) -> In:
        """Return the message in `frame`.

        Raises:
            MessageTooLarge: The frame exceeds the limit.
            MessageInvalid: The bytes are not a message of this direction.
        """
        if len(frame) > self._limit_bytes:
            raise MessageTooLarge(len(frame), self._limit_bytes)
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageInvalid(f"not a message of this channel: {error}") from error


class Peer(bytes):
    """ZMQ routing identity of a link that is connected to an inbox."""


@dataclass(frozen=True, slots=True)
class Envelope(Generic[In]):
    """A received message and its sender, to whom answers are addressed."""

    peer: Peer
    message: In


def _new_socket(kind: int) -> zmq.Socket[bytes]:
    """Return a socket of the process's shared context."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    # Takes effect when the first socket is created. The default allows 341 links.
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context.socket(kind)


def _reason(error: zmq.ZMQError) -> str:
    """Return why a socket could not be created, bound or connected, and the remedy if there is one."""
    is_limit = error.errno in (errno.EMFILE, errno.ENFILE)
    return f"{error.strerror}: {OPEN_FILES_REMEDY}" if is_limit else str(error.strerror)


def _holder(address: str, error: zmq.ZMQError) -> str:
    """Return `, by PROCESS` for an address in use; empty if the process is unknown."""
    port = address.rpartition(":")[2]
    is_tcp = error.errno == errno.EADDRINUSE and port.isdigit()
    holder = listener_on(int(port)) if is_tcp else ""
    return f", by {holder}" if holder else ""


def configure(
    sock: zmq.Socket[Any], key: ChannelKey | None, heartbeat: Heartbeat, *, is_server: bool
) -> None:
    """Set the socket options of one end: limits, heartbeats and keys."""
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat.interval_s * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat.timeout_s * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TTL, int(heartbeat.timeout_s * 1000))
    sock.setsockopt(zmq.IPV6, 1)
    if is_server:
        # Sending to a peer that is gone raises an error instead of dropping the message silently.
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 0)
    else:
        # Queue messages on completed connections only: the peer might never appear.
        sock.setsockopt(zmq.IMMEDIATE, 1)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        sock.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    if key is None:
        return
    if is_server:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, key.server_secret)
    else:
        public, private = zmq.curve_keypair()
        sock.setsockopt(zmq.CURVE_SERVERKEY, key.server_public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, private)


def tcp_address(host: str, port: int | str) -> str:
    """Return the ZMQ address of a host and port, with brackets around an IPv6 host."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


class Inbox(Generic[In]):
    """The bound end: receives from many links and answers each of them.

    Args:
        address: ZMQ address, such as `tcp://127.0.0.1:0` (port 0: any free port) or `ipc:///path`.
        incoming: Union of the message structs to accept.
        key: Key of the cluster's secret, which peers must have; None accepts everybody.

    Raises:
        ConfigInvalid: The address is in use or does not belong to this machine.
    """

    def __init__(
        self,
        address: str,
        incoming: Any,
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> None:
        self._codec: Codec[In] = Codec(incoming)
        self.num_invalid = 0
        try:
            with contextlib.ExitStack() as undo:
                self.socket = undo.enter_context(_new_socket(zmq.ROUTER))
                configure(self.socket, key, heartbeat, is_server=True)
                self._handshakes = Handshakes(self.socket, has_key=key is not None)
                undo.callback(self._handshakes.close)
                self.socket.bind(address)
                undo.pop_all()
        except zmq.ZMQError as error:
            raise ConfigInvalid(
                f"cannot listen on {address}: {_reason(error)}{_holder(address, error)}; use a different port "
                "or address"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def port(self) -> int:
        """The bound TCP port."""
        return int(self.address.rpartition(":")[2])

    @property
    def num_lost(self) -> int:
        """Connections lost so far, and failed handshakes."""
        return self._handshakes.num_lost

    def wait_lost(self, num: int, timeout_s: float) -> None:
        """Wait until this many more connections are lost, for at most `timeout_s`."""
        self._handshakes.wait_lost(num, timeout_s)

    @property
    def num_strangers(self) -> int:
        """Connections rejected so far: wrong key, missing key or a different protocol."""
        return self._handshakes.num_failed

    def receive(self) -> Envelope[In] | None:
        """Return the next message, or None if nothing is queued.

        Invalid frames are counted in `num_invalid` and skipped; they harm only the peer that sent them.
        """
        return next(filter(None, self._frames()), None)

    def queued(self) -> Iterator[Envelope[In]]:
        """Yield the queued messages, at most `FRAMES_PER_TURN`; the caller then does its other work."""
        return filter(None, itertools.islice(self._frames(), FRAMES_PER_TURN))

    def _frames(self) -> Iterator[Envelope[In] | None]:
        """Yield what is queued; None stands for an invalid frame."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._handshakes.poll()
                self._handshakes.log_failures(self.address)
                return
            envelope = None
            with contextlib.suppress(MessageInvalid):
                if len(frames) == 2:
                    envelope = Envelope(Peer(frames[0]), self._codec.decode(frames[1]))
            self.num_invalid += envelope is None
            yield envelope

    def send(self, peer: Peer, message: Message) -> None:
        """Send to one link without blocking.

        Raises:
            PeerBehind: The link has `HIGH_WATER_MARK` unread messages.
            PeerLost: The link is gone.
        """
        try:
            self.socket.send_multipart([peer, self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerBehind(f"link {peer.hex()} does not read") from error
        except zmq.ZMQError as error:
            raise PeerLost(f"link {peer.hex()} is gone: {error.strerror}") from error

    def close(self) -> None:
        """Unbind the address; discard messages that are unsent `LINGER_MS` later. Safe to call twice."""
        if self.socket.closed:
            return
        # Closing a socket unbinds it only some time later, so unbind first and wait.
        self.socket.unbind(self.address)
        self._handshakes.wait_closed(UNBIND_TIMEOUT_S)
        self._handshakes.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class Link(Generic[In]):
    """The connecting end, for a loop without asyncio.

    Args:
        address: ZMQ address. Its host is an IP address; `resolve` returns that of a host name.

    Attributes:
        handshakes: Monitor of the connection.

    Raises:
        PeerLost: The address is invalid, or this process has too many open files. A peer that does not
            answer is not detected here.
    """

    def __init__(
        self,
        address: str,
        incoming: Any,
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> None:
        scheme, _, place = address.partition("://")
        if scheme == "tcp" and not is_address(place.rpartition(":")[0]):
            raise ValueError(f"{address} has a host name: resolve it before connecting")
        self._codec: Codec[In] = Codec(incoming)
        self.address = address
        try:
            with contextlib.ExitStack() as undo:
                self.socket = undo.enter_context(_new_socket(zmq.DEALER))
                configure(self.socket, key, heartbeat, is_server=False)
                self.handshakes = Handshakes(self.socket, has_key=key is not None)
                undo.callback(self.handshakes.close)
                self.socket.connect(address)
                undo.pop_all()
        except zmq.ZMQError as error:
            raise PeerLost(f"cannot connect to {address}: {_reason(error)}") from error

    @property
    def num_lost(self) -> int:
        """Connections lost so far, and failed handshakes. After a loss libzmq connects again by itself."""
        self.handshakes.poll()
        return self.handshakes.num_lost

    @property
    def refusal(self) -> str:
        """Why the last handshake failed; empty if none failed."""
        self.handshakes.poll()
        return self.handshakes.reason

    def receive(self) -> In | None:
        """Return the next message, or None if nothing is queued. Invalid frames are skipped."""
        return next(filter(None, self._frames()), None)

    def queued(self) -> Iterator[In]:
        """Yield the queued messages, at most `FRAMES_PER_TURN`; the caller then does its other work."""
        return filter(None, itertools.islice(self._frames(), FRAMES_PER_TURN))

    def _frames(self) -> Iterator[In | None]:
        """Yield what is queued; None stands for an invalid frame."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = None
            with contextlib.suppress(MessageInvalid):
                message = self._codec.decode(frame)
            yield message

    def send(self, message: Message) -> None:
        """Send without blocking.

        Raises:
            PeerLost: The link is not connected.
        """
        if self.send_frames([self.frame_of(message)]):
            raise PeerLost(f"no connection to {self.address}")

    def frame_of(self, message: Message) -> bytes:
        """Return the frame of a message for `send_frames`. Raises `MessageTooLarge`."""
        return self._codec.encode(message)

    def send_frames(self, frames: Sequence[bytes]) -> list[bytes]:
        """Send frames without blocking; return those for which the queue has no room now.

        Raises:
            PeerLost: The link is closed or broken.
        """
        for num_sent, frame in enumerate(frames):
            try:
                self.socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return list(frames[num_sent:])
            except zmq.ZMQError as error:
                raise PeerLost(f"no connection to {self.address}: {error.strerror}") from error
        return []

    def close(self) -> None:
        """Close the socket; discard messages that are unsent `LINGER_MS` later. Safe to call twice."""
        self.handshakes.close()
        self.socket.close()


_WAKES = 4096  # bytes per read; one read is usually enough


class Waker:
    """Interrupts `wait` from another thread. Wakes before a `clear` are merged."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, which is readable after `wake`."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the current `wait`, or the next one, return. Any thread may call it."""
        try:
            self._writer.send(b"\0")
        except (BlockingIOError, OSError):
            return  # full: a wake is pending already; closed: nothing waits

    def clear(self) -> None:
        """Discard earlier wakes. Call it after `wait` and before reading the queue that `wake` announces."""
        try:
            while len(self._reader.recv(_WAKES)) == _WAKES:
                pass
        except (BlockingIOError, OSError):
            return

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


def wait(
    ends: Sequence[Inbox[Any] | Link[Any]], timeout_s: float, waker: Waker | None = None
) -> None:
    """Block until one of `ends` is readable, `waker` wakes, or `timeout_s` passes; then clear `waker`."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end.socket, zmq.POLLIN)
    if waker is not None:
        poller.register(waker.fileno(), zmq.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))
    if waker is not None:
        waker.clear()
