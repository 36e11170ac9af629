"""Which nodes a router is to know: what its sources say, merged. Pure: no I/O, no clock.

```
 listed (--prefill, --decode) ─┐
 announced (POST /nodes) ──────┤
 DNS, Kubernetes ──────────────┴──▶ Membership ──▶ wanted: one member for each URL
 removed (DELETE /nodes/{id}) ─────▶ (taken off)
```

Of two sources that name one URL the upper one is believed. A source takes away only what it gave
itself, so a node that was listed by hand stays whatever the others say.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from typing_extensions import override

# Removals of nodes that no source names any more: every worker has seen them by then.
REMOVAL_KEPT_S = 60.0
# The longest time between two looks that counts: a router that was stopped for a while, and could
# hear no announcement, must not take its nodes for silent.
MAX_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """A node that is wanted.

    Attributes:
        role: As it was given; empty to take what the node says.
        bootstrap_port: None takes the one the node tells.
        zone: Where the source says that it stands; empty when it does not.
        source: Who named it, for people.
    """

    url: str
    role: str = ""
    bootstrap_port: int | None = None
    zone: str = ""
    source: str = "listed"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What was last said of a node over HTTP: that it is there, or that it is to go.

    Attributes:
        ttl_s: How long it holds unless it is said again; None: until it is taken back.
        mark: Another one each time it is said.
        is_removed: It is to go.
        hands_over: What runs on a removed node moves to others at once.
    """

    url: str
    role: str = ""
    bootstrap_port: int | None = None
    zone: str = ""
    ttl_s: float | None = None
    mark: str = ""
    is_removed: bool = False
    hands_over: bool = False


class Source(Protocol):
    """Finds nodes.

    Attributes:
        name: For people.
        problem: What keeps it from finding nodes now; empty when nothing does.
    """

    name: str
    problem: str

    def watch(self) -> AsyncGenerator[list[Member], None]:
        """Yield all nodes there are, whenever that may have changed."""
        ...


class Membership:
    """Merges the sources, and knows which leases ran out.

    Args:
        listed: Nodes named by hand.
    """

    def __init__(self, listed: Iterable[Member]) -> None:
        self._listed = {member.url: member for member in listed}
        self._found: dict[str, dict[str, Member]] = {}
        self._said: Mapping[str, Said] = {}
        self._heard_at: dict[str, tuple[str, float]] = {}
        self._time_s, self._last_look = 0.0, 0.0

    @override
    def __repr__(self) -> str:
        found = {name: len(members) for name, members in self._found.items()}
        return f"<Membership listed={len(self._listed)} said={len(self._said)} found={found}>"

    @property
    def num_said(self) -> int:
        """Of how many nodes something was said over HTTP."""
        return len(self._said)

    def give(self, source: str, members: Iterable[Member]) -> None:
        """Take the nodes that one source knows now, in place of those it knew before."""
        self._found[source] = {member.url: member for member in members}

    def hear(
        self, said: Mapping[str, Said], now: float, is_up: Callable[[str], bool]
    ) -> list[Said]:
        """Take all that was said over HTTP; return what holds no longer, which is to be forgotten.

        Args:
            now: Of any clock that does not go back.
            is_up: Tells of a URL whether its node serves: while it does, its lease holds.
        """
        self._time_s += min(now - self._last_look, MAX_LOOK_S)
        self._last_look = now
        self._heard_at = {url: self._heard(one, is_up) for url, one in said.items()}
        over = [one for one in said.values() if self._is_over(one)]
        gone = {one.url for one in over}
        self._said = {url: one for url, one in said.items() if url not in gone}
        return over

    def said(self, url: str) -> Said | None:
        """Return what was last said of a node."""
        return self._said.get(url)

    def wanted(self) -> dict[str, Member]:
        """Return the members by their URLs: listed ones first, in the order they were given in."""
        members = dict(self._listed)
        for one in self._said.values():
            if not one.is_removed:
                announced = Member(one.url, one.role, one.bootstrap_port, one.zone, "announced")
                members.setdefault(one.url, announced)
        for found in self._found.values():
            for url, member in found.items():
                members.setdefault(url, member)
        return {url: member for url, member in members.items() if not self._is_removed(url)}

    def hands_over(self, url: str) -> bool:
        """Tell whether what runs on a node that is wanted no more moves to others at once."""
        one = self._said.get(url)
        return one is not None and one.hands_over

    def _is_removed(self, url: str) -> bool:
        one = self._said.get(url)
        return one is not None and one.is_removed

    def _heard(self, one: Said, is_up: Callable[[str], bool]) -> tuple[str, float]:
        """Return the last sign of life of what was said, and when it came."""
        mark, heard_s = self._heard_at.get(one.url, ("", 0.0))
        is_alive = one.mark != mark or (not one.is_removed and is_up(one.url))
        return one.mark, self._time_s if is_alive else heard_s

    def _is_over(self, one: Said) -> bool:
        age_s = self._time_s - self._heard_at[one.url][1]
        if one.is_removed:
            return age_s > REMOVAL_KEPT_S and not self._is_named(one.url)
        return one.ttl_s is not None and age_s > one.ttl_s

    def _is_named(self, url: str) -> bool:
        return url in self._listed or any(url in found for found in self._found.values())
