"""The connecting end of a channel, for asyncio."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Self

import zmq

from tandem.wire.channel import (
    DEFAULT_HEARTBEAT,
    HIGH_WATER_MARK,
    Heartbeat,
    In,
    Link,
    tcp_address,
)
from tandem.wire.errors import PeerLost
from tandem.wire.hosts import resolve
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

# Messages per callback. A backlog of steps is merged, and other tasks still get their turn.
MAX_DRAINED = 64
# Interval of attempts to send to a peer with a full queue.
RETRY_S = 0.01
# A plain int: `&` on the enum takes a third of a poll's time.
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)


class AsyncLink(Generic[In]):
    """A `Link` on the running asyncio loop. Create and use it on that loop only.

    Messages go to a callback: a router has hundreds of links, and waking a task for each heartbeat
    costs more than the heartbeat.

    Args:
        address: ZMQ address. Its host is an IP address; `open` resolves a host name.
        on_messages: Called with one or more messages that arrived together. Invalid frames are skipped.
            An exception that it raises ends the link; `wait_lost` raises it again.

    Raises:
        PeerLost: The address is invalid, or this process has too many open files.
    """

    def __init__(
        self,
        address: str,
        incoming: Any,
        on_messages: Callable[[list[In]], None],
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> None:
        self._link: Link[In] = Link(address, incoming, key, heartbeat)
        self.address, self._on_messages = address, on_messages
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._lost = asyncio.Event()
        self._failure: Exception | None = None
        self._monitor_fd = self._link.handshakes.monitor.fileno()
        self._fd = self._link.socket.fileno()
        self._loop.add_reader(self._fd, self._receive)
        self._loop.add_reader(self._monitor_fd, self._poll_monitor)
        # ZMQ's descriptors are edge-triggered: they signal only what arrives after a failed read.
        self._poll_monitor()

    @classmethod
    async def open(
        cls,
        address: str,
        incoming: Any,
        on_messages: Callable[[list[In]], None],
        key: ChannelKey | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    ) -> Self:
        """Resolve the host name in `address`, if any, and return a link.

        Raises:
            PeerLost: As in the constructor, or the name cannot be resolved.
        """
        scheme, _, place = address.partition("://")
        if scheme == "tcp":
            host, _, port = place.rpartition(":")
            address = tcp_address(await asyncio.to_thread(resolve, host), port)
        return cls(address, incoming, on_messages, key, heartbeat)

    @property
    def refusal(self) -> str:
        """Why the last handshake failed; empty if none failed."""
        return self._link.handshakes.reason

    def send(self, message: Message) -> None:
        """Queue a message, which the loop's next iteration sends.

        Messages of one iteration are sent together, because waking libzmq's thread costs as much as several frames. If the
        send fails, the link is lost.

        Raises:
            PeerLost: The link is not connected, was lost or is closed, or its peer does not read.
            MessageTooLarge: The frame exceeds the limit.
        """
        if self._lost.is_set() or self._link.socket.closed:
            raise PeerLost(f"link to {self.address} was lost or closed")
        frame = self._link.frame_of(message)
        if len(self._unsent) >= HIGH_WATER_MARK:
            raise PeerLost(f"the peer at {self.address} does not read")
        if not self._unsent:
            if not self._poll() & _WRITABLE:
                raise PeerLost(f"no connection to {self.address}")
            self._loop.call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        if self._lost.is_set() or self._link.socket.closed:
            return
        try:
            self._unsent = self._link.send_frames(self._unsent)
        except PeerLost:
            self._lost.set()
            return
        # The peer does not read now, or the loss of the connection is about to be reported.
        if self._unsent:
            self._loop.call_later(RETRY_S, self._flush)
        self._poll()

    async def wait_lost(self) -> None:
        """Return when the established connection is lost: reset, closed, or silent for too long.

        From then on `send` raises `PeerLost`, although ZMQ would reconnect: the next peer at this address
        is a new life of the process, and the owner opens a new link to it.

        Raises:
            Exception: Raised by `on_messages`.
        """
        await self._lost.wait()
        if self._failure is not None:
            raise self._failure

    def _poll(self) -> int:
        """Return the socket's events. Reading them consumes the descriptor's edge, so schedule a receive if it is readable."""
        events = self._read_events()
        if events & _READABLE:
            self._loop.call_soon(self._receive)
        return events

    def _read_events(self) -> int:
        # A heartbeat signals the descriptor too. Reading EVENTS clears it at half the cost of a failed receive.
        return int(self._link.socket.getsockopt(zmq.EVENTS))

    def _receive(self) -> None:
        messages: list[In] = []
        link = self._link
        while (
            len(messages) < MAX_DRAINED
            and not link.socket.closed
            and self._read_events() & _READABLE
        ):
            if (message := link.receive()) is not None:
                messages.append(message)
        if messages and not self._lost.is_set():
            try:
                self._on_messages(messages)
            except Exception as error:  # noqa: BLE001 - `wait_lost` raises it again
                self._failure = error
                self._lost.set()
        if len(messages) == MAX_DRAINED:
            # If the peer sends faster than this process reads, messages never run out: let other tasks run.
            self._loop.call_soon(self._receive)

    def _poll_monitor(self) -> None:
        if self._link.num_lost:
            self._lost.set()

    def close(self) -> None:
        """Send the queued messages and close the socket, as `Link.close`. Safe to call twice."""
        if not self._link.socket.closed:
            self._flush()
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._monitor_fd)
            self._link.close()
