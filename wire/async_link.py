"""The connecting end of a channel for an asyncio process."""

import asyncio
import contextlib
import socket
from typing import Any, Generic, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.wire.channel import check_resolved, configure, new_socket, tcp_address, why
from tandem.wire.codec import Codec, In
from tandem.wire.errors import ChannelClosed, MessageInvalid, PeerLost
from tandem.wire.handshakes import FAILED, reason_of, watch
from tandem.wire.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.hosts import first_address, is_address, unresolved
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

# Messages taken in one go: steps that wait are merged, and nobody waits long.
MAX_DRAINED = 64


class AsyncLink(Generic[In]):
    """The connecting end, for an asyncio process. Made and used on one running loop.

    The socket is a plain one whose descriptor the loop watches: a message then costs a third of what
    it does through `zmq.asyncio`, which makes a future for each.

    Args:
        address: Without a name of a host; see `open`.

    Attributes:
        refusal: Why the last handshake failed; empty when none did.

    Raises:
        PeerLost: The address cannot be one, or this process may open no more.
    """

    def __init__(
        self,
        address: str,
        incoming: Any,
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> None:
        check_resolved(address)
        self._codec: Codec[In] = Codec(incoming)
        self.address = address
        self._loop = asyncio.get_running_loop()
        try:
            with contextlib.ExitStack() as undo:
                self._socket = undo.enter_context(new_socket(zmq.DEALER))
                configure(self._socket, key, heartbeat, is_server=False)
                self._monitor = undo.enter_context(
                    watch(self._socket, zmq.EVENT_DISCONNECTED | FAILED)
                )
                self._socket.connect(address)
                undo.pop_all()
        except zmq.ZMQError as error:
            raise PeerLost(f"cannot connect to {address}: {why(error)}") from error
        self._has_key = key is not None
        self.refusal = ""
        self._arrived, self._lost = asyncio.Event(), asyncio.Event()
        self._fd, self._monitor_fd = self._socket.fileno(), self._monitor.fileno()
        self._loop.add_reader(self._fd, self._look)
        self._loop.add_reader(self._monitor_fd, self._look_at_monitor)
        # A descriptor tells of what comes after somebody found nothing.
        self._look_at_monitor()

    @classmethod
    async def open(
        cls,
        address: str,
        incoming: Any,
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> Self:
        """Return a link to an address that may hold a name, which is resolved first.

        Raises:
            PeerLost: Also when no address of the name is known.
        """
        return cls(await _resolved(address), incoming, key, heartbeat)

    async def receive(self) -> list[In]:
        """Return every message that has arrived, at least one. Invalid bytes are passed over.

        Raises:
            ChannelClosed: `close` was called.
        """
        # One that is slower than its peer finds something each time, and others must run all the same.
        await asyncio.sleep(0)
        while True:
            if self._socket.closed:
                raise ChannelClosed(f"link to {self.address} was closed")
            self._arrived.clear()
            if messages := self._drain():
                return messages
            # Nothing valid in a whole drain tells nothing of what is behind it.
            self._look()
            await self._arrived.wait()

    def _drain(self) -> list[In]:
        messages: list[In] = []
        for _ in range(MAX_DRAINED):
            try:
                messages.append(self._codec.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except MessageInvalid:
                continue
        return messages

    def send(self, message: Message) -> None:
        """Send. Never waits.

        Raises:
            PeerLost: There is no connection now, or `wait_lost` has returned.
        """
        if self._lost.is_set() or self._socket.closed:
            raise PeerLost(f"link to {self.address} was lost or closed")
        try:
            self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerLost(f"no connection to {self.address}: {error.strerror}") from error
        finally:
            # The descriptor tells of changes only, and trying may have taken note of one.
            self._look()

    async def wait_lost(self) -> None:
        """Return when a connection that stood was lost: reset, closed, or silent too long.

        From then on `send` refuses, although ZMQ would reconnect: whoever answers there next is
        another life of the peer, and its owner makes a new link.
        """
        await self._lost.wait()

    def _look(self) -> None:
        # Asking settles the descriptor, which may have become readable for a heartbeat.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._arrived.set()

    def _look_at_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._lost.set()
                else:
                    self.refusal = reason_of(event, has_key=self._has_key)

    def close(self) -> None:
        """Close the socket and forget unsent messages. Safe to call twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._monitor_fd)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._arrived.set()


async def _resolved(address: str) -> str:
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or is_address(host):
        return address
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise unresolved(host, error) from error
    return tcp_address(first_address(found), port)
