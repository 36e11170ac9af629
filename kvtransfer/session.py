"""The hand-off of one room as a pure state machine: a table for each end. No I/O, no clock.

```
 prefill                                         decode
 NEW        neither request nor grant arrived    RESERVING  pages reserved, the link is not up yet
 WAITING    request arrived, no grant yet        GRANTED    grant sent: prefill may write
 GRANTED_EARLY  grant arrived, no request yet    READY      landed; the pages hold the prompt
 PUSHING    both arrived; writes in flight       WITHDRAWN  Withdraw sent, not acknowledged yet
 LANDED     every write landed, Landed sent      FENCING    prefill is lost; its writes are being
 RELEASING  stopping the writes in flight                   made impossible
 RELEASED   stopped, Released sent               CLOSED     no write can arrive any more
 REFUSING   request or grant was rejected;
            the other is rejected on arrival
```

A driver feeds in events and executes the returned actions. The tables keep one invariant. Prefill
sends `Landed` or `Released` once, and only when the room has no write in flight. Decode reuses pages
only after either message, or after the fence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from typing_extensions import override

from tandem.wire.errors import TandemError


class Event(Enum):
    """An event of a room at one end; it may carry an error."""

    # Prefill.
    EXPECTED = "Expected"  # the request arrived
    GRANT_ARRIVED = "GrantArrived"
    WITHDRAW_ARRIVED = "WithdrawArrived"  # decode wants its pages back
    ABORT_ASKED = "AbortAsked"  # prefill's role aborted the request
    WRITES_DONE = "WritesDone"  # every write has landed
    WRITE_FAILED = "WriteFailed"  # a write was rejected; none of its bytes is in flight
    WRITES_STOPPED = "WritesStopped"  # after STOP_WRITES: no write is in flight
    # Decode. The grant is already revoked when one of the three *_ARRIVED events is applied.
    LINK_READY = "LinkReady"  # prefill sent Welcome
    LANDED_ARRIVED = "LandedArrived"  # the checksums match
    CORRUPTED_ARRIVED = "CorruptedArrived"  # prefill sent Landed, but the checksums differ
    RELEASED_ARRIVED = "ReleasedArrived"
    WITHDRAW_ASKED = "WithdrawAsked"  # decode's role withdrew the request
    FENCED = "Fenced"  # no write of the lost prefill can arrive any more
    # Both.
    LINK_LOST = "LinkLost"  # the connection failed or was never made
    TIMED_OUT = "TimedOut"  # the deadline of this state passed


class SenderState(Enum):
    """State of prefill's end of a room."""

    NEW = "new"
    WAITING = "waiting"
    GRANTED_EARLY = "granted early"
    PUSHING = "pushing"
    LANDED = "landed"
    RELEASING = "releasing"
    RELEASED = "released"
    REFUSING = "refusing"


class ReceiverState(Enum):
    """State of decode's end of a room."""

    RESERVING = "reserving"
    GRANTED = "granted"
    READY = "ready"
    WITHDRAWN = "withdrawn"
    FENCING = "fencing"
    CLOSED = "closed"


class Action(Enum):
    """An action of the driver. SEND sends to the far side, TELL reports to this end's role."""

    TELL_GRANTED = "tell granted"
    STOP_WRITES = "stop writes"
    SEND_LANDED = "send Landed"
    SEND_RELEASED = "send Released"
    TELL_PUSHED = "tell pushed"
    TELL_RELEASED = "tell released"
    PERMIT = "permit"
    SEND_GRANT = "send Grant"
    SEND_WITHDRAW = "send Withdraw"
    TELL_LANDED = "tell landed"
    TELL_FAILED = "tell failed"
    TELL_LOST = "tell lost"
    TELL_SAFE = "tell safe"


State = TypeVar("State", bound=Enum)


@dataclass(frozen=True, slots=True)
class Step(Generic[State]):
    """The effect of one event in one state."""

    state: State
    actions: tuple[Action, ...] = ()


def _to(state: State, *actions: Action) -> Step[State]:
    return Step(state, actions)


Table = Mapping[State, Mapping[Event, Step[State]]]

_S, _R, _A, _E = SenderState, ReceiverState, Action, Event

