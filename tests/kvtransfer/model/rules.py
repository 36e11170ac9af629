"""What is checked, what there is to do, and how the two ends may agree. No state of a run."""

from dataclasses import dataclass, field

from tandem.kvtransfer.session import RECEIVER, SENDER, ReceiverState, SenderState, Table
from tandem.wire.heartbeat import DEFAULT_HEARTBEAT

# A stopped process goes on after this time, long after everybody has given it up.
STOPPED_S = 10.0
NOTICE_S = 4 * DEFAULT_HEARTBEAT.interval_s

_S, _R = SenderState, ReceiverState
GIVEN_UP = frozenset({"abort", "withdraw", "corrupt", "refuse write"})
LINK_FAULTS = frozenset(
    {
        "kill",
        "stop",
        "cut",
        "restart",
        "break write",
        "twice to prefill",
        "decode hangs up",
        "prefill hangs up",
    }
)
TIME_FAULTS = frozenset(
    {f"early {end} {what}" for end in ("prefill", "decode") for what in ("timer", "notices")}
)
ANY_FAULT = LINK_FAULTS | TIME_FAULTS | GIVEN_UP
KILLED = frozenset({"kill"})

# How a room may end at prefill and at decode (None: that end's process was killed before), and one of
# which faults must have happened for it (None: none need). All that is not here is a disagreement:
# above all, decode never takes pages as filled that prefill does not call landed.
AGREEING: dict[tuple[SenderState | None, ReceiverState | None], frozenset[str] | None] = {
    (_S.LANDED, _R.READY): None,
    # The last word came too late, was lost with the link, or the bytes were others.
    (_S.LANDED, _R.CLOSED): ANY_FAULT - {"abort", "refuse write"},
    (_S.RELEASED, _R.CLOSED): ANY_FAULT,
    (None, _R.CLOSED): KILLED,
    (_S.LANDED, None): KILLED,
    (_S.RELEASED, None): KILLED,
    (None, None): KILLED,
}


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True)
class Rules:
    """What is checked: the real tables, or broken ones, and drivers with bad habits."""

    sender: Table = field(default_factory=lambda: SENDER)
    receiver: Table = field(default_factory=lambda: RECEIVER)
    habits: frozenset = frozenset()


@dataclass(frozen=True)
class Plan:
    """What there is to do, and what may go wrong.

    Attributes:
        num_rooms: Requests in all; they share decode's pool and run as far as pages reach.
        num_pages: Of each prompt.
        pool_pages: Of decode.
        num_pieces: In which each page's write lands.
        is_one_sided: What is on its way lands whatever becomes of the writer, until the fence cuts it
            off. Otherwise the writer copies under a lock: its pieces stop and die with it, and the
            fence waits for them.
        faults: How many of them may happen.
        only: Restricts them to some kinds; empty for all.
    """

    num_rooms: int = 1
    num_pages: int = 1
    pool_pages: int = 1
    num_pieces: int = 1
    is_one_sided: bool = True
    faults: int = 1
    only: frozenset = frozenset()
