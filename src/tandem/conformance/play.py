"""What both players have: a wait that keeps everybody alive, and how long it lasts."""

import time
from abc import ABC, abstractmethod
from typing import Protocol, TypeVar

from tandem.wire.channel import Heartbeat
from tandem.wire.generation import Epoch
from tandem.wire.hand_off import LinkPing
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

M = TypeVar("M", bound=Message)


class Subject(Protocol):
    """The node under test, as whoever gives it requests.

    Attributes:
        host: Its address, not a name.
        key: Of its cluster; None for none.
        beat: The rhythm of its links.
    """

    host: str
    key: ChannelKey | None
    beat: Heartbeat

    def keep_alive(self) -> None:
        """Do what has to be done all the while, such as to ping. Called many times a second."""
        ...


class Player(ABC):
    """One end of a link that a test moves by hand.

    Attributes:
        patience_s: How long what must come may take.
        settle_s: How long to look for what must not come.
        is_pinging: Whether this end sends its pings.
    """

    patience_s = 30.0
    settle_s = 0.3

    def __init__(self, subject: Subject, epoch: Epoch) -> None:
        self.epoch, self.is_pinging = epoch, True
        self.beat = subject.beat
        self._subject, self._next_ping_s = subject, 0.0

    def next(self) -> Message:
        """Return the next message that is no ping.

        Raises:
            AssertionError: None came in time.
        """
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            message = self._turn()
            if message is not None and not isinstance(message, LinkPing):
                return message
        raise AssertionError(f"the node sent nothing in {self.patience_s:g} s")

    def expect(self, kind: type[M]) -> M:
        """Return the next message, which must be of this kind."""
        message = self.next()
        assert isinstance(message, kind), f"{message} came; {kind.__name__} was due"
        return message

    def settle(self) -> list[Message]:
        """Wait a moment; return all messages that came and are no ping."""
        return [each for each in self._listen(self.settle_s) if not isinstance(each, LinkPing)]

    def num_pings(self, num_beats: float) -> int:
        """Return how many pings come in the time of so many beats."""
        heard = self._listen(num_beats * self.beat.interval_s)
        return sum(isinstance(each, LinkPing) for each in heard)

    def _listen(self, time_s: float) -> list[Message]:
        deadline_s, heard = time.monotonic() + time_s, list[Message]()
        while time.monotonic() < deadline_s:
            if (message := self._turn()) is not None:
                heard.append(message)
        return heard

    def _turn(self) -> Message | None:
        self.stay_alive()
        return self.receive()

    def stay_alive(self) -> None:
        """Keep the requests and the link alive. Called many times a second while a test waits."""
        self._subject.keep_alive()
        now_s = time.monotonic()
        if self.is_pinging and now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.beat.interval_s
            self.ping()

    @abstractmethod
    def ping(self) -> None:
        """Send a ping, if there is anybody to send it to."""

    @abstractmethod
    def receive(self) -> Message | None:
        """Return the next message; wait a few milliseconds for it at most."""
