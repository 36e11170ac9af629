"""The members of a router's cluster, which the parent process merges from several sources. No I/O and no clock.

```
 listed (--prefill, --decode) ─┐
 announced (POST /nodes) ──────┤
 DNS (--discover-dns) ─────────┴──▶ Membership ──▶ Members: one for each URL ──▶ every edge worker
 removed (DELETE /nodes/{id}) ─────▶ (excluded)
```

If two sources name the same URL, the upper one in this picture wins. A source can remove only nodes that it named itself,
so a listed node stays whatever the other sources name.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem.router.config import RouterConfig
from tandem.wire.errors import InvalidRequest

# Minimum time that a removal is kept. It also stays while a source still names the node.
REMOVAL_KEPT_S = 60.0
# A longer interval between two checks counts as this long: it means that the router was suspended. It received no
# announcements then, and must not remove nodes for that.
MAX_CHECK_INTERVAL_S = 2.0
# Many times the largest cluster measured with one router.
MAX_ANNOUNCED = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster. If a field is empty or None, the value that the node reports is used."""

    url: str
    role: str = ""
    bootstrap_port: int | None = None
    zone: str = ""
    source: str = "listed"


def listed_members(config: RouterConfig) -> list[Member]:
    """Return the nodes that the configuration lists by URL."""
    prefills = [Member(target.url, "prefill", target.bootstrap_port) for target in config.prefills]
    return prefills + [Member(url, "decode") for url in config.decodes]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """The last HTTP request about a node: its announcement or its removal.

    Attributes:
        ttl_s: Seconds until it expires if it is not repeated; None: it does not expire.
        hands_over: Whether requests on a removed node move to other nodes immediately.
    """

    url: str
    role: str = ""
    bootstrap_port: int | None = None
    zone: str = ""
    ttl_s: float | None = None
    is_removed: bool = False
    hands_over: bool = False


class SourceState(msgspec.Struct, frozen=True):
    """State of a source in `GET /nodes`."""

    name: str
    problem: str = ""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """All members at one moment, and the removed nodes whose requests move to other nodes immediately."""

    members: list[Member]
    handing_over: list[str] = []
    sources: list[SourceState] = []


class SourceFailed(Exception):
    """A source cannot find its nodes now; the message is the reason."""


class NodeSource(Protocol):
    """A source of nodes. Its name is shown to operators."""

    name: str

    async def find(self) -> list[Member]:
        """Return all current nodes. Raises `SourceFailed`."""
        ...


class Membership:
    """Merges the sources, which the caller polls, and drops announcements that are not repeated in time."""

    def __init__(self, listed: Iterable[Member], sources: Iterable[NodeSource] = ()) -> None:
        self._listed = {member.url: member for member in listed}
        self._problems = dict.fromkeys((source.name for source in sources), "")
        self._found: dict[str, dict[str, Member]] = {}
        self._announced: dict[str, Announcement] = {}
        self._renewed_s: dict[str, float] = {}
        self._time_s, self._last_check_s = 0.0, 0.0

    def update_source(self, source: str, members: Iterable[Member]) -> None:
        """Replace the nodes of one source."""
        self._found[source] = {member.url: member for member in members}

    def note_problem(self, source: str, problem: str) -> bool:
        """Record why a source fails, empty while it works; return whether that has changed."""
        has_changed = self._problems[source] != problem
        self._problems[source] = problem
        return has_changed

    def announce(self, announcement: Announcement) -> bool:
        """Record an announcement or a removal; return whether it changes anything. Raises `InvalidRequest`."""
        url = announcement.url
        before = self._announced.get(url)
        # Only members can be removed, so removals need no limit of their own.
        is_new = before is None and not announcement.is_removed
        if is_new and len(self._announced) >= MAX_ANNOUNCED:
            raise InvalidRequest(f"{MAX_ANNOUNCED} nodes are announced already: this is the limit")
        self._announced[url] = announcement
        self._renewed_s[url] = self._time_s
        return before != announcement

    def expire(self, now: float, is_up: Callable[[str], bool]) -> list[Announcement]:
        """Remove and return the expired announcements.

        Args:
            now: Time of a monotonic clock, in seconds.
            is_up: Whether the node of a URL serves; its announcement does not expire while it does.
        """
        self._time_s += min(now - self._last_check_s, MAX_CHECK_INTERVAL_S)
        self._last_check_s = now
        for each in self._announced.values():
            if not each.is_removed and is_up(each.url):
                self._renewed_s[each.url] = self._time_s
        expired = [each for each in self._announced.values() if self._is_expired(each)]
        for each in expired:
            del self._announced[each.url], self._renewed_s[each.url]
        return expired

    def members(self) -> Members:
        """Return the current members, listed nodes first, in their order."""
        members = dict(self._listed)
        for each in self._announced.values():
            member = Member(each.url, each.role, each.bootstrap_port, each.zone, "announced")
            members.setdefault(each.url, member)
        for found in self._found.values():
            for url, member in found.items():
                members.setdefault(url, member)
        removed = [each for each in self._announced.values() if each.is_removed]
        for each in removed:
            del members[each.url]
        return Members(
            members=list(members.values()),
            handing_over=[each.url for each in removed if each.hands_over],
            sources=[SourceState(name, problem) for name, problem in self._problems.items()],
        )

    def _is_expired(self, announcement: Announcement) -> bool:
        age_s = self._time_s - self._renewed_s[announcement.url]
        if announcement.is_removed:
            return age_s > REMOVAL_KEPT_S and not self._is_named(announcement.url)
        return announcement.ttl_s is not None and age_s > announcement.ttl_s

    def _is_named(self, url: str) -> bool:
        return url in self._listed or any(url in found for found in self._found.values())
