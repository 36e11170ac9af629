"""State machines of a node: its life cycle in the HTTP process, and the drain in the engine process.

Pure code: it starts no process and reads no clock.

```
 loading ──loaded──▶ serving ◀──resume── draining ──emptied──▶ drained
                       │ ▲                  ▲                     │ │
                       │ └──────────────────┼───────resume────────┘ │
                       ├──────drain─────────┘                       │
                       └──────turn, when idle──▶ turning ◀───turn───┘
                                                  │   ▲            drained ──load──▶ loading
                                        not loaded│   │turn
                                                  ▼   │            turning ──loaded──▶ serving
                                                  failed

 loading ──joined──▶ joined ──end──▶ leaving        (a host whose ranks belong to a node on a different host)
 serving, draining ──end──▶ leaving ──emptied, too late──▶ ended
 all others        ──end──▶ ended                  ended at once ◀──force── all
```
"""

from enum import StrEnum

from tandem.node.config import NodeRole
from tandem.wire.errors import InvalidRequest, NodeDraining, TandemError
from tandem.wire.messages import NodeLoad

# Time that a drain waits for unread answers. An edge worker that hangs longer retries the requests that it missed.
UNREAD_S = 2.0


class NodeState(StrEnum):
    """The state of a node."""

    LOADING = "loading"
    SERVING = "serving"
    JOINED = "joined"
    DRAINING = "draining"
    DRAINED = "drained"
    TURNING = "turning"
    FAILED = "failed"
    LEAVING = "leaving"
    ENDED = "ended"


class LifeEvent(StrEnum):
    """An event in the life of a node, or an order of an operator."""

    LOADED = "loaded"
    JOINED = "joined"
    NOT_LOADED = "not loaded"
    DRAIN = "drain"
    RESUME = "resume"
    EMPTIED = "emptied"
    TURN = "turn"
    LOAD = "load"
    END = "end"
    TOO_LATE = "too late"
    FORCE = "force"


_S, _E = NodeState, LifeEvent
_ALWAYS = {_E.END: _S.ENDED, _E.FORCE: _S.ENDED}

TRANSITIONS: dict[NodeState, dict[LifeEvent, NodeState]] = {
    _S.LOADING: {_E.LOADED: _S.SERVING, _E.JOINED: _S.JOINED, **_ALWAYS},
    # Its ranks are needed until the node has drained.
    _S.JOINED: {**_ALWAYS, _E.END: _S.LEAVING},
    _S.SERVING: {
        **_ALWAYS,
        _E.DRAIN: _S.DRAINING,
        _E.RESUME: _S.SERVING,
        _E.TURN: _S.TURNING,
        _E.END: _S.LEAVING,
    },
    _S.DRAINING: {
        **_ALWAYS,
        _E.DRAIN: _S.DRAINING,  # with a different deadline
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
        _E.LOAD: _S.LOADING,
    },
    _S.TURNING: {_E.LOADED: _S.SERVING, _E.NOT_LOADED: _S.FAILED, **_ALWAYS},
    _S.FAILED: {_E.TURN: _S.TURNING, **_ALWAYS},
    _S.LEAVING: {**_ALWAYS, _E.EMPTIED: _S.ENDED, _E.TOO_LATE: _S.ENDED},
    _S.ENDED: dict.fromkeys(LifeEvent, _S.ENDED),
}


SENTENCES: dict[NodeState, str] = {
    _S.LOADING: "loading the model",
    _S.SERVING: "serving",
    _S.JOINED: "running ranks of a node that serves on its first host; send requests there",
    _S.DRAINING: "draining{left}",
    _S.DRAINED: 'drained; resume with POST /drain {{"cancel": true}}',
    _S.TURNING: "changing to {role}: loading the model",
    _S.FAILED: "not serving: the change to {role} failed ({reason}); "
    'change back with POST /role {{"role": "{other}"}}',
    _S.LEAVING: "draining before it exits{left}",
    _S.ENDED: "ending",
}


class StateConflict(TandemError, code="not_now", status=409):
    """The node cannot do this in its current state. The message says what to do first."""


