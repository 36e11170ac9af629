"""What happened to the cluster lately, for people: nodes that came and went, replays, refusals, bad KV.

```
 replay                       told by who replays, as it happens
 up down draining leaving     found by comparing two looks at the nodes (`node_events`)
 gone restarted role corrupted tier
 refused                      found by comparing two looks at the counters
```
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from typing_extensions import override

NUM_KEPT = 200
# Alike in this time are one event with a count: a node that dies under a thousand streams is a line.
ALIKE_S = 10.0
# How far back one of its kind is looked for: two deaths may take turns.
NUM_LOOKED_AT = 8
TIER, TIER_UP = "tier", "tier up"
TIER_EVENTS = frozenset({TIER, TIER_UP})


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, or several alike.

    Attributes:
        id: No other event of any worker has it.
        at_unix_s: When, of several the last.
        kind: As the page's head lists them.
        node: The URL of the node that it happened to; empty where it is no node's.
        count: How many it is.
    """

    id: str
    at_unix_s: float
    kind: str
    text: str
    node: str = ""
    count: int = 1


class Events:
    """A ring of events.

    Args:
        clock: Unix time.
    """

    def __init__(self, num_kept: int = NUM_KEPT, clock: Callable[[], float] = time.time) -> None:
        self._kept: deque[tuple[str, Event]] = deque(maxlen=num_kept)
        self._clock = clock
        self._name, self._num_told = secrets.token_hex(4), 0

    @override
    def __repr__(self) -> str:
        return f"<Events {len(self._kept)} kept>"

    def tell(self, kind: str, text: str, node: str = "", alike: str = "", count: int = 1) -> None:
        """Keep an event, or count it with one just before that is of the same kind, node and `alike`."""
        now, name = self._clock(), f"{kind} {node} {alike or text}"
        for place in range(len(self._kept) - 1, max(-1, len(self._kept) - 1 - NUM_LOOKED_AT), -1):
            other, event = self._kept[place]
            if other == name and now - event.at_unix_s <= ALIKE_S:
                together = event.count + count
                self._kept[place] = (
                    name,
                    msgspec.structs.replace(event, at_unix_s=now, text=text, count=together),
                )
                return
        self._num_told += 1
        event_id = f"{self._name}-{self._num_told}"
        event = Event(id=event_id, at_unix_s=now, kind=kind, text=text, node=node, count=count)
        self._kept.append((name, event))

    def all(self) -> list[Event]:
        """Return what is kept, the oldest first."""
        return [event for _, event in self._kept]


@dataclass(frozen=True, slots=True)
class NodeLook:
    """A node at one look, as far as a change is an event.

    Attributes:
        tiers: How those behind its cache are, by name.
    """

    role: str
    state: str
    reason: str
    epoch: int
    num_corrupted: int
    tiers: Mapping[str, str] = field(default_factory=dict)


def node_events(
    before: Mapping[str, NodeLook], after: Mapping[str, NodeLook]
) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the text and the node of what changed between two looks at all nodes."""
    for url, look in after.items():
        old = before.get(url)
        for kind, text in _changes(old, look):
            yield kind, text, url
    for url, old in before.items():
        if url not in after:
            yield "gone", f"{_name(old)} was forgotten", url


def _changes(old: NodeLook | None, new: NodeLook) -> Iterator[tuple[str, str]]:
    is_new_life = old is not None and bool(old.epoch) and old.epoch != new.epoch
    if old is not None and old.role and new.role != old.role:
        yield "role", f"{old.role} became {new.role}"
    if old is None or old.state != new.state:
        # Nobody has reached a node that was just heard of: that it is down is no news.
        if old is not None or new.state != "down":
            yield new.state, _state_text(new, is_new_life=is_new_life)
    elif is_new_life:
        yield "restarted", f"{_name(new)} began a new life"
    found = new.num_corrupted - (old.num_corrupted if old is not None and not is_new_life else 0)
    if found > 0:
        yield "corrupted", f"{_name(new)} refused KV that did not arrive as it was sent: {found}"
    yield from _tier_changes(old, new)


def _tier_changes(old: NodeLook | None, new: NodeLook) -> Iterator[tuple[str, str]]:
    """Yield what became of tiers. One that is up when it is first heard of is no news."""
    before = old.tiers if old is not None else {}
    for name, state in new.tiers.items():
        if state != before.get(name, "up"):
            yield (
                TIER_UP if state == "up" else TIER,
                f"{_name(new)}'s tier {name} is {state.replace('_', ' ')}",
            )


def _state_text(look: NodeLook, *, is_new_life: bool) -> str:
    match look.state:
        case "up":
            return f"{_name(look)} is up{', in a new life' if is_new_life else ''}"
        case "down":
            return f"{_name(look)} is down: {look.reason or 'its engine was lost'}"
        case _:
            return f"{_name(look)} is {look.state}"


def _name(look: NodeLook) -> str:
    return look.role or "node"
