"""The connecting end of a channel for an asyncio process."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Self

import zmq

from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, In, Link, tcp_address
from tandem.wire.errors import PeerLost
from tandem.wire.hosts import resolve
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

# Messages taken in one go: steps that wait are merged, and nobody waits long.
MAX_DRAINED = 64
# A plain int: the enum's `&` takes a third of the look.
_READABLE = int(zmq.POLLIN)


class AsyncLink(Generic[In]):
    """A `Link` whose descriptor an asyncio loop watches. Made and used on one running loop.

    Messages are given to a callback: a router has hundreds of links, and waking a task for each heartbeat
    costs more than the heartbeat.

    Args:
        address: Without a name of a host; see `open`.
        take: Called with the messages that arrived together, at least one. Invalid bytes are passed over.
            What it raises ends the link: see `wait_lost`.

    Raises:
        PeerLost: The address cannot be one, or this process may open no more.
    """

    def __init__(
        self,
        address: str,
        incoming: Any,
        take: Callable[[list[In]], None],
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> None:
        self._link: Link[In] = Link(address, incoming, key, heartbeat)
        self.address, self._take = address, take
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        self._failure: Exception | None = None
        self._monitor_fd = self._link.handshakes.monitor.fileno()
        self._fd = self._link.socket.fileno()
        self._loop.add_reader(self._fd, self._look)
        self._loop.add_reader(self._monitor_fd, self._look_at_monitor)
        # A descriptor becomes readable for what comes after somebody found nothing.
        self._look_at_monitor()

    @classmethod
    async def open(
        cls,
        address: str,
        incoming: Any,
        take: Callable[[list[In]], None],
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> Self:
        """Return a link to an address that may hold a name, which is resolved first.

        Raises:
            PeerLost: Also when no address of the name is known.
        """
        scheme, _, place = address.partition("://")
        if scheme == "tcp":
            host, _, port = place.rpartition(":")
            address = tcp_address(await asyncio.to_thread(resolve, host), port)
        return cls(address, incoming, take, key, heartbeat)

    @property
    def refusal(self) -> str:
        """Why the last handshake failed; empty when none did."""
        return self._link.handshakes.reason

    def send(self, message: Message) -> None:
        """Send. Never waits.

        Raises:
            PeerLost: There is no connection now, or `wait_lost` has returned.
        """
        if self._lost.is_set() or self._link.socket.closed:
            raise PeerLost(f"link to {self.address} was lost or closed")
        try:
            self._link.send(message)
        finally:
            # The descriptor signals changes only, and trying may have taken note of one. Not at once: the
            # sender is in the middle of something.
            if self._is_readable():
                self._loop.call_soon(self._look)

    async def wait_lost(self) -> None:
        """Return when a connection that stood was lost: reset, closed, or silent too long.

        From then on `send` refuses, although ZMQ would reconnect: what answers there next is another
        life of the peer, and its owner makes a new link.

        Raises:
            Exception: What `take` raised.
        """
        await self._lost.wait()
        if self._failure is not None:
            raise self._failure

    def _is_readable(self) -> bool:
        # Asking settles the descriptor, which may have become readable for a heartbeat. And it costs half of an
        # attempt to receive that fails.
        return bool(int(self._link.socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _look(self) -> None:
        messages: list[In] = []
        while len(messages) < MAX_DRAINED and not self._link.socket.closed and self._is_readable():
            if (message := self._link.receive()) is not None:
                messages.append(message)
        if messages and not self._lost.is_set():
            try:
                self._take(messages)
            except Exception as error:  # noqa: BLE001 - the top of a link: `wait_lost` raises it
                self._failure = error
                self._lost.set()
        if len(messages) == MAX_DRAINED:
            # One that is slower than its peer finds something each time, and others must run all the same.
            self._loop.call_soon(self._look)

    def _look_at_monitor(self) -> None:
        self._link.handshakes.look()
        if self._link.handshakes.is_lost:
            self._lost.set()

    def close(self) -> None:
        """Close the socket and forget unsent messages. Safe to call twice."""
        if not self._link.socket.closed:
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._monitor_fd)
            self._link.close()
