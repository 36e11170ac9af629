"""One tier as the stack sees it: whether it is asked now, what it is at, what came of it. Pure."""

from dataclasses import dataclass

from typing_extensions import override

from tandem.kvtier.back_off import BackOff, Health
from tandem.kvtier.calls import CallState, Has, Outbox, Put, TierCall
from tandem.kvtier.cost import CostMeter
from tandem.wire.page_keys import PageKey

# A tier that takes this long to keep `MAX_CALL_BYTES` is slower than computing them again.
PUT_LIMIT_S = 5.0
# One call's share of a long run: so much comes late at most, and is sent in one piece.
MAX_CALL_BYTES = 16 << 20
# Until its speed is known.
FIRST_CALL_BYTES = 2 << 20
# A call ought to take that part of the time limit, so that little is on its way when the time is up.
_CALLS_PER_TIMEOUT = 16


@dataclass(slots=True)
class TierCounts:
    """In pages and calls, of this process's life."""

    hit_pages: int = 0
    missed_pages: int = 0
    late_pages: int = 0
    put_pages: int = 0
    got_pages: int = 0
    num_failures: int = 0


class TierLink:
    """What is known of a tier.

    Args:
        rank: Its place in the stack; 0 is the fastest.
        lends_own_memory: What it lends takes no memory of the stack.
        timeout_s: For what a request waits for.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        page_bytes: int,
        *,
        lends_own_memory: bool,
        timeout_s: float,
        outbox: Outbox,
    ) -> None:
        self.name, self.rank, self.lends_own_memory = name, rank, lends_own_memory
        self.counts, self.meter = TierCounts(), CostMeter()
        self.reads, self.writes = BackOff(), BackOff()
        self._page_bytes, self._timeout_s, self._outbox = page_bytes, timeout_s, outbox
        self._under_way: set[TierCall] = set()
        self._puts: dict[Put, None] = {}
        self._probe_key: PageKey | None = None

    @override
    def __repr__(self) -> str:
        return f"<TierLink {self.name} {self.state} {len(self._under_way)} calls, {len(self._puts)} puts>"

    @property
    def state(self) -> str:
        """As `TierLoad.state` has it; empty: as the tier itself says."""
        if self.reads.health is not Health.UP:
            return "backing_off"
        # Reads go on.
        return "full" if self.writes.health is not Health.UP else ""

    @property
    def can_read(self) -> bool:
        """Whether a request may ask it."""
        return self.reads.health is Health.UP

    @property
    def num_put_pages(self) -> int:
        """Pages that wait to be put, or are being."""
        return sum(len(put.keys) for put in self._puts)

    @property
    def is_hanging(self) -> bool:
        """Whether a call that was given up has a worker still: a put behind it might wait for good."""
        return any(call.is_overdue for call in self._under_way)

    @property
    def takes_puts(self) -> bool:
        """Whether a put that is queued now will be begun."""
        return self.writes.health is not Health.WAITING and not self.is_hanging

    def can_write(self, now_s: float) -> bool:
        """Whether pages may be put; what comes first after a wait is the probe."""
        return self.takes_puts or (not self.is_hanging and self.writes.probe(now_s))

    def call_pages(self) -> int:
        """Return how many pages to ask for at once."""
        if (page_s := self.meter.page_s) is None:
            num_bytes = FIRST_CALL_BYTES
        else:
            seconds = self._timeout_s / _CALLS_PER_TIMEOUT
            num_bytes = int(min(MAX_CALL_BYTES, seconds / max(page_s, 1e-9) * self._page_bytes))
        return max(1, num_bytes // self._page_bytes)

    def queue_put(self, put: Put) -> None:
        """Have pages put, holding them until then."""
        put.run.hold()
        self._puts[put] = None
        self._outbox.calls.append(put)

    def begin(self, call: TierCall, now_s: float) -> None:
        """Note that a worker makes the call now."""
        call.state, call.begun_s = CallState.BEGUN, now_s
        self._under_way.add(call)

    def answered(self, call: TierCall, now_s: float) -> None:
        """Note that a call ended well."""
        self._end(call)
        self._measure(call, now_s)
        if call.is_overdue:
            return
        back_off = self.writes if isinstance(call, Put) else self.reads
        if back_off.health is Health.PROBING:
            self._outbox.notes.append(("kv_tier.up", self.name, ""))
        back_off.worked()

    def failed(self, call: TierCall, now_s: float, reason: str) -> None:
        """Note that a call failed, or is late beyond hope."""
        self._end(call)
        if not call.is_overdue:
            self._fail(call, now_s, reason)

    def expire(self, now_s: float) -> None:
        """Give up calls that hang, and ask a tier that failed whether it is back."""
        for call in list(self._under_way):
            if not call.is_overdue and now_s >= self._limit_s(call):
                self.give_up(call, now_s)
        if self._probe_key is not None and self.reads.probe(now_s):
            self._outbox.calls.append(Has(owner=None, rank=self.rank, keys=[self._probe_key]))

    def give_up(self, call: TierCall, now_s: float) -> None:
        """Take a call that was begun for one that failed. The worker has it still, with its memory."""
        call.is_overdue = True
        self.drop_puts()
        self._fail(call, now_s, f"no answer in {now_s - call.begun_s:.3g} s")

    def has_hung(self, call: TierCall, now_s: float) -> bool:
        """Return whether a call took most of the time of the request that ends now."""
        return (
            call.state is CallState.BEGUN
            and not call.is_overdue
            and now_s - call.begun_s >= self._timeout_s / 2
        )

    def next_due_s(self) -> list[float]:
        """Return when `expire` has something to do."""
        due = [self._limit_s(call) for call in self._under_way if not call.is_overdue]
        return [*due, self.reads.until_s] if self.reads.health is Health.WAITING else due

    def drop_puts(self) -> None:
        """Forget the puts that no worker has begun."""
        for put in [put for put in self._puts if put.state is CallState.QUEUED]:
            put.state = CallState.OVER
            self._forget_put(put)

    def _end(self, call: TierCall) -> None:
        call.state = CallState.OVER
        self._under_way.discard(call)
        if isinstance(call, Put):
            self._forget_put(call)

    def _forget_put(self, put: Put) -> None:
        del self._puts[put]
        put.run.release(self._outbox)

    def _measure(self, call: TierCall, now_s: float) -> None:
        if isinstance(call, Has):
            self.meter.looked(now_s - call.begun_s)

    def _limit_s(self, call: TierCall) -> float:
        return call.begun_s + (PUT_LIMIT_S if isinstance(call, Put) else self._timeout_s)

    def _fail(self, call: TierCall, now_s: float, reason: str) -> None:
        self.counts.num_failures += 1
        is_put = isinstance(call, Put)
        back_off = self.writes if is_put else self.reads
        if back_off.health is not Health.WAITING:
            event = "kv_tier.put_failed" if is_put else "kv_tier.failed"
            self._outbox.notes.append((event, self.name, reason))
        back_off.failed(now_s)
        if is_put:
            self.drop_puts()
        else:
            self._probe_key = call.keys[0]
