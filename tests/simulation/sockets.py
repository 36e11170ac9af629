"""What stands in for sockets: the same three ends of a channel, over simulated connections.

Messages are encoded and decoded as ever.
"""

import asyncio
from collections import deque
from typing import Generic

from tandem.wire.async_link import MAX_DRAINED
from tandem.wire.channel import Codec, Envelope, In
from tandem.wire.errors import PeerLost
from tests.simulation.network import CLIENT, SERVER
from tests.simulation.processes import CURRENT


class SimulatedWaker:
    """A `Waker` that calls somebody, who may be known later than it is given away."""

    def __init__(self, call=lambda: None) -> None:
        self.call = call
        self.timeout_s = 0.0

    def wake(self) -> None:
        """Call."""
        self.call()

    def clear(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def wait(ends, timeout_s, waker=None) -> None:
    """Return at once; from now on what arrives at `ends` rings, and so does the time."""
    waker.timeout_s = timeout_s
    for end in ends:
        end.ring = waker.wake


class SimulatedInbox(Generic[In]):
    """See `tandem.wire.channel.Inbox`."""

    def __init__(self, address, incoming, key=None, heartbeat=None) -> None:
        del key, heartbeat
        self.address, self._codec = address, Codec(incoming)
        self.process = CURRENT.get()
        self.num_invalid = self.num_strangers = self.num_lost = 0
        self.ring = lambda: None
        self._queue, self._connections = deque(), {}
        self.process.world.network.bind(self)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def queued(self):
        while self._queue:
            peer, frame = self._queue.popleft()
            yield Envelope(peer, self._codec.decode(frame))

    def send(self, peer, message) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            raise PeerLost(f"link {peer.hex()} is gone")
        connection.send(SERVER, self._codec.encode(message), type(message).__name__)

    def wait_lost(self, num, timeout_s) -> None:
        """Return at once: no message is discarded here."""

    def close(self) -> None:
        for connection in list(self._connections.values()):
            connection.close(SERVER)

    def accepted(self, connection) -> None:
        self._connections[connection.peer] = connection

    def put(self, frame, connection) -> None:
        self._queue.append((connection.peer, frame))
        self.ring()

    def closed(self, connection) -> None:
        self._connections.pop(connection.peer, None)
        self.num_lost += 1


class _ConnectingEnd(Generic[In]):
    """What both connecting ends do."""

    def __init__(self, address, incoming, key=None, heartbeat=None) -> None:
        del key, heartbeat
        self.address, self._codec = address, Codec(incoming)
        self.process = CURRENT.get()
        self.is_closed = False
        self.refusal = ""
        self.num_lost = 0
        self._queue, self._connection = deque(), None
        self.process.world.network.connect(self, address)

    def send(self, message) -> None:
        if self._connection is None:
            raise PeerLost(f"no connection to {self.address}")
        self._connection.send(CLIENT, self._codec.encode(message), type(message).__name__)

    def close(self) -> None:
        self.is_closed = True
        if self._connection is not None:
            self._connection.close(CLIENT)


class SimulatedLink(_ConnectingEnd[In]):
    """See `tandem.wire.channel.Link`: connects, and connects again when it broke."""

    ring = staticmethod(lambda: None)

    def queued(self):
        while self._queue:
            yield self._codec.decode(self._queue.popleft())

    def connected(self, connection) -> None:
        self._connection = connection
        self.ring()

    def put(self, frame, connection) -> None:
        self._queue.append(frame)
        self.ring()

    def closed(self, connection) -> None:
        if self._connection is connection:
            self._connection = None
            self.num_lost += 1
            world = self.process.world
            world.network.connect(self, self.address, world.draw.uniform(0.1, 1.0))


class SimulatedAsyncLink(_ConnectingEnd[In]):
    """See `tandem.wire.async_link.AsyncLink`: one connection, and none after it."""

    def __init__(self, address, incoming, take, key=None, heartbeat=None) -> None:
        self._take, self._lost, self._failure = take, asyncio.Event(), None
        super().__init__(address, incoming, key, heartbeat)

    @classmethod
    async def open(cls, *args, **named):
        return cls(*args, **named)

    def send(self, message) -> None:
        if self._lost.is_set() or self.is_closed:
            raise PeerLost(f"link to {self.address} was lost or closed")
        if self._connection is not None:
            self.process.world.said(self.process, message)
        super().send(message)

    async def wait_lost(self) -> None:
        await self._lost.wait()
        if self._failure is not None:
            raise self._failure

    def connected(self, connection) -> None:
        self._connection = connection

    def put(self, frame, connection) -> None:
        self._queue.append(frame)
        # Behind a moment in which more may come: a router that is slow finds several steps at once.
        self.process.later(self.process.world.latency(), self._look)

    def _look(self) -> None:
        while self._queue and not (self.is_closed or self._lost.is_set()):
            num_taken = min(len(self._queue), MAX_DRAINED)
            messages = [self._codec.decode(self._queue.popleft()) for _ in range(num_taken)]
            try:
                self._take(messages)
            except Exception as error:  # noqa: BLE001 - see `AsyncLink`
                self._failure = error
                self._lost.set()

    def closed(self, connection) -> None:
        self._lost.set()


def resolve(host) -> str:
    """Hosts are known by their names."""
    return host
