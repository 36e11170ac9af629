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


class RoomEvent(Enum):
    """An event of a room at one end; it may carry an error."""

    # Prefill.
    EXPECTED = "Expected"  # the request arrived
    GRANT_ARRIVED = "GrantArrived"
    WITHDRAW_ARRIVED = "WithdrawArrived"  # decode wants its pages back
    ABORT_REQUESTED = "AbortRequested"  # prefill's role aborted the request
    WRITES_DONE = "WritesDone"  # every write has landed
    WRITE_FAILED = "WriteFailed"  # a write was rejected; none of its bytes is in flight
    WRITES_STOPPED = "WritesStopped"  # after STOP_WRITES: no write is in flight
    # Decode. The grant is already revoked when one of the three *_ARRIVED events is applied.
    LINK_READY = "LinkReady"  # prefill sent Welcome
    LANDED_ARRIVED = "LandedArrived"  # the checksums match
    CORRUPTED_ARRIVED = "CorruptedArrived"  # prefill sent Landed, but the checksums differ
    RELEASED_ARRIVED = "ReleasedArrived"
    WITHDRAW_REQUESTED = "WithdrawRequested"  # decode's role withdrew the request
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
    """An action of the driver. SEND_* sends to the far side, REPORT_* reports to this end's role."""

    REPORT_GRANTED = "report granted"
    STOP_WRITES = "stop writes"
    SEND_LANDED = "send Landed"
    SEND_RELEASED = "send Released"
    REPORT_PUSHED = "report pushed"
    REPORT_RELEASED = "report released"
    PERMIT = "permit"
    SEND_GRANT = "send Grant"
    SEND_WITHDRAW = "send Withdraw"
    REPORT_LANDED = "report landed"
    REPORT_FAILED = "report failed"
    REPORT_LOST = "report lost"
    REPORT_SAFE = "report safe"


State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
ActionT = TypeVar("ActionT", bound=Enum)


@dataclass(frozen=True, slots=True)
class Step(Generic[State, ActionT]):
    """The effect of one event in one state."""

    state: State
    actions: tuple[ActionT, ...] = ()


Table = Mapping[State, Mapping[Event, Step[State, ActionT]]]


def to(state: State, *actions: ActionT) -> Step[State, ActionT]:
    """Return the step to `state` with these actions, in order."""
    return Step(state, actions)


class UnexpectedEvent(TandemError, code="unexpected_event", is_public=False):
    """An event that the table does not have in this state: a bug here or at the peer."""

    def __init__(self, state: Enum, event: Enum) -> None:
        super().__init__(f"{event.value} in state {state.name}")
        self.state, self.event = state, event


class Machine(Generic[State, Event, ActionT]):
    """A state machine that a table describes.

    Attributes:
        state: The current state.
    """

    def __init__(self, table: Table[State, Event, ActionT], state: State) -> None:
        self._table = table
        self.state = state

    def expects(self, event: Event) -> bool:
        """Return whether the state allows this event. If not, a peer whose message caused it violates the protocol."""
        return event in self._table[self.state]

    def apply(self, event: Event) -> tuple[ActionT, ...]:
        """Move to the next state and return the actions, in order.

        Raises:
            UnexpectedEvent: The table has no such transition; the state is unchanged.
        """
        if not self.expects(event):
            raise UnexpectedEvent(self.state, event)
        step = self._table[self.state][event]
        self.state = step.state
        return step.actions

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state.name})"


_S, _R, _A, _E = SenderState, ReceiverState, Action, RoomEvent

