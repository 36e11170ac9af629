"""Which nodes a router uses: what its sources name, merged by the parent process. Pure: no I/O, no clock.

```
 listed (--prefill, --decode) ─┐
 announced (POST /nodes) ──────┤
 DNS, Kubernetes ──────────────┴──▶ Membership ──▶ Members: one for each URL ──▶ every edge worker
 removed (DELETE /nodes/{id}) ─────▶ (taken off)
```

Of two sources that name one URL the upper one counts. A source removes only what it named itself, so a node that was
listed by hand stays whatever the others name.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem.router.config import RouterConfig
from tandem.wire.errors import InvalidRequest

# How long a removal is kept of a node that no source names any more.
REMOVAL_KEPT_S = 60.0
# The longest time between two looks that counts. A router that was stopped for a while could receive no
# announcement, and must not take its nodes for silent.
MAX_LOOK_S = 2.0
# Many times what one router was measured with.
MAX_ANNOUNCED = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """A node that is wanted. What is empty, or None, is as the node reports it."""

    url: str
    role: str = ""
    bootstrap_port: int | None = None
    zone: str = ""
    source: str = "listed"


def listed_members(config: RouterConfig) -> list[Member]:
    """Return the nodes that the configuration names by their URLs."""
    prefills = [Member(target.url, "prefill", target.bootstrap_port) for target in config.prefills]
    return prefills + [Member(url, "decode") for url in config.decodes]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """The last request about a node over HTTP: that it is there, or that it is to go.

    Attributes:
        ttl_s: How long it holds unless it is repeated; None: until it is taken back.
        hands_over: Requests on a removed node move to others at once.
    """

    url: str
    role: str = ""
    bootstrap_port: int | None = None
    zone: str = ""
    ttl_s: float | None = None
    is_removed: bool = False
    hands_over: bool = False


class SourceState(msgspec.Struct, frozen=True):
    """A source as `GET /nodes` shows it."""

    name: str
    problem: str = ""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """All members at one moment, and the removed ones whose requests move to others at once."""

    members: list[Member]
    handing_over: list[str] = []
    sources: list[SourceState] = []


class SourceFailed(Exception):
    """A source cannot find its nodes now; the message says why, for people."""


class Source(Protocol):
    """Finds nodes. Its name is for people."""

    name: str

    async def find(self) -> list[Member]:
        """Return all nodes there are now. Raises `SourceFailed`."""
        ...


class Membership:
    """Merges the sources, which the caller asks, and forgets announcements that are not repeated in time."""

    def __init__(self, listed: Iterable[Member], sources: Iterable[Source] = ()) -> None:
        self._listed = {member.url: member for member in listed}
        self._problems = dict.fromkeys((source.name for source in sources), "")
        self._found: dict[str, dict[str, Member]] = {}
        self._announced: dict[str, Announcement] = {}
        self._heard_s: dict[str, float] = {}
        self._time_s, self._last_look = 0.0, 0.0

    def found(self, source: str, members: Iterable[Member]) -> None:
        """Take the nodes that one source names now, in place of those it named before."""
        self._found[source] = {member.url: member for member in members}

    def note_problem(self, source: str, problem: str) -> bool:
        """Note why a source finds nothing, empty when it does; return whether that is news."""
        is_news = self._problems[source] != problem
        self._problems[source] = problem
        return is_news

    def announce(self, one: Announcement) -> bool:
        """Take an announcement or a removal; return whether it is news. Raises `InvalidRequest`."""
        before = self._announced.get(one.url)
        # A removal is of a member, so there are no more of them than members.
        if before is None and not one.is_removed and len(self._announced) >= MAX_ANNOUNCED:
            raise InvalidRequest(
                f"{MAX_ANNOUNCED} nodes were announced already, which is the limit"
            )
        self._announced[one.url] = one
        self._heard_s[one.url] = self._time_s
        return before != one

    def expire(self, now: float, is_up: Callable[[str], bool]) -> list[Announcement]:
        """Forget and return the announcements that hold no longer.

        Args:
            now: Of any clock that does not go back.
            is_up: Whether the node of a URL serves: an announcement holds while it does.
        """
        self._time_s += min(now - self._last_look, MAX_LOOK_S)
        self._last_look = now
        for one in self._announced.values():
            if not one.is_removed and is_up(one.url):
                self._heard_s[one.url] = self._time_s
        over = [one for one in self._announced.values() if self._is_over(one)]
        for one in over:
            del self._announced[one.url], self._heard_s[one.url]
        return over

    def members(self) -> Members:
        """Return the members now: listed ones first, in the order they were given in."""
        wanted = dict(self._listed)
        for one in self._announced.values():
            member = Member(one.url, one.role, one.bootstrap_port, one.zone, "announced")
            wanted.setdefault(one.url, member)
        for found in self._found.values():
            for url, member in found.items():
                wanted.setdefault(url, member)
        removed = [one for one in self._announced.values() if one.is_removed]
        for one in removed:
            del wanted[one.url]
        return Members(
            members=list(wanted.values()),
            handing_over=[one.url for one in removed if one.hands_over],
            sources=[SourceState(name, problem) for name, problem in self._problems.items()],
        )

    def _is_over(self, one: Announcement) -> bool:
        age_s = self._time_s - self._heard_s[one.url]
        if one.is_removed:
            return age_s > REMOVAL_KEPT_S and not self._is_named(one.url)
        return one.ttl_s is not None and age_s > one.ttl_s

    def _is_named(self, url: str) -> bool:
        return url in self._listed or any(url in found for found in self._found.values())
