"""The hand-off of one room as a pure state machine: a table for each end. No I/O, no clock.

```
 prefill                                         decode
 NEW        nothing has come yet                 RESERVING  pages set aside, the link is not up yet
 WAITING    the request came, no grant yet       GRANTED    the grant is sent: prefill may write
 GRANTED_EARLY  the grant came, no request yet   READY      landed; the pages hold the prompt
 PUSHING    both came: writes may be in flight   WITHDRAWN  Withdraw is sent, no answer yet
 LANDED     every write landed, and said so      FENCING    prefill is lost; its writes are being
 RELEASING  stopping the writes in flight                   made impossible
 RELEASED   stopped, and said so                 CLOSED     no write can arrive any more
 REFUSING   one half came and was given up;
            the other is answered when it comes
```

A driver feeds events and carries out the actions it gets back. The rule the tables keep: prefill
says `Landed` or `Released` once, and only when no write of the room is in flight; decode takes pages
for its own only after one of the two, or after the fence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from typing_extensions import override

from tandem.wire.errors import TandemError


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a room. `error` says why, where there is a why."""

    error: TandemError | None = None


class Expected(Event):
    """Prefill: the request came."""


class GrantArrived(Event):
    """Prefill: decode's grant came."""


class WithdrawArrived(Event):
    """Prefill: decode wants its pages back."""


class AbortAsked(Event):
    """Prefill: this end gave the request up."""


class WritesDone(Event):
    """Prefill: everything is pushed and landed."""


class WriteFailed(Event):
    """Prefill: a write was refused, and none of its bytes is under way."""


class WritesStopped(Event):
    """Prefill: asked to stop, and no write is in flight any more."""


class LinkReady(Event):
    """Decode: prefill said Welcome."""


class LandedArrived(Event):
    """Decode: prefill said Landed, and the bytes are those it meant."""


class CorruptedArrived(Event):
    """Decode: prefill said Landed, and the bytes are others."""


class ReleasedArrived(Event):
    """Decode: prefill said Released."""


class WithdrawAsked(Event):
    """Decode: this end wants the pages back."""


class Fenced(Event):
    """Decode: no write of the lost prefill can arrive any more."""


class LinkLost(Event):
    """Both: the far side is gone, or never was there."""


class TimedOut(Event):
    """Both: the next thing did not come in time."""


class SenderState(Enum):
    """Where prefill's end of a room is."""

    NEW = "new"
    WAITING = "waiting"
    GRANTED_EARLY = "granted early"
    PUSHING = "pushing"
    LANDED = "landed"
    RELEASING = "releasing"
    RELEASED = "released"
    REFUSING = "refusing"


class ReceiverState(Enum):
    """Where decode's end of a room is."""

    RESERVING = "reserving"
    GRANTED = "granted"
    READY = "ready"
    WITHDRAWN = "withdrawn"
    FENCING = "fencing"
    CLOSED = "closed"


class Action(Enum):
    """What the driver does. SEND goes to the far side, TELL to this end's role."""

    TELL_GRANTED = "tell granted"
    STOP_WRITES = "stop writes"
    SEND_LANDED = "send Landed"
    SEND_RELEASED = "send Released"
    TELL_PUSHED = "tell pushed"
    TELL_RELEASED = "tell released"
    PERMIT = "permit"
    SEND_GRANT = "send Grant"
    SEND_WITHDRAW = "send Withdraw"
    REVOKE = "revoke"
    FENCE = "fence"
    TELL_LANDED = "tell landed"
    TELL_FAILED = "tell failed"
    TELL_LOST = "tell lost"
    TELL_SAFE = "tell safe"


State = TypeVar("State", bound=Enum)


@dataclass(frozen=True, slots=True)
class Step(Generic[State]):
    """What one event does in one state."""

    state: State
    actions: tuple[Action, ...] = ()


def _to(state: State, *actions: Action) -> Step[State]:
    return Step(state, actions)


Table = Mapping[State, Mapping[type[Event], Step[State]]]

_S, _R, _A = SenderState, ReceiverState, Action