SENDER: Table[SenderState, RoomEvent, Action] = {
    _S.NEW: {
        _E.EXPECTED: to(_S.WAITING),
        _E.GRANT_ARRIVED: to(_S.GRANTED_EARLY),
    },
    _S.WAITING: {
        _E.GRANT_ARRIVED: to(_S.PUSHING, _A.REPORT_GRANTED),
        _E.ABORT_REQUESTED: to(_S.REFUSING, _A.REPORT_RELEASED),
        _E.TIMED_OUT: to(_S.REFUSING, _A.REPORT_RELEASED),
    },
    _S.GRANTED_EARLY: {
        _E.EXPECTED: to(_S.PUSHING, _A.REPORT_GRANTED),
        _E.WITHDRAW_ARRIVED: to(_S.REFUSING, _A.SEND_RELEASED),
        # The room was over and was granted again, while the role's abort of the first grant was on its way.
        _E.ABORT_REQUESTED: to(_S.REFUSING, _A.SEND_RELEASED),
        _E.LINK_LOST: to(_S.REFUSING),
        _E.TIMED_OUT: to(_S.REFUSING, _A.SEND_RELEASED),
    },
    _S.PUSHING: {
        _E.WRITES_DONE: to(_S.LANDED, _A.SEND_LANDED, _A.REPORT_PUSHED),
        _E.WITHDRAW_ARRIVED: to(_S.RELEASING, _A.STOP_WRITES),
        _E.ABORT_REQUESTED: to(_S.RELEASING, _A.STOP_WRITES),
        _E.WRITE_FAILED: to(_S.RELEASING, _A.STOP_WRITES),
        _E.LINK_LOST: to(_S.RELEASING, _A.STOP_WRITES),
    },
    _S.RELEASING: {
        _E.WRITES_STOPPED: to(_S.RELEASED, _A.SEND_RELEASED, _A.REPORT_RELEASED),
        # These crossed with the stop, which is in progress; WritesStopped still follows.
        _E.WRITES_DONE: to(_S.RELEASING),
        _E.WITHDRAW_ARRIVED: to(_S.RELEASING),
        _E.ABORT_REQUESTED: to(_S.RELEASING),
        _E.WRITE_FAILED: to(_S.RELEASING),
        _E.LINK_LOST: to(_S.RELEASING),
    },
    _S.REFUSING: {
        _E.GRANT_ARRIVED: to(_S.RELEASED, _A.SEND_RELEASED),
        _E.EXPECTED: to(_S.RELEASED, _A.REPORT_RELEASED),
        _E.TIMED_OUT: to(_S.RELEASED),
        # These events may repeat the reason of the rejection.
        _E.WITHDRAW_ARRIVED: to(_S.REFUSING),
        _E.ABORT_REQUESTED: to(_S.REFUSING),
        _E.LINK_LOST: to(_S.REFUSING),
    },
    # Over: these crossed with the last message.
    _S.LANDED: {_E.WITHDRAW_ARRIVED: to(_S.LANDED), _E.ABORT_REQUESTED: to(_S.LANDED)},
    _S.RELEASED: {_E.WITHDRAW_ARRIVED: to(_S.RELEASED), _E.ABORT_REQUESTED: to(_S.RELEASED)},
}

RECEIVER: Table[ReceiverState, RoomEvent, Action] = {
    _R.RESERVING: {
        _E.LINK_READY: to(_R.GRANTED, _A.PERMIT, _A.SEND_GRANT),
        _E.WITHDRAW_REQUESTED: to(_R.CLOSED, _A.REPORT_SAFE),
        _E.LINK_LOST: to(_R.CLOSED, _A.REPORT_FAILED),
    },
    _R.GRANTED: {
        _E.LANDED_ARRIVED: to(_R.READY, _A.REPORT_LANDED),
        _E.CORRUPTED_ARRIVED: to(_R.CLOSED, _A.REPORT_FAILED),
        _E.RELEASED_ARRIVED: to(_R.CLOSED, _A.REPORT_FAILED),
        _E.WITHDRAW_REQUESTED: to(_R.WITHDRAWN, _A.SEND_WITHDRAW),
        _E.TIMED_OUT: to(_R.WITHDRAWN, _A.SEND_WITHDRAW, _A.REPORT_LOST),
        _E.LINK_LOST: to(_R.FENCING, _A.REPORT_LOST),
    },
    _R.WITHDRAWN: {
        _E.LANDED_ARRIVED: to(_R.CLOSED, _A.REPORT_SAFE),  # crossed with the Withdraw
        _E.CORRUPTED_ARRIVED: to(_R.CLOSED, _A.REPORT_SAFE),
        _E.RELEASED_ARRIVED: to(_R.CLOSED, _A.REPORT_SAFE),
        _E.LINK_LOST: to(_R.FENCING),
        _E.WITHDRAW_REQUESTED: to(_R.WITHDRAWN),
    },
    _R.FENCING: {
        _E.FENCED: to(_R.CLOSED, _A.REPORT_SAFE),
        _E.WITHDRAW_REQUESTED: to(_R.FENCING),
        _E.LINK_LOST: to(_R.FENCING),
    },
    # Over: the role's withdrawal crossed with the last event.
    _R.READY: {_E.WITHDRAW_REQUESTED: to(_R.READY)},
    _R.CLOSED: {_E.WITHDRAW_REQUESTED: to(_R.CLOSED)},
}

OVER: frozenset[Enum] = frozenset({_S.LANDED, _S.RELEASED, _R.READY, _R.CLOSED})


class Session(Machine[State, RoomEvent, Action]):
    """One end of one room.

    Attributes:
        error: The first error that came with an event.
    """

    error: TandemError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the room is finished at this end."""
        return self.state in OVER

    @override
    def apply(self, event: RoomEvent, error: TandemError | None = None) -> tuple[Action, ...]:
        actions = super().apply(event)
        self.error = self.error or error
        return actions

    @override
    def __repr__(self) -> str:
        return f"Session({self.state.name}, error={self.error!r})"


def sender_session() -> Session[SenderState]:
    """Return prefill's end of a new room."""
    return Session(SENDER, SenderState.NEW)


def receiver_session() -> Session[ReceiverState]:
    """Return decode's end of a new room."""
    return Session(RECEIVER, ReceiverState.RESERVING)
