"""Moves pages between the prefix cache and the tiers: decides what to fetch for a request and when to save.

```
 begin ──▶ hashing ──▶ searching ──Fetched──▶ placing ──Placed──▶ adopted: cached as if computed here
              │            │ miss, no free       │ pages held
              │            │ pages, cancel       └─ timeout, cancel: no request waits; pages stay held until Placed
              │            ├───────────────────▶ ended
              └────────────┴ timeout, cancel ──▶ ended
```

A fetch holds no pool pages while it searches, so it never blocks running requests. `ready` returns a request when its
wait ends, normally within the timeout; the request then uses what the prefix cache holds.

Pages that no tier has are saved independently of requests: immediately if other nodes can read the tiers, else when
few pages are left that can be evicted without loss.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec
from typing_extensions import override

from tandem.engine.pages.prefix_cache import MissingPages, num_equal
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import ActiveRequest
from tandem.kvtier.spec import parse_tiers
from tandem.kvtier.stack import Fetched, Placed, Saved
from tandem.node.config import TierConfig
from tandem.node.tiers.tiers import SEARCH_SHARE, TierGroup
from tandem.telemetry.histogram import Histogram, Spread
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import TokenArray

# Maximum pages per save: few enough for a short copy, many enough to be worth a round trip.
_SAVED_TOGETHER = 64
# Maximum share of all pages that saves hold, and of the available pages that one save takes.
_SAVING_SHARE, _SAVING_OF_AVAILABLE = 1 / 8, 1 / 4
# A tier that only this node reads is written when less than this share of pages can be evicted without loss.
_CLEAN_SHARE = 1 / 4
# Delay before a save that could not start is retried; the end of a different save cuts it short.
_SAVE_AGAIN_S = 0.1
# Interval for measuring a tier that was slower than recomputation; its store may only have been busy.
_PROBE_S = 30.0
# Histogram bounds: from one page in host memory to longer than any sensible timeout.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(slots=True, eq=False)
class _TierFetch:
    """A fetch of pages into the pool.

    Attributes:
        token_ids: The part of a prompt that can come from the cache.
        waiting: Requests that wait for the pages.
        is_searching: Whether all keys are hashed and the search in the tiers has begun.
        until_s: Deadline of those requests, in clock time.
        matched: While placing, the cached pages of the prefix before the placed ones; held.
        placed: While placing, the pages that the copy writes; held.
    """

    number: int
    token_ids: TokenArray
    salt: str
    missing: MissingPages
    waiting: list[ActiveRequest]
    began_s: float
    until_s: float
    is_searching: bool = False
    matched: list[int] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    by_tier: Mapping[str, int] = field(default_factory=dict)


class Tiering:
    """Fetches prefixes for waiting requests, and saves computed pages.

    Only the loop's thread calls it. Without a stack no request waits.
    """

    def __init__(
        self,
        engine: Engine,
        stack: TierGroup | None = None,
        *,
        timeout_s: float = 0.0,
        min_tokens: int = 0,
        saves_at_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._cache, self._stack = engine, engine.cache, stack
        self._timeout_s, self._clock = timeout_s, clock
        self._min_pages = max(1, -(-min_tokens // engine.cache.page_size))
        self._saves_at_once = saves_at_once
        self._numbers = itertools.count()
        self._fetches: dict[int, _TierFetch] = {}
        self._waiting: dict[ActiveRequest, _TierFetch] = {}
        self._ready: list[ActiveRequest] = []
        self._saves: dict[int, list[int]] = {}
        self._save_after_s = self._probe_after_s = 0.0
        self._seconds: dict[str, Histogram] = {}

    # ── for roles ────────────────────────────────────────────────────────────────────────────────

    def begin(self, active: ActiveRequest) -> bool:
        """Start to fetch the uncached part of a prompt; `ready` returns the request later.

        Return False if there is nothing to wait for.
        """
        token_ids, salt = active.token_ids[: active.num_matchable], active.request.cache_salt
        size = self._cache.page_size
        if self._stack is None or len(token_ids) < self._min_pages * size:
            return False
        missing = self._cache.missing(token_ids, salt, self._min_pages)
        if missing is None or not self._is_worthwhile(missing.num_pages):
            return False
        fetch = self._matching_fetch(token_ids, salt, missing)
        if fetch is None:
            now = self._clock()
            number = next(self._numbers)
            fetch = _TierFetch(number, token_ids, salt, missing, [], now, now + self._timeout_s)
            self._fetches[number] = fetch
            self._hash(fetch)
        fetch.waiting.append(active)
        self._waiting[active] = fetch
        return True

    @property
    def waiting(self) -> Collection[ActiveRequest]:
        """Requests that wait for the tiers."""
        return self._waiting.keys()

    def cancel(self, active: ActiveRequest) -> None:
        """Cancel the wait of a request; a request that does not wait is ignored."""
        fetch = self._waiting.pop(active, None)
        if fetch is None:
            self._ready = [each for each in self._ready if each is not active]
            return
        fetch.waiting.remove(active)
        if not fetch.waiting and not fetch.placed:
            self._drop(fetch)

    def ready(self) -> list[ActiveRequest]:
        """Return the requests whose wait has ended, with `from_tiers` set to their tokens by tier."""
        ready, self._ready = self._ready, []
        return ready

    def poll(self) -> None:
        """Process the tiers' events, end fetches past their deadline, and start saves."""
        if self._stack is None:
            return
        for event in self._stack.events():
            if isinstance(event, Saved):
                self._on_saved(event)
            elif isinstance(event, Placed):
                self._on_placed(event)
            else:
                self._on_fetched(event)
        self._end_late()
        for fetch in self._fetches.values():
            if not fetch.is_searching:
                self._hash(fetch)
                break  # one slice per pass
        self._save()

    def wait_s(self, at_most_s: float) -> float:
        """Return the seconds until an idle loop must poll again, at most `at_most_s`."""
        if self._stack is None:
            return at_most_s
        if any(not fetch.is_searching for fetch in self._fetches.values()):
            return 0.0
        now = self._clock()
        until = [now + at_most_s]
        if self._num_to_save():
            until.append(self._save_after_s)
        until += [fetch.until_s for fetch in self._fetches.values() if fetch.waiting]
        return max(0.0, min(until) - now)

    # ── for operators ────────────────────────────────────────────────────────────────────────────

    def loads(self) -> list[TierLoad]:
        """Return the load of each tier, fastest first, with `token_cost` if it is known."""
        if self._stack is None:
            return []
        costs, computed_s = self._stack.costs(), self._engine.steps.prompt_token_s
        page_s = computed_s * self._cache.page_size
        return [
            msgspec.structs.replace(load, token_cost=costs[load.name].page_s / page_s)
            if page_s and costs[load.name].num_pages
            else load
            for load in self._stack.loads()
        ]

    def seconds(self) -> dict[str, Spread]:
        """Return waiting times of requests by the slowest tier that returned pages, or `none`."""
        return {name: histogram.spread() for name, histogram in self._seconds.items()}

    @override
    def __repr__(self) -> str:
        return f"Tiering({len(self._fetches)} fetches, {len(self._saves)} saves)"

    # ── fetching ─────────────────────────────────────────────────────────────────────────────────

    def _is_worthwhile(self, num_pages: int) -> bool:
        """Whether some tier may be faster than computing the pages; True while costs are unknown."""
        assert self._stack is not None
        costs = self._stack.costs().values()
        computed_s = num_pages * self._cache.page_size * self._engine.steps.prompt_token_s
        if not computed_s or any(not cost.num_pages for cost in costs):
            return True
        if min(cost.seconds(num_pages) for cost in costs) < computed_s:
            return True
        if self._clock() < self._probe_after_s:
            return False
        self._probe_after_s = self._clock() + _PROBE_S
        return True

    def _matching_fetch(
        self, token_ids: TokenArray, salt: str, missing: MissingPages
    ) -> _TierFetch | None:
        """Return a fetch in progress that covers these pages, or all but at most `_min_pages - 1` of them."""
        for fetch in self._fetches.values():
            if (
                fetch.waiting
                and fetch.salt == salt
                and fetch.missing.first_page == missing.first_page
            ):
                num_same = num_equal(fetch.token_ids, token_ids) // self._cache.page_size
                num_fetched = min(num_same - missing.first_page, missing.num_pages)
                if num_fetched > missing.num_pages - self._min_pages:
                    return fetch
        return None

    def _hash(self, fetch: _TierFetch) -> None:
        """Hash a slice of a fetch's keys. After the last one, start the search and its timeout."""
        assert self._stack is not None
        if fetch.missing.hash_slice():
            fetch.is_searching, fetch.until_s = True, self._clock() + self._timeout_s
            self._stack.fetch(fetch.number, fetch.missing.keys)

    def _on_fetched(self, event: Fetched) -> None:
        fetch = self._fetches.get(event.number)
        if fetch is None:
            return
        fetch.by_tier = event.by_tier
        if not event.num_pages or not self._take_pages(fetch, event.num_pages):
            self._drop(fetch)
            return
        assert self._stack is not None
        # A long step may have delayed this event, which is not the tiers' fault: give the copy its full time.
        copying_s = (1 - SEARCH_SHARE) * self._timeout_s
        fetch.until_s = max(fetch.until_s, self._clock() + copying_s)
        self._stack.place(fetch.number, fetch.placed)

    def _take_pages(self, fetch: _TierFetch, num_pages: int) -> bool:
        """Hold the prefix before the fetched pages and allocate pages for them; return False if impossible or useless."""
        first, size = fetch.missing.first_page, self._cache.page_size
        match = self._cache.match(fetch.token_ids[: (first + num_pages) * size], fetch.salt)
        is_useful = first <= len(match.page_ids) < first + num_pages
        # Leave one page per running request: fetched pages are not worth a retraction.
        is_useful &= num_pages + self._engine.num_running <= self._cache.num_available
        fetch.matched = match.page_ids[:first] if is_useful else []
        self._cache.release(match.page_ids[len(fetch.matched) :])
        fetch.placed = (self._cache.allocate(num_pages) if is_useful else None) or []
        if not fetch.placed:
            self._cache.release(fetch.matched)
        return bool(fetch.placed)

    def _on_placed(self, event: Placed) -> None:
        fetch = self._fetches.pop(event.number)
        by_tier: dict[str, int] = {}
        if event.is_complete:
            end = (fetch.missing.first_page + len(fetch.placed)) * self._cache.page_size
            self._cache.adopt(
                fetch.token_ids[:end],
                fetch.matched,
                fetch.placed,
                fetch.salt,
                # If pages are saved only before eviction, these count as unsaved, so that a save refreshes the tier.
                is_saved=self._saves_at_once,
            )
            by_tier = {name: num * self._cache.page_size for name, num in fetch.by_tier.items()}
        else:
            self._cache.release([*fetch.matched, *fetch.placed])
        self._engine.note_pages()
        self._end_wait(fetch, by_tier)

    def _drop(self, fetch: _TierFetch) -> None:
        """End a fetch that is not being placed."""
        assert self._stack is not None
        del self._fetches[fetch.number]
        if fetch.is_searching:
            self._stack.cancel(fetch.number)
        self._end_wait(fetch, {})

    def _end_late(self) -> None:
        now = self._clock()
        for fetch in list(self._fetches.values()):
            if fetch.began_s + self._timeout_s > now:
                return  # all later fetches began after this one
            if fetch.until_s > now:
                continue
            if fetch.placed:
                self._end_wait(fetch, {})
            else:
                self._drop(fetch)

    def _end_wait(self, fetch: _TierFetch, from_tiers: Mapping[str, int]) -> None:
        waiting, fetch.waiting = fetch.waiting, []
        for active in waiting:
            del self._waiting[active]
            active.from_tiers = from_tiers
        self._ready += waiting
        if waiting:
            slowest = list(from_tiers)[-1] if from_tiers else "none"
            histogram = self._seconds.setdefault(slowest, Histogram(_SECONDS))
            histogram.observe(self._clock() - fetch.began_s, len(waiting))

    # ── saving ───────────────────────────────────────────────────────────────────────────────────

    def _num_to_save(self) -> int:
        """Return the maximum number of pages of the next save; 0: do not save now."""
        cache = self._cache
        if not cache.num_unsaved:
            return 0
        available = cache.num_available
        if not self._saves_at_once:
            is_clean = available - cache.num_unsaved >= _CLEAN_SHARE * cache.num_pages
            if is_clean or available < 1 / _SAVING_OF_AVAILABLE:
                return 0
        num_saving = sum(len(pages) for pages in self._saves.values())
        room = max(1, int(_SAVING_SHARE * cache.num_pages)) - num_saving
        return max(0, min(room, _SAVED_TOGETHER, max(1, int(_SAVING_OF_AVAILABLE * available))))

    def _save(self) -> None:
        assert self._stack is not None
        while self._clock() >= self._save_after_s and (num := self._num_to_save()):
            num = min(num, self._stack.max_save_pages)
            keys = self._cache.begin_save(num, only_unused=not self._saves_at_once)
            number, pages = next(self._numbers), list(keys)
            if keys and self._stack.save(number, list(keys.values()), pages):
                self._saves[number] = pages
                continue
            self._save_after_s = self._clock() + _SAVE_AGAIN_S
            self._cache.end_save(pages, is_saved=False)

    def _on_saved(self, event: Saved) -> None:
        self._cache.end_save(self._saves.pop(event.number))
        self._save_after_s = 0.0
        self._engine.note_pages()


def make_tiering(config: TierConfig, engine: Engine, stack: TierGroup | None) -> Tiering:
    """Return the `Tiering` of a node; without a stack it fetches and saves nothing."""
    return Tiering(
        engine,
        stack,
        timeout_s=config.timeout_s,
        min_tokens=config.min_tokens,
        # Host memory is read only by this node, so pages are saved before eviction. Other nodes may need pages in
        # shared tiers at any time.
        saves_at_once=any(spec.kind != "host" for spec in parse_tiers(config.specs)),
    )
