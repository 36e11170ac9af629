"""All that a stack decides: pure, one call after another, told the time. `stack.py` has threads and a lock.

What there is to do is left in `outbox`: calls for workers, loans to close, events, notes for the log. A worker says
`begin` before each call, and `answered` or `failed` after it; what it is refused to begin it forgets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tandem.kvtier.calls import (
    Call,
    CallState,
    Get,
    Has,
    MemoryBudget,
    Outbox,
    Put,
    Read,
    TierCall,
    Write,
)
from tandem.kvtier.cost import Mean, TierCost
from tandem.kvtier.fetches import Fetches
from tandem.kvtier.link import TierLink
from tandem.kvtier.puts import Puts
from tandem.kvtier.tier import Loan
from tandem.wire.messages import TierLoad


@dataclass(frozen=True, slots=True)
class Lent:
    """Pages that came, looked over: as many as were asked for at most, each of the right length."""

    loan: Loan
    pages: Sequence[memoryview]


Answer = int | Lent | None
"""Of `Has` and `Put` a number, of `Get` and `Read` pages, of `Write` nothing."""


class StackCore:
    """The state of a stack.

    Args:
        names: Of the tiers, fastest first, and whether each lends memory of its own.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, bool]],
        page_bytes: int,
        *,
        timeout_s: float,
        max_staged_bytes: int,
    ) -> None:
        self.outbox = Outbox()
        limit_pages = max(1, max_staged_bytes // 2 // page_bytes)
        self.fetch_budget, self.save_budget = MemoryBudget(limit_pages), MemoryBudget(limit_pages)
        self._page_bytes = page_bytes
        self.links = [
            TierLink(
                name,
                rank,
                page_bytes,
                lends_own_memory=lends_own,
                timeout_s=timeout_s,
                outbox=self.outbox,
            )
            for rank, (name, lends_own) in enumerate(names)
        ]
        self.puts = Puts(self.links, self.save_budget, self.outbox, page_bytes)
        self.fetches = Fetches(self.links, self.fetch_budget, self.puts, self.outbox, timeout_s)
        self._place_page_s = Mean()
        self._is_closed = False

    def begin(self, call: Call, now_s: float) -> bool:
        """Return whether to make a call now; else nobody waits for it any more."""
        if call.state is not CallState.QUEUED:
            return False
        if isinstance(call, TierCall):
            self.links[call.rank].begin(call, now_s)
        else:
            call.state, call.begun_s = CallState.BEGUN, now_s
        return True

    def answered(self, call: Call, answer: Answer, now_s: float) -> None:
        """Take an answer, in time or late."""
        duration_s = now_s - call.begun_s
        if isinstance(call, TierCall):
            self.links[call.rank].answered(call, now_s)
        else:
            call.state = CallState.OVER
        match call, answer:
            case Has(), int():
                self.fetches.has_answered(call, answer)
            case Get(), Lent():
                self.fetches.get_answered(call, answer.loan, answer.pages, duration_s)
            case Put(), int():
                self.puts.answered(call, answer)
            case Read(), Lent():
                self.puts.read_answered(call, answer.loan, answer.pages)
            case Write(), None:
                if call.pages:
                    self._place_page_s.add(duration_s / len(call.pages))
                self._placed(call, is_whole=True)
            case _:
                raise AssertionError(f"{call} cannot be answered by {answer}")
        self._end_turn()

    def failed(self, call: Call, reason: str, now_s: float) -> None:
        """Note that a call raised."""
        if isinstance(call, TierCall):
            self.links[call.rank].failed(call, now_s, reason)
        else:
            call.state = CallState.OVER
            self.outbox.notes.append(("kv_tier.copy_failed", "", reason))
        match call:
            case Has() | Get():
                self.fetches.failed(call)
            case Read():
                self.puts.read_failed(call)
            case Write():
                self._placed(call, is_whole=False)
            case _:
                pass
        self._end_turn()

    def expire(self, now_s: float) -> None:
        """Do what is due by the clock."""
        # Fetches first: whoever hangs fails for what waited for it.
        self.fetches.expire(now_s)
        for link in self.links:
            link.expire(now_s)
        self._end_turn()

    def next_due_s(self) -> float | None:
        """Return when `expire` has something to do next."""
        if self._is_closed:
            return None
        due = [time_s for link in self.links for time_s in link.next_due_s()]
        return min([*due, *self.fetches.next_due_s()], default=None)

    def load(self, link: TierLink, own: TierLoad, page_size: int) -> TierLoad:
        """Return what a tier says of itself with what was seen of it here."""
        counts = link.counts
        return msgspec.structs.replace(
            own,
            name=link.name,
            state=link.state or own.state,
            hit_tokens=counts.hit_pages * page_size,
            missed_tokens=counts.missed_pages * page_size,
            late_tokens=counts.late_pages * page_size,
            put_bytes=counts.put_pages * self._page_bytes,
            got_bytes=counts.got_pages * self._page_bytes,
            num_failures=counts.num_failures,
        )

    def cost(self, link: TierLink) -> TierCost:
        """Return what a tier's answers took lately."""
        return link.meter.cost(self._place_page_s.value or 0.0)

    def close(self) -> None:
        """Forget all that waits, and tell nothing more. Calls under way are answered still."""
        self._is_closed = True
        self.fetches.close()
        self.puts.close()
        self.outbox.events.clear()

    def _end_turn(self) -> None:
        self.fetches.serve_waiting()
        if self._is_closed:
            self.outbox.events.clear()

    def _placed(self, call: Write, *, is_whole: bool) -> None:
        assert call.owner is not None
        self.fetches.placed(call.owner, is_whole=is_whole)
