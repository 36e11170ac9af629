"""Tiers below vLLM's prefix cache: prompts are searched there before they are computed, and saved when they end.

```
 search ── found ──▶ vLLM allocates blocks ── place ──▶ placed ──▶ vLLM computes the rest
    └─ nothing, too late ──▶ vLLM computes the prompt
 a request ends ── save ──▶ vLLM keeps its blocks until they are saved, and handed off
```

Imports no vLLM, and calls none: the connector asks, and reports what `finish` returns. Only for nodes with one rank.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count, islice

from tandem.kvtier.stack import Fetched, Placed, Saved, TierEvent, TierStack
from tandem.vllm.worker import Results
from tandem.wire.channel import Waker
from tandem.wire.prefixes import PageSpace, page_keys


@dataclass(slots=True)
class _Search:
    """The search for the blocks of one prompt.

    Attributes:
        first: Index of the first block that vLLM's cache lacks.
        num_found: Blocks that the tiers have from there on; None while they are searched.
    """

    number: int
    first: int
    num_found: int | None = None


class PromptTiers:
    """The tiers of a node. The engine's thread calls it.

    Args:
        open_stack: Opens the tiers, which report events to its argument.
        space: What all blocks share.
        min_tokens: Prompts that lack fewer tokens are computed without a search.
        waker: Set when `results` has something to return.

    Attributes:
        stack: The tiers.
    """

    def __init__(
        self,
        open_stack: Callable[[Callable[[TierEvent], None]], TierStack],
        space: PageSpace,
        min_tokens: int,
        waker: Waker,
    ) -> None:
        self._space, self._min_tokens, self._waker = space, min_tokens, waker
        self._events: deque[TierEvent] = deque()
        self._numbers = count()
        self._searches: dict[str, _Search] = {}
        self._over: dict[str, int] = {}  # searched requests, with their blocks that need no save
        self._placing: dict[int, str] = {}
        self._saving: dict[int, str] = {}
        self._held: dict[str, int] = {}  # how many still read the blocks of a finished request
        self.stack = open_stack(self._report)

    def _report(self, event: TierEvent) -> None:
        """Take an event of the stack, on any thread."""
        self._events.append(event)
        self._waker.wake()

    def num_external(
        self, request_id: str, token_ids: Sequence[int], scope: str, num_computed: int
    ) -> int | None:
        """Return how many tokens after the `num_computed` cached ones come from the tiers; None: not known yet.

        Args:
            token_ids: The prompt, and the answer so far.
            scope: See `scope_name`.
            num_computed: A multiple of the block size.
        """
        if request_id in self._over:
            return 0
        size = self._space.page_size
        first = num_computed // size
        search = self._searches.get(request_id)
        if search is None:
            # vLLM computes at least one token.
            num_pages = (len(token_ids) - 1) // size
            if (num_pages - first) * size < max(1, self._min_tokens):
                self._over[request_id] = first
                return 0
            search = self._searches[request_id] = _Search(next(self._numbers), first)
            keys = page_keys(self._space, token_ids, scope)
            self.stack.fetch(search.number, list(islice(keys, first, num_pages)))
            return None
        if search.num_found is None:
            return None
        if search.first != first or not search.num_found:  # vLLM's cache has changed meanwhile
            self._drop(request_id, first)
            return 0
        return search.num_found * size

    def place(self, request_id: str, page_ids: Sequence[int]) -> None:
        """Copy what was found into the blocks that vLLM has allocated for a request's first tokens, in order."""
        search = self._searches.pop(request_id)
        assert search.num_found
        end = search.first + search.num_found
        self._over[request_id] = end
        self._placing[search.number] = request_id
        self.stack.place(search.number, page_ids[search.first : end])

    def skip(self, request_id: str, num_tokens: int) -> None:
        """Neither search nor save the blocks of a request's first tokens, which come from prefill."""
        self._over[request_id] = num_tokens // self._space.page_size

    def finish(
        self,
        request_id: str,
        token_ids: Sequence[int],
        scope: str,
        page_ids: Sequence[int],
        *,
        is_held: bool,
    ) -> bool:
        """End a request and save its blocks; return whether vLLM must hold them until `results` names it.

        Args:
            token_ids: Tokens whose KV is computed; none if the request has failed.
            page_ids: The request's blocks.
            is_held: Whether a hand-off holds them, too.
        """
        if request_id in self._searches:
            self._drop(request_id, 0)
        first, size = self._over.pop(request_id, 0), self._space.page_size
        end = min(len(token_ids) // size, len(page_ids), first + self.stack.max_save_pages)
        if first >= end:
            return is_held
        keys = list(islice(page_keys(self._space, token_ids, scope), first, end))
        number = next(self._numbers)
        if not self.stack.save(number, keys, page_ids[first:end]):
            return is_held
        self._saving[number] = request_id
        self._held[request_id] = 1 + is_held
        return True

    def results(self, sent: Collection[str]) -> Results:
        """Return which requests' blocks have been placed, and which are free.

        Args:
            sent: Finished requests whose hand-offs have ended.
        """
        results = Results()
        for request_id in sent:
            self._release(request_id, results)
        while self._events:
            match self._events.popleft():
                case Fetched(number=number, num_pages=num_pages):
                    for search in self._searches.values():
                        if search.number == number:
                            search.num_found = num_pages
                case Placed(number=number, is_complete=is_complete):
                    request_id = self._placing.pop(number)
                    results.received.add(request_id)
                    if not is_complete:
                        results.failed.add(request_id)
                case Saved(number=number):
                    self._release(self._saving.pop(number), results)
        return results

    def close(self) -> None:
        """Close the tiers. Call it before the pool's memory goes away."""
        self.stack.close()

    def _drop(self, request_id: str, first: int) -> None:
        self.stack.cancel(self._searches.pop(request_id).number)
        self._over[request_id] = first

    def _release(self, request_id: str, results: Results) -> None:
        num_left = self._held.pop(request_id, 1) - 1
        if num_left:
            self._held[request_id] = num_left
        else:
            results.sent.add(request_id)
