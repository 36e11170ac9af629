"""One framed channel over ZMQ: typed messages, a size limit, liveness and close.

```
 Link (DEALER, connects) ──── one frame a message, msgpack ────▶ Inbox (ROUTER, binds)
 AsyncLink (async_link.py): the same end for an asyncio process
```

Holds the sockets' options and nothing of what messages mean. Not thread-safe: a socket belongs to
the thread that made it; `Waker` is how another thread interrupts `wait`.

All links of a process share one I/O thread of libzmq, so nothing may stop it: a link takes an address
and no name, which libzmq would resolve in that thread.

Liveness is ZMTP's own heartbeat (its I/O thread answers while our loop computes), so a busy peer is
not a dead one; a dead, stopped or unreachable one is disconnected as `Heartbeat` says.
"""

import contextlib
import errno
import resource
import socket
from collections.abc import Sequence
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

# A prompt of 1M ids is 5 MB of msgpack; nothing we send is larger.
MAX_MESSAGE_BYTES = 16 << 20
# Messages waiting for one peer. A step is one message: at 100 steps/s this is 80 s of a stalled peer,
# after which it is treated as lost and its memory is given back.
HIGH_WATER_MARK = 8192
# How long the I/O thread may take to close a port. It does nothing that takes longer than a millisecond.
UNBIND_TIMEOUT_S = 5.0
MIN_INTERVAL_S = 0.02
MAX_INTERVAL_S = 60.0
# Of the connecting end: the connection, libzmq's socket, and both ends of its monitor. A bound end has one.
PER_LINK = 4
# A node with torch and no link has 40; the rest is for files that are open for a moment.
OWN = 128
REMEDY = "raise its limit of open files (ulimit -n, or LimitNOFILE= in a systemd unit)"

In = TypeVar("In", bound=Message)


def allow_descriptors(num_needed: int, used_for: str) -> None:
    """Raise this process's limit as far as it may. Warn when that is less than it needs.

    Args:
        num_needed: Beside `OWN`.
        used_for: What needs them, such as `40 nodes and 4096 clients`.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # a limit that a kernel tells and does not take
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], OWN + num_needed
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        log.warning(
            "descriptors.too_few",
            limit=limit,
            needed=needed,
            used_for=used_for,
            effect="connections and links beyond the limit are refused",
            action=f"ulimit -n {needed}, or LimitNOFILE={needed} in a systemd unit",
            see="tandem docs troubleshooting#open-files",
        )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The rhythm of a process's links.

    Attributes:
        interval_s: Between two beats. A lost peer is noticed within four of them.
    """

    interval_s: float = 0.5

    @property
    def timeout_s(self) -> float:
        """How long a beat may go unanswered; the next one is due an interval after a peer died."""
        return 3 * self.interval_s

    @property
    def silence_s(self) -> float:
        """How long after its last message a peer may be taken for lost, where one looks a few times an interval."""
        return 3.5 * self.interval_s


DEFAULT_HEARTBEAT = Heartbeat()


def heartbeat_of(interval_ms: float) -> Heartbeat:
    """Return the rhythm that `--heartbeat-interval-ms` asks for.

    Raises:
        ConfigInvalid: Too short to be kept by a busy machine, or too long to be of use.
    """
    interval_s = interval_ms / 1000
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigInvalid(
            f"--heartbeat-interval-ms is {interval_ms:g}: give {MIN_INTERVAL_S * 1000:g} to "
            f"{MAX_INTERVAL_S * 1000:g}"
        )
    return Heartbeat(interval_s)


