"""Code shared by both played halves: the wait that keeps every link alive, and its limits."""

import time
from abc import ABC, abstractmethod
from itertools import islice

from tandem.wire.hand_off import LinkPing
from tests.calm import CALM


class Address:
    """A node of which a half knows only where it is. Nodes that a suite tests have more methods: see the halves."""

    key = None

    def __init__(self, port=0, beat=CALM, host="127.0.0.1"):
        self.host, self.port, self.beat = host, port, beat

    def keep_alive(self):
        """Do what must go on while a test waits, such as pings. Called many times a second."""


class PlayedHalf(ABC):
    """One end of a hand-off link that a test moves by hand.

    Attributes:
        patience_s: Limit for what must come.
        settle_s: Time to look for what must not come.
        is_pinging: Whether this end sends its pings. It does so only while it waits.
    """

    patience_s, settle_s = 30.0, 0.3

    def __init__(self, node, epoch):
        self.node, self.epoch, self.beat, self.is_pinging = node, epoch, node.beat, True
        self._next_ping_s = 0.0

    def next(self):
        """Return the next message other than a ping, which must come in time."""
        for message in self._heard(self.patience_s):
            if not isinstance(message, LinkPing):
                return message
        raise AssertionError(f"the node sent nothing in {self.patience_s:g} s")

    def expect(self, kind):
        """Return the next message, which must be of this kind."""
        message = self.next()
        assert isinstance(message, kind), f"{message} came instead of {kind}"
        return message

    def settle(self):
        """Wait a moment; return all messages that came, without pings."""
        return [each for each in self._heard(self.settle_s) if not isinstance(each, LinkPing)]

    def num_pings(self, num_beats):
        """Return the number of pings in the time of so many beats."""
        heard = self._heard(num_beats * self.beat.interval_s)
        return sum(isinstance(each, LinkPing) for each in heard)

    def hear_beats(self, num_beats=10):
        """Discard received messages, and wait for more pings than can be on their way."""
        while self.channel.receive() is not None:
            pass
        pings = (each for each in self._heard(self.patience_s) if isinstance(each, LinkPing))
        assert len(list(islice(pings, num_beats))) == num_beats

    def _heard(self, time_s):
        deadline_s = time.monotonic() + time_s
        while time.monotonic() < deadline_s:
            if (message := self._turn()) is not None:
                yield message

    def _turn(self):
        self.stay_alive()
        return self.receive()

    def stay_alive(self):
        """Keep requests and link alive."""
        self.node.keep_alive()
        now_s = time.monotonic()
        if self.is_pinging and now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.beat.interval_s
            self.ping()

    @abstractmethod
    def ping(self):
        """Send a ping if the link has begun."""

    @abstractmethod
    def receive(self):
        """Return the next message, or None after a few milliseconds."""
