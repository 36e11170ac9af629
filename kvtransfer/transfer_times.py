"""How long hand-offs take, as the agent of each end sees them; for its operators."""

from dataclasses import dataclass

from typing_extensions import override

from tandem.telemetry.histogram import Histogram

# From a page within one machine to a long prompt over a slow network; waiting for pages takes as long as answers.
_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


@dataclass(slots=True)
class PushTimes:
    """When what happened to one room at prefill; None while it has not.

    Attributes:
        expected_s: The role asked for it.
        pushed_s: The role pushed the first of its pages or layers.
        finished_s: The role had pushed all.
    """

    expected_s: float | None = None
    pushed_s: float | None = None
    finished_s: float | None = None


class SenderTimes:
    """Of the hand-offs of a prefill agent. Its control thread writes, any may look.

    Attributes:
        bootstrap_seconds: From asking for a room to its grant.
        push_seconds: From when the first pages of a room could be pushed to the end of its last write; not
            of rooms of which decode had everything.
        push_exposed_seconds: Of that, what comes after the last chunk: nothing is computed beside it.
        num_lost_links: Decode nodes whose link broke or fell silent.
    """

    def __init__(self) -> None:
        self.bootstrap_seconds = Histogram(_SECONDS)
        self.push_seconds = Histogram(_SECONDS)
        self.push_exposed_seconds = Histogram(_SECONDS)
        self.num_lost_links = 0

    def granted(self, room: PushTimes, now_s: float) -> None:
        """A room was granted as a whole."""
        if room.expected_s is not None:
            self.bootstrap_seconds.observe(now_s - room.expected_s)

    def landed(self, room: PushTimes, now_s: float) -> None:
        """All of a room is in decode's memory."""
        if room.pushed_s is not None:
            self.push_seconds.observe(now_s - room.pushed_s)
        if room.finished_s is not None:
            self.push_exposed_seconds.observe(now_s - room.finished_s)

    @override
    def __repr__(self) -> str:
        return f"SenderTimes(push={self.push_seconds!r})"


class ReceiverTimes:
    """Of the hand-offs of a decode agent. Its control thread writes, any may look.

    Attributes:
        granted_seconds: From a grant to the prompt in its pages: for so long they are of no use.
        num_lost_links: Prefill nodes whose link broke or fell silent.
    """

    def __init__(self) -> None:
        self.granted_seconds = Histogram(_SECONDS)
        self.num_lost_links = 0

    @override
    def __repr__(self) -> str:
        return f"ReceiverTimes(granted={self.granted_seconds!r})"
