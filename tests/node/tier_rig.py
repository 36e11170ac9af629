"""Scripted tier stacks, over a toy engine whose KV is the tokens themselves."""

import pickle  # noqa: TID251 - as the pipe between ranks does
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem.kvtier.guard import TierCost
from tandem.kvtier.stack import Fetched, Placed, Saved
from tandem.node.tiers.tiers import RankTiers
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PrefixJournal


@dataclass
class ScriptedStack:
    """Stores saved pages by digest; answers only when a test lets it, in any order.

    Attributes:
        pool: The bytes of the pool, page by page: a row of an array each.
        looking, placing, saving: What was asked and is not answered.
        cancelled: The fetches that were abandoned.
        is_full: Refuses saves.
    """

    pool: object
    content: dict[bytes, object] = field(default_factory=dict)
    looking: dict[int, list[PageKey]] = field(default_factory=dict)
    fetched: dict[int, list[object]] = field(default_factory=dict)
    placing: dict[int, list[int]] = field(default_factory=dict)
    saving: dict[int, tuple[list[PageKey], list[int]]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    is_full: bool = False
    max_save_pages: int = 1000
    cost: TierCost = field(default_factory=lambda: TierCost(0.0, 0.0, 0))
    reported: deque[object] = field(default_factory=deque)

    def fetch(self, number: int, keys: Sequence[PageKey]) -> None:
        assert not {number} & {*self.looking, *self.fetched}
        self.looking[number] = list(keys)

    def place(self, number: int, page_ids: Sequence[int]) -> None:
        assert len(page_ids) <= len(self.fetched[number])
        self.placing[number] = list(page_ids)

    def cancel(self, number: int) -> None:
        assert number not in self.placing, "abandoned while it is placed"
        self.looking.pop(number, None)
        self.fetched.pop(number, None)
        self.cancelled.add(number)

    def save(self, number: int, keys: Sequence[PageKey], page_ids: Sequence[int], wait_s=0) -> bool:
        assert len(keys) == len(page_ids) <= self.max_save_pages
        if not self.is_full:
            self.saving[number] = (list(keys), list(page_ids))
        elif wait_s:
            self.reported.append(Saved(number))  # it waited and got no memory
        return not self.is_full

    def close(self) -> None:
        pass

    def events(self):
        while self.reported:
            yield self.reported.popleft()

    def loads(self) -> list[TierLoad]:
        return [TierLoad(name="host", num_pages=len(self.content))]

    def costs(self):
        return {"host": self.cost}

    def journals(self):
        return {"host": PrefixJournal()}

    # ── for tests ────────────────────────────────────────────────────────────────────────────────

    def answer_fetch(self, number: int, at_most: int = 1000) -> None:
        """Answer a fetch with the pages that exist, at most `at_most`."""
        pages: list[object] = []
        for key in self.looking.pop(number)[:at_most]:
            if key.digest not in self.content:
                break
            pages.append(self.content[key.digest])
        self.fetched[number] = pages
        self.reported.append(Fetched(number, len(pages), {"host": len(pages)} if pages else {}))

    def answer_place(self, number: int, *, is_whole: bool = True) -> None:
        """Copy pages to the pool, or corrupt them."""
        pages = self.fetched.pop(number)
        for page, bytes_ in zip(self.placing.pop(number), pages, strict=False):
            self.pool[page] = bytes_ if is_whole else 0
        self.reported.append(Placed(number, is_whole))

    def answer_save(self, number: int) -> None:
        """Copy pages from the pool."""
        keys, page_ids = self.saving.pop(number)
        for key, page in zip(keys, page_ids, strict=True):
            self.content[key.digest] = self.pool[page].copy()
        self.reported.append(Saved(number))

    def answer_all(self) -> None:
        """Answer all outstanding calls, in order."""
        for asked, answer in (
            (self.looking, self.answer_fetch),
            (self.placing, self.answer_place),
            (self.saving, self.answer_save),
        ):
            for number in list(asked):
                answer(number)


class FakeRank:
    """Rank 1 with its tiers and no process: calls and events are pickled, and wait until `work`."""

    def __init__(self, stack: ScriptedStack) -> None:
        self._stack, self._tiers = stack, RankTiers(stack, "1/2")
        self._calls: deque[bytes] = deque()
        self._events: deque[bytes] = deque()

    def call(self, target: str, method: str, *arguments: object) -> None:
        assert target == "tiers"
        self._calls.append(pickle.dumps((method, arguments)))

    def take_events(self, source: str) -> Iterator[object]:
        assert source == "tiers"
        while self._events:
            yield pickle.loads(self._events.popleft())

    def work(self, num_calls: int = 1000) -> None:
        """Run passes of the rank's loop for a number of calls."""
        for _ in range(min(num_calls, len(self._calls))):
            method, arguments = pickle.loads(self._calls.popleft())
            getattr(self._tiers, method)(*arguments)
            self._report()
        self._report()

    def _report(self) -> None:
        self._events += [pickle.dumps(event) for event in self._stack.events()]