SENDER: Table[SenderState] = {
    _S.NEW: {
        _E.EXPECTED: _to(_S.WAITING),
        _E.GRANT_ARRIVED: _to(_S.GRANTED_EARLY),
    },
    _S.WAITING: {
        _E.GRANT_ARRIVED: _to(_S.PUSHING, _A.TELL_GRANTED),
        _E.ABORT_ASKED: _to(_S.REFUSING, _A.TELL_RELEASED),
        _E.TIMED_OUT: _to(_S.REFUSING, _A.TELL_RELEASED),
    },
    _S.GRANTED_EARLY: {
        _E.EXPECTED: _to(_S.PUSHING, _A.TELL_GRANTED),
        _E.WITHDRAW_ARRIVED: _to(_S.REFUSING, _A.SEND_RELEASED),
        # A second grant of a finished room, whose first grant the role aborted.
        _E.ABORT_ASKED: _to(_S.REFUSING, _A.SEND_RELEASED),
        _E.LINK_LOST: _to(_S.REFUSING),
        _E.TIMED_OUT: _to(_S.REFUSING, _A.SEND_RELEASED),
    },
    _S.PUSHING: {
        _E.WRITES_DONE: _to(_S.LANDED, _A.SEND_LANDED, _A.TELL_PUSHED),
        _E.WITHDRAW_ARRIVED: _to(_S.RELEASING, _A.STOP_WRITES),
        _E.ABORT_ASKED: _to(_S.RELEASING, _A.STOP_WRITES),
        _E.WRITE_FAILED: _to(_S.RELEASING, _A.STOP_WRITES),
        _E.LINK_LOST: _to(_S.RELEASING, _A.STOP_WRITES),
    },
    _S.RELEASING: {
        _E.WRITES_STOPPED: _to(_S.RELEASED, _A.SEND_RELEASED, _A.TELL_RELEASED),
        # These crossed with the stop, which is in progress; WritesStopped still follows.
        _E.WRITES_DONE: _to(_S.RELEASING),
        _E.WITHDRAW_ARRIVED: _to(_S.RELEASING),
        _E.ABORT_ASKED: _to(_S.RELEASING),
        _E.WRITE_FAILED: _to(_S.RELEASING),
        _E.LINK_LOST: _to(_S.RELEASING),
    },
    _S.REFUSING: {
        _E.GRANT_ARRIVED: _to(_S.RELEASED, _A.SEND_RELEASED),
        _E.EXPECTED: _to(_S.RELEASED, _A.TELL_RELEASED),
        _E.TIMED_OUT: _to(_S.RELEASED),
        # These events may repeat the reason of the rejection.
        _E.WITHDRAW_ARRIVED: _to(_S.REFUSING),
        _E.ABORT_ASKED: _to(_S.REFUSING),
        _E.LINK_LOST: _to(_S.REFUSING),
    },
    # Over: these crossed with the last message.
    _S.LANDED: {_E.WITHDRAW_ARRIVED: _to(_S.LANDED), _E.ABORT_ASKED: _to(_S.LANDED)},
    _S.RELEASED: {_E.WITHDRAW_ARRIVED: _to(_S.RELEASED), _E.ABORT_ASKED: _to(_S.RELEASED)},
}

RECEIVER: Table[ReceiverState] = {
    _R.RESERVING: {
        _E.LINK_READY: _to(_R.GRANTED, _A.PERMIT, _A.SEND_GRANT),
        _E.WITHDRAW_ASKED: _to(_R.CLOSED, _A.TELL_SAFE),
        _E.LINK_LOST: _to(_R.CLOSED, _A.TELL_FAILED),
    },
    _R.GRANTED: {
        _E.LANDED_ARRIVED: _to(_R.READY, _A.TELL_LANDED),
        _E.CORRUPTED_ARRIVED: _to(_R.CLOSED, _A.TELL_FAILED),
        _E.RELEASED_ARRIVED: _to(_R.CLOSED, _A.TELL_FAILED),
        _E.WITHDRAW_ASKED: _to(_R.WITHDRAWN, _A.SEND_WITHDRAW),
        _E.TIMED_OUT: _to(_R.WITHDRAWN, _A.SEND_WITHDRAW, _A.TELL_LOST),
        _E.LINK_LOST: _to(_R.FENCING, _A.TELL_LOST),
    },
    _R.WITHDRAWN: {
        _E.LANDED_ARRIVED: _to(_R.CLOSED, _A.TELL_SAFE),  # crossed with the Withdraw
        _E.CORRUPTED_ARRIVED: _to(_R.CLOSED, _A.TELL_SAFE),
        _E.RELEASED_ARRIVED: _to(_R.CLOSED, _A.TELL_SAFE),
        _E.LINK_LOST: _to(_R.FENCING),
        _E.WITHDRAW_ASKED: _to(_R.WITHDRAWN),
    },
    _R.FENCING: {
        _E.FENCED: _to(_R.CLOSED, _A.TELL_SAFE),
        _E.WITHDRAW_ASKED: _to(_R.FENCING),
        _E.LINK_LOST: _to(_R.FENCING),
    },
    # Over: the role's withdrawal crossed with the last event.
    _R.READY: {_E.WITHDRAW_ASKED: _to(_R.READY)},
    _R.CLOSED: {_E.WITHDRAW_ASKED: _to(_R.CLOSED)},
}

OVER: frozenset[Enum] = frozenset({_S.LANDED, _S.RELEASED, _R.READY, _R.CLOSED})


class UnexpectedEvent(TandemError, code="unexpected_event", is_public=False):
    """An event that the table does not have in this state: a bug here or at the peer."""

    def __init__(self, state: Enum, event: Event) -> None:
        super().__init__(f"{event.value} in state {state.name}")
        self.state, self.event = state, event


class Session(Generic[State]):
    """One end of one room.

    Attributes:
        state: The current state.
        error: The first error that an event carried.
    """

    def __init__(self, table: Table[State], state: State) -> None:
        self._table = table
        self.state = state
        self.error: TandemError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the room is finished at this end."""
        return self.state in OVER

    def apply(self, event: Event, error: TandemError | None = None) -> tuple[Action, ...]:
        """Move to the next state and return the actions, in order.

        Args:
            error: The cause of the event, if known.

        Raises:
            UnexpectedEvent: The table has no such transition; the state is unchanged.
        """
        step = self._table[self.state].get(event)
        if step is None:
            raise UnexpectedEvent(self.state, event)
        self.state = step.state
        self.error = self.error or error
        return step.actions

    @override
    def __repr__(self) -> str:
        return f"Session({self.state.name}, error={self.error!r})"


def sender_session() -> Session[SenderState]:
    """Return prefill's end of a new room."""
    return Session(SENDER, SenderState.NEW)


def receiver_session() -> Session[ReceiverState]:
    """Return decode's end of a new room."""
    return Session(RECEIVER, ReceiverState.RESERVING)