class Life:
    """The state and role of a node. `reason`: why the last change of role failed."""

    def __init__(self, role: NodeRole) -> None:
        self.state = NodeState.LOADING
        self.role = role
        self.reason = ""

    @property
    def is_loading(self) -> bool:
        """Whether an engine starts, or the node's link to it is not yet up."""
        return self.state in (_S.LOADING, _S.TURNING)

    @property
    def has_engine(self) -> bool:
        """Whether an engine is running, even if it only finishes its remaining requests."""
        return self.state in (_S.SERVING, _S.JOINED, _S.DRAINING, _S.DRAINED, _S.LEAVING)

    @property
    def is_draining(self) -> bool:
        """Whether the node rejects new requests because of a drain."""
        return self.state in (_S.DRAINING, _S.DRAINED, _S.LEAVING)

    def apply(self, event: LifeEvent) -> NodeState:
        """Enter the next state and return it; raise `StateConflict` if the current state does not allow the event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise StateConflict(f"cannot {event} now: the node is {self.describe()}")
        self.state = following
        return following

    def turn(self, role: NodeRole, num_left: int) -> bool:
        """Start to change the role; return False if the node already has it.

        Raise `InvalidRequest` on a colocated node, and `StateConflict` while the node has requests.
        """
        if role == self.role and self.state is not _S.FAILED:
            return False
        if self.role == "colocated":
            raise InvalidRequest("this is a colocated node, whose role cannot change")
        if self.state is _S.DRAINING or (self.state is _S.SERVING and num_left):
            raise StateConflict(
                f"the node has {_requests(num_left)}; drain it first with `tandem drain URL` or POST /drain"
            )
        self.apply(_E.TURN)
        self.role, self.reason = role, ""
        return True

    def not_loaded(self, reason: str) -> None:
        """Record that the engine for the new role did not start."""
        self.apply(_E.NOT_LOADED)
        self.reason = reason

    def describe(self, num_left: int | None = None) -> str:
        """Describe the state, with the number of remaining requests unless it is None."""
        left = "" if num_left is None else f": {_requests(num_left)} left"
        other = "prefill" if self.role == "decode" else "decode"
        sentence = SENTENCES[self.state]
        return sentence.format(left=left, role=self.role, reason=self.reason, other=other)


def _requests(num: int) -> str:
    return "1 request" if num == 1 else f"{num} requests"


# ── in the engine process ────────────────────────────────────────────────────────────────────────


def refusal() -> NodeDraining:
    """Return the error for a request that arrives during a drain."""
    return NodeDraining("this node is draining; send the request again, or to a different node")


def hand_over() -> NodeDraining:
    """Return the error for a request that is unfinished at the drain's deadline."""
    return NodeDraining(
        "this node is draining and hands over its requests; a different node continues them"
    )


def num_left(load: NodeLoad) -> int:
    """Return how many requests a node still has, including those without a client."""
    return load.num_running + load.num_waiting + load.num_transferring


class EngineDrain:
    """The drain of an engine. A new order replaces the previous one."""

    def __init__(self) -> None:
        self._number = 0
        self._deadline_s = 0.0
        self._is_handed_over = False
        self._is_reported = False
        self._empty_since_s: float | None = None
        self.is_on = False

    def begin(self, number: int, timeout_s: float, now_s: float) -> None:
        """Start a drain, or give a drain in progress the new deadline and number."""
        self._number, self._deadline_s = number, now_s + timeout_s
        self._is_handed_over = self._is_reported = False
        self._empty_since_s = None
        self.is_on = True

    def end(self) -> None:
        """End the drain: accept requests again."""
        self.is_on = False

    def take_hand_over(self, now_s: float) -> bool:
        """Return True once, when the deadline has passed."""
        is_due = self.is_on and not self._is_handed_over and now_s >= self._deadline_s
        self._is_handed_over |= is_due
        return is_due

    def take_end(self, num_left: int, now_s: float, *, is_read: bool) -> int | None:
        """Return the order's number once, when the drain is complete; else None.

        Args:
            is_read: Whether all answers have been read. Closing a link discards unread answers.
        """
        if not self.is_on or self._is_reported or num_left:
            return None
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if not is_read and now_s < self._empty_since_s + UNREAD_S:
            return None
        self._is_reported = True
        return self._number