SENDER: Table[SenderState] = {
    _S.NEW: {
        Expected: _to(_S.WAITING),
        GrantArrived: _to(_S.GRANTED_EARLY),
    },
    _S.WAITING: {
        GrantArrived: _to(_S.PUSHING, _A.TELL_GRANTED),
        AbortAsked: _to(_S.REFUSING, _A.TELL_RELEASED),
        TimedOut: _to(_S.REFUSING, _A.TELL_RELEASED),
    },
    _S.GRANTED_EARLY: {
        Expected: _to(_S.PUSHING, _A.TELL_GRANTED),
        WithdrawArrived: _to(_S.REFUSING, _A.SEND_RELEASED),
        # The room was over, and is granted a second time: the role gave up the first.
        AbortAsked: _to(_S.REFUSING, _A.SEND_RELEASED),
        LinkLost: _to(_S.REFUSING),
        TimedOut: _to(_S.REFUSING, _A.SEND_RELEASED),
    },
    _S.PUSHING: {
        WritesDone: _to(_S.LANDED, _A.SEND_LANDED, _A.TELL_PUSHED),
        WithdrawArrived: _to(_S.RELEASING, _A.STOP_WRITES),
        AbortAsked: _to(_S.RELEASING, _A.STOP_WRITES),
        WriteFailed: _to(_S.RELEASING, _A.STOP_WRITES),
        LinkLost: _to(_S.RELEASING, _A.STOP_WRITES),
    },
    _S.RELEASING: {
        WritesStopped: _to(_S.RELEASED, _A.SEND_RELEASED, _A.TELL_RELEASED),
        # These crossed with the stop: it is under way already, and WritesStopped still follows.
        WritesDone: _to(_S.RELEASING),
        WithdrawArrived: _to(_S.RELEASING),
        AbortAsked: _to(_S.RELEASING),
        WriteFailed: _to(_S.RELEASING),
        LinkLost: _to(_S.RELEASING),
    },
    _S.REFUSING: {
        GrantArrived: _to(_S.RELEASED, _A.SEND_RELEASED),
        Expected: _to(_S.RELEASED, _A.TELL_RELEASED),
        TimedOut: _to(_S.RELEASED),
        # The half that was given up may still say so itself.
        WithdrawArrived: _to(_S.REFUSING),
        AbortAsked: _to(_S.REFUSING),
        LinkLost: _to(_S.REFUSING),
    },
    # Over: the last word crossed with these.
    _S.LANDED: {WithdrawArrived: _to(_S.LANDED), AbortAsked: _to(_S.LANDED)},
    _S.RELEASED: {WithdrawArrived: _to(_S.RELEASED), AbortAsked: _to(_S.RELEASED)},
}

RECEIVER: Table[ReceiverState] = {
    _R.RESERVING: {
        LinkReady: _to(_R.GRANTED, _A.PERMIT, _A.SEND_GRANT),
        WithdrawAsked: _to(_R.CLOSED, _A.TELL_SAFE),
        LinkLost: _to(_R.CLOSED, _A.TELL_FAILED),
    },
    _R.GRANTED: {
        LandedArrived: _to(_R.READY, _A.REVOKE, _A.TELL_LANDED),
        CorruptedArrived: _to(_R.CLOSED, _A.REVOKE, _A.TELL_FAILED),
        ReleasedArrived: _to(_R.CLOSED, _A.REVOKE, _A.TELL_FAILED),
        WithdrawAsked: _to(_R.WITHDRAWN, _A.SEND_WITHDRAW),
        TimedOut: _to(_R.WITHDRAWN, _A.SEND_WITHDRAW, _A.TELL_LOST),
        LinkLost: _to(_R.FENCING, _A.FENCE, _A.TELL_LOST),
    },
    _R.WITHDRAWN: {
        LandedArrived: _to(_R.CLOSED, _A.REVOKE, _A.TELL_SAFE),  # crossed with the Withdraw
        CorruptedArrived: _to(_R.CLOSED, _A.REVOKE, _A.TELL_SAFE),
        ReleasedArrived: _to(_R.CLOSED, _A.REVOKE, _A.TELL_SAFE),
        LinkLost: _to(_R.FENCING, _A.FENCE),
        WithdrawAsked: _to(_R.WITHDRAWN),
    },
    _R.FENCING: {
        Fenced: _to(_R.CLOSED, _A.TELL_SAFE),
        WithdrawAsked: _to(_R.FENCING),
        LinkLost: _to(_R.FENCING),
    },
    # Over: the role's withdrawal crossed with the news.
    _R.READY: {WithdrawAsked: _to(_R.READY)},
    _R.CLOSED: {WithdrawAsked: _to(_R.CLOSED)},
}

OVER: frozenset[Enum] = frozenset({_S.LANDED, _S.RELEASED, _R.READY, _R.CLOSED})


class UnexpectedEvent(TandemError):
    """An event that the table does not have in this state: a bug here or at the peer."""

    code = "unexpected_event"
    is_public = False

    def __init__(self, state: Enum, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in state {state.name}")
        self.state, self.event = state, event


class Session(Generic[State]):
    """One end of one room.

    Attributes:
        state: Where it is.
        error: The first error that came with an event.
    """

    def __init__(self, table: Table[State], state: State) -> None:
        self._table = table
        self.state = state
        self.error: TandemError | None = None

    @property
    def is_over(self) -> bool:
        """Whether this end has nothing more to do."""
        return self.state in OVER

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Move to the next state and return what to do, in order.

        Raises:
            UnexpectedEvent: The table has no such arrow; nothing changed.
        """
        step = self._table[self.state].get(type(event))
        if step is None:
            raise UnexpectedEvent(self.state, event)
        self.state = step.state
        self.error = self.error or event.error
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


def diagram(table: Table[State]) -> str:
    """Return the table as lines `STATE  Event → STATE  actions`, for the documentation."""
    lines = []
    for state, arrows in table.items():
        for event, step in arrows.items():
            does = ", ".join(action.value for action in step.actions)
            target = "·" if step.state is state else step.state.name
            lines.append(f"{state.name:<14}{event.__name__:<18}→ {target:<14}{does}".rstrip())
    return "\n".join(lines)
