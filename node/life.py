"""What a node is doing, and what it may do next: its life in the HTTP process, its drain in the engine.

Pure: no process, and the time is given.

```
 loading ──loaded──▶ serving ◀──resume── draining ──emptied──▶ drained
                       │ ▲                  ▲                     │ │
                       │ └──────────────────┼───────resume────────┘ │
                       ├──────drain─────────┘                       │
                       └──────turn, when idle──▶ turning ◀───turn───┘
                                                  │   ▲
                                        not loaded│   │turn
                                                  ▼   │            turning ──loaded──▶ serving
                                                  failed

 serving, draining ──end──▶ leaving ──emptied, too late──▶ ended
 all others        ──end──▶ ended                  ended at once ◀──force── all
```
"""

from enum import StrEnum

from tandem.node.config import NodeRole
from tandem.wire.errors import InvalidRequest, NodeDraining, TandemError
from tandem.wire.messages import NodeLoad

# An edge worker that stands still may read its last answers later, or never: it starts those requests anew.
UNREAD_S = 2.0


class State(StrEnum):
    """What the node is doing."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    TURNING = "turning"
    FAILED = "failed"
    LEAVING = "leaving"
    ENDED = "ended"


class Event(StrEnum):
    """What happened to it, or is asked of it."""

    LOADED = "loaded"
    NOT_LOADED = "not loaded"
    DRAIN = "drain"
    RESUME = "resume"
    EMPTIED = "emptied"
    TURN = "turn"
    END = "end"
    TOO_LATE = "too late"
    FORCE = "force"


_S, _E = State, Event
_ALWAYS = {_E.END: _S.ENDED, _E.FORCE: _S.ENDED}

TRANSITIONS: dict[State, dict[Event, State]] = {
    _S.LOADING: {_E.LOADED: _S.SERVING, **_ALWAYS},
    _S.SERVING: {
        **_ALWAYS,
        _E.DRAIN: _S.DRAINING,
        _E.RESUME: _S.SERVING,
        _E.TURN: _S.TURNING,
        _E.END: _S.LEAVING,
    },
    _S.DRAINING: {
        **_ALWAYS,
        _E.DRAIN: _S.DRAINING,  # with another deadline
        _E.RESUME: _S.SERVING,
        _E.EMPTIED: _S.DRAINED,
        _E.END: _S.LEAVING,
    },
    _S.DRAINED: {
        **_ALWAYS,
        _E.DRAIN: _S.DRAINED,
        _E.EMPTIED: _S.DRAINED,
        _E.RESUME: _S.SERVING,
        _E.TURN: _S.TURNING,
    },
    _S.TURNING: {_E.LOADED: _S.SERVING, _E.NOT_LOADED: _S.FAILED, **_ALWAYS},
    _S.FAILED: {_E.TURN: _S.TURNING, **_ALWAYS},
    _S.LEAVING: {**_ALWAYS, _E.EMPTIED: _S.ENDED, _E.TOO_LATE: _S.ENDED},
    _S.ENDED: dict.fromkeys(Event, _S.ENDED),
}


SENTENCES: dict[State, str] = {
    _S.LOADING: "loading the model",
    _S.SERVING: "serving",
    _S.DRAINING: "draining{left}",
    _S.DRAINED: 'drained: POST /drain {{"cancel": true}} has it serve again',
    _S.TURNING: "turning into {role}: loading the model",
    _S.FAILED: "not serving: it could not become {role} ({reason}); "
    'POST /role {{"role": "{other}"}} turns it back',
    _S.LEAVING: "draining, and ends then{left}",
    _S.ENDED: "ending",
}


class NotNow(TandemError, code="not_now", status=409):
    """The node cannot do this in its present state. The message names what to do first."""


class Life:
    """One node's state and role, and why it could not become that."""

    def __init__(self, role: NodeRole) -> None:
        self.state = State.LOADING
        self.role = role
        self.reason = ""

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves, be it what it still has."""
        return self.state in (_S.SERVING, _S.DRAINING, _S.DRAINED, _S.LEAVING)

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.state in (_S.DRAINING, _S.DRAINED, _S.LEAVING)

    def apply(self, event: Event) -> State:
        """Go on to the next state and return it; raise `NotNow` where there is none for this event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise NotNow(f"cannot {event} now: the node is {self.describe()}")
        self.state = following
        return following

    def turn(self, role: NodeRole, num_left: int) -> bool:
        """Begin to become `role`; False when the node is that already.

        Raise `InvalidRequest` where it has both roles, `NotNow` where it has requests.
        """
        if role == self.role and self.state is not _S.FAILED:
            return False
        if self.role == "colocated":
            raise InvalidRequest("this node serves alone, with both roles: it turns into neither")
        if self.state is _S.DRAINING or (self.state is _S.SERVING and num_left):
            raise NotNow(
                f"the node has {_requests(num_left)}: drain it first, with `tandem drain URL` or POST /drain"
            )
        self.apply(_E.TURN)
        self.role, self.reason = role, ""
        return True

    def not_loaded(self, reason: str) -> None:
        """The engine of the new role did not start."""
        self.apply(_E.NOT_LOADED)
        self.reason = reason

    def describe(self, num_left: int | None = None) -> str:
        """Return what the node is doing, for people, with the requests that are left where that is known."""
        left = "" if num_left is None else f": {_requests(num_left)} left"
        other = "prefill" if self.role == "decode" else "decode"
        sentence = SENTENCES[self.state]
        return sentence.format(left=left, role=self.role, reason=self.reason, other=other)


def _requests(num: int) -> str:
    return "1 request" if num == 1 else f"{num} requests"


# ── in the engine process ────────────────────────────────────────────────────────────────────────


def refusal() -> NodeDraining:
    """Return what a request is told that comes during a drain."""
    return NodeDraining("this node is draining and takes no requests: send it to another, or again")


def hand_over() -> NodeDraining:
    """Return what a request is told that is not finished in time."""
    return NodeDraining("this node is draining and hands its requests over: another goes on")


def num_left(load: NodeLoad) -> int:
    """Return how many requests a node still has to do with, the clients' or not."""
    return load.num_running + load.num_waiting + load.num_transferring


class Drain:
    """One engine's drain, over all that were asked for."""

    def __init__(self) -> None:
        self._number = 0
        self._deadline_s = 0.0
        self._is_handed_over = False
        self._is_told = False
        self._empty_since_s: float | None = None
        self.is_on = False

    def begin(self, number: int, timeout_s: float, now_s: float) -> None:
        """Take nothing new. One that is on already gets the new deadline, and the new order's number."""
        self._number, self._deadline_s = number, now_s + timeout_s
        self._is_handed_over = self._is_told = False
        self._empty_since_s = None
        self.is_on = True

    def end(self) -> None:
        """Take requests again."""
        self.is_on = False

    def take_hand_over(self, now_s: float) -> bool:
        """Tell, once, that the deadline has passed."""
        is_due = self.is_on and not self._is_handed_over and now_s >= self._deadline_s
        self._is_handed_over |= is_due
        return is_due

    def take_end(self, num_left: int, now_s: float, *, is_read: bool) -> int | None:
        """Return, once, the order's number when nothing is left.

        Args:
            is_read: Whether the last answers were. What is not when a link is closed, its far side drops.
        """
        if not self.is_on or self._is_told or num_left:
            return None
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if not is_read and now_s < self._empty_since_s + UNREAD_S:
            return None
        self._is_told = True
        return self._number