class Codec(Generic[In]):
    """Encodes any message and decodes those of one direction.

    Args:
        incoming: A union of message structs; anything else is refused.
    """

    def __init__(self, incoming: Any, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._limit_bytes = limit_bytes

    def encode(self, message: Message) -> bytes:
        """Return the frame of `message`.

        Raises:
            MessageTooLarge: The frame passes the limit.
        """
        frame = self._encoder.encode(message)
        if len(frame) > self._limit_bytes:
            raise MessageTooLarge(len(frame), self._limit_bytes)
        return frame

    def decode(self, frame: bytes) -> In:
        """Return the message in `frame`.

        Raises:
            MessageTooLarge: The frame passes the limit.
            MessageInvalid: The bytes are no message of this direction.
        """
        if len(frame) > self._limit_bytes:
            raise MessageTooLarge(len(frame), self._limit_bytes)
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageInvalid(f"not a message of this channel: {error}") from error


class Peer(bytes):
    """Routing identity of a connected link, as an inbox sees it."""


@dataclass(frozen=True, slots=True)
class Envelope(Generic[In]):
    """A received message and where an answer goes."""

    peer: Peer
    message: In


def _new_socket(kind: int) -> zmq.Socket[bytes]:
    """Return a socket of the context that all links of this process share."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    # Looked at when the first socket is made. Its default ends at 341 links.
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context.socket(kind)


def _why(error: zmq.ZMQError) -> str:
    """Return why a socket cannot be made, bound or connected, and what helps."""
    is_limit = error.errno in (errno.EMFILE, errno.ENFILE)
    return f"{error.strerror}: {REMEDY}" if is_limit else str(error.strerror)


def _taken(address: str, error: zmq.ZMQError) -> str:
    """Return by which process an address is in use, where that is known."""
    port = address.rpartition(":")[2]
    is_tcp = error.errno == errno.EADDRINUSE and port.isdigit()
    holder = listener_on(int(port)) if is_tcp else ""
    return f", by {holder}" if holder else ""


def configure(
    sock: zmq.Socket[Any], key: ChannelKey | None, heartbeat: Heartbeat, *, is_server: bool
) -> None:
    """Set what both ends agree on: limits, heartbeats, who may talk."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat.interval_s * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat.timeout_s * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TTL, int(heartbeat.timeout_s * 1000))
    sock.setsockopt(zmq.IPV6, 1)
    if is_server:
        # An answer to a peer that went away is an error we can see, not a silent drop.
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 0)
    else:
        # Only a completed connection takes messages: none wait for a peer that may never come.
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
    """Return the ZMQ address of a host and port; an IPv6 host is bracketed."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


class Inbox(Generic[In]):
    """The bound end: receives from many links, answers each.

    Args:
        address: Such as `tcp://127.0.0.1:0` (port 0 is any free one) or `ipc:///path`.
        incoming: Union of the messages that may come in.
        key: Requires peers to know the cluster's secret.

    Raises:
        ConfigInvalid: The address is in use or not ours.
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
                f"cannot listen on {address}: {_why(error)}{_taken(address, error)}; choose another port or "
                "address"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def port(self) -> int:
        """The TCP port that was bound."""
        return int(self.address.rpartition(":")[2])

    @property
    def num_strangers(self) -> int:
        """Connections turned away so far: by their key, the lack of one, or what they spoke."""
        return self._handshakes.num_failed

    def receive(self) -> Envelope[In] | None:
        """Return the next message, or None when there is none now.

        Bytes that are no message are counted in `num_invalid` and passed over: a peer that sends
        them harms itself only.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._handshakes.look()
                self._handshakes.log_failures(self.address)
                return None
            if len(frames) == 2:
                try:
                    return Envelope(Peer(frames[0]), self._codec.decode(frames[1]))
                except MessageInvalid:
                    pass
            self.num_invalid += 1

    def send(self, peer: Peer, message: Message) -> None:
        """Send to one link. Never blocks.

        Raises:
            PeerBehind: Its link holds as many unread messages as it may.
            PeerLost: The link is gone.
        """
        try:
            self.socket.send_multipart([peer, self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerBehind(f"link {peer.hex()} does not read") from error
        except zmq.ZMQError as error:
            raise PeerLost(f"link {peer.hex()} is gone: {error.strerror}") from error

    def close(self) -> None:
        """Give the address back and forget unsent messages. Safe to call twice."""
        if self.socket.closed:
            return
        # A socket that is closed is unbound some time later.
        self.socket.unbind(self.address)
        self._handshakes.wait_closed(UNBIND_TIMEOUT_S)
        self._handshakes.close()
        self.socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class Link(Generic[In]):
    """The connecting end, for a plain loop.

    Args:
        address: Without a name of a host; see `resolve`.

    Attributes:
        handshakes: What libzmq reports of the connection.

    Raises:
        PeerLost: The address cannot be one, or this process may open no more. That nobody answers
            there shows later.
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
            raise ValueError(f"resolve the name in {address} before you connect a link to it")
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
            raise PeerLost(f"cannot connect to {address}: {_why(error)}") from error

    @property
    def refusal(self) -> str:
        """Why the last handshake failed; empty when none did."""
        self.handshakes.look()
        return self.handshakes.reason

    def receive(self) -> In | None:
        """Return the next message, or None when there is none now. Invalid bytes are passed over."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return self._codec.decode(frame)
            except MessageInvalid:
                continue

    def send(self, message: Message) -> None:
        """Send. Never blocks.

        Raises:
            PeerLost: There is no connection now.
        """
        try:
            self.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerLost(f"no connection to {self.address}: {error.strerror}") from error

    def close(self) -> None:
        """Close the socket and forget unsent messages. Safe to call twice."""
        self.handshakes.close()
        self.socket.close(linger=0)


_WAKES = 4096  # taken at a time: most often that is all


class Waker:
    """Interrupts `wait` from another thread. Many wakes before one `clear` count once."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make a `wait` that is under way, or the next one, return. Any thread may call it."""
        try:
            self._writer.send(b"\0")
        except (BlockingIOError, OSError):
            return  # full: it is awake already; closed: nobody waits

    def clear(self) -> None:
        """Forget earlier wakes. Call after `wait`, before looking at what was queued."""
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
    """Block until an end has something to receive, the waker rings, or the time is up."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end.socket, zmq.POLLIN)
    if waker is not None:
        poller.register(waker.fileno(), zmq.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))
    if waker is not None:
        waker.clear()
