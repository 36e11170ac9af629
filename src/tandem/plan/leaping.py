"""An engine that leaps over forwards which differ in nothing but one more token for every answer.

```
 forward k under way, k - 1 collected                                    k + m under way, k + m - 1 collected
   ╞════ k ════╡═ k + 1 ═╡═ ... ═╡═ k + m ═╡      repeat(m)      ═▶        ╞═ k + m ═╡
```

A forward is such a one when the same answers ran in the one before, none of them ends, pages suffice and
nobody waits to be let in. What m of them do is then known: where every token goes, which pages are taken,
and how long each takes. The state behind them is that which `Engine.step`, called m times, leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tandem.engine.config import EngineConfig
from tandem.engine.core import Engine
from tandem.engine.forward import Batch, Ints, Slots, Wrote
from tandem.engine.request import ActiveRequest
from tandem.engine.scheduler import _DECAY_PER_STEP, _LEAST_SHARE, RETRY_FORWARDS, Scheduler
from tandem.engine.shape import ModelShape
from tandem.engine.simulated import SimulatedLauncher, SimulatedOutcome
from tandem.engine.step import CompletePages, Launched
from tandem.plan.agenda import NodeClock
from tandem.plan.seam import NodeKind
from tandem.wire.generation import GenerateRequest

Seconds = npt.NDArray[np.float64]

# Of a forward's layers, as told to the push: more would cost time and change nothing that is seen.
MAX_LAYER_PARTS = 8
# Leapt over in one go at most: a leap is worked out before it is known whether something comes between.
MAX_LEAP = 512


class PlannedLauncher(SimulatedLauncher):
    """Lets virtual time pass; all answers are of one token, over and over.

    Attributes:
        busy_s: Time of all forwards so far.
    """

    def __init__(self, kind: NodeKind, clock: NodeClock) -> None:
        layers = min(kind.num_layers, MAX_LAYER_PARTS)
        super().__init__(kind.profile, np.zeros(1, np.int64), layers, clock=clock.clock())
        self.busy_s = 0.0

    @override
    def check(self, request: GenerateRequest) -> None:
        """Anything may be asked for."""

    @override
    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """See `Launcher.seed`: nothing is drawn."""
        return 0

    @override
    def launch(
        self, batch: Batch, slots: Slots, pages: list[CompletePages], wrote: Wrote | None
    ) -> Launched:
        """See `Launcher.launch`."""
        launched = super().launch(batch, slots, pages, wrote)
        outcome = launched.outcome
        assert isinstance(outcome, SimulatedOutcome)
        self.busy_s += outcome.end_s - outcome.begin_s
        return launched

    @override
    def _tokens_at(self, keys: npt.NDArray[np.uint64], indexes: Ints) -> Ints:
        return np.zeros(len(indexes), np.int64)

    def decode_s(self, num_requests: int, num_read: Ints) -> Seconds:
        """Return how long forwards over answers alone take that read so many tokens."""
        times = self._profile.decode
        reading_ms = times.per_context_token_ms * num_read
        took_s: Seconds = (times.base_ms + times.per_request_ms * num_requests + reading_ms) / 1000
        return took_s

    def leapt(self, end_s: float, busy_s: float) -> None:
        """The device has so much to do, until then."""
        self._idle_at_s = end_s
        self.busy_s += busy_s


@dataclass(frozen=True, slots=True)
class Leap:
    """Passes whose forwards may be leapt over.

    Attributes:
        starts_s: When each pass begins, and when the one behind the last does. Shape (num + 1,).
        begins_s: When the device begins with the forward that each pass launches. Shape (num,).
        ends_s: When it ends with it.
        took_s: How long each forward is.
    """

    starts_s: Seconds
    begins_s: Seconds
    ends_s: Seconds
    took_s: Seconds

    def __len__(self) -> int:
        return len(self.begins_s)


class LeapingScheduler(Scheduler):
    """A scheduler that does in one go what many forwards over the same answers do."""

    @property
    def num_until_retry(self) -> int:
        """Forwards until those that lack pages are tried again."""
        return RETRY_FORWARDS - self._num_forwards % RETRY_FORWARDS

    @property
    def num_changes(self) -> int:
        """See `Scheduler`: counts what may have made room."""
        return self._num_changes

    def num_repeatable(self, limit: int) -> int:
        """Return how many forwards over all answers can run before one has its last token or pages end."""
        slots, rows = self.slots, self._decode_rows()
        count = min(limit, int((slots.max_tokens[rows] - slots.num_tokens[rows]).min()))
        available = self.cache.num_available
        if self._num_wanted(count) <= available:
            return count
        low = 0
        while count - low > 1:
            middle = (low + count) // 2
            low, count = (middle, count) if self._num_wanted(middle) <= available else (low, middle)
        return low

    def repeat(self, count: int) -> None:
        """Do what `next_batch` and `advance` do in `count` forwards over all answers."""
        slots, rows = self.slots, self._decode_rows()
        for _ in range(count):
            self.growth_share = max(_LEAST_SHARE, self.growth_share * _DECAY_PER_STEP)
        before, self._num_forwards = self._num_forwards, self._num_forwards + count
        self._num_changes += self._num_forwards // RETRY_FORWARDS - before // RETRY_FORWARDS
        wanted = self._pages_wanted(count)
        for row in np.flatnonzero(wanted):
            active = self.decodes[row]
            pages = self.cache.allocate(int(wanted[row]))
            assert pages is not None
            active.page_ids += pages
            slots.add_pages(active, pages)
        slots.num_tokens[rows] += count
        slots.next_index[rows] += count

    def answers_tokens(self) -> int:
        """Return the tokens of all answers and their prompts."""
        return int(self.slots.num_tokens[self._decode_rows()].sum())

    def are_all_running(self, decodes: list[ActiveRequest]) -> bool:
        """Tell whether these are all answers, and none has had its last forward."""
        rows = self._decode_rows()
        can_run = self.slots.num_tokens[rows] < self.slots.max_tokens[rows]
        return self.decodes == decodes and bool(can_run.all())

    def rows(self) -> Ints:
        """Return the slots of all answers."""
        return self._decode_rows()

    def _pages_wanted(self, count: int) -> npt.NDArray[np.int64]:
        """Return how many more pages each answer has after so many forwards."""
        rows = self._decode_rows()
        until = self.slots.num_tokens[rows] + count - 1
        lacking = -(-until // self.cache.page_size) - self.slots.num_pages[rows]
        wanted: npt.NDArray[np.int64] = np.maximum(lacking, 0)
        return wanted

    def _num_wanted(self, count: int) -> int:
        return int(self._pages_wanted(count).sum()) if count else 0


class LeapingEngine(Engine):
    """An engine in virtual time."""

    def __init__(self, kind: NodeKind, shape: ModelShape, clock: NodeClock) -> None:
        config = EngineConfig(
            model_dir="",
            page_size=kind.page_size,
            max_running_requests=kind.max_running,
            chunked_prefill_size=kind.chunked_prefill_size,
            is_overlapped=kind.is_overlapped,
        )
        self.launcher = PlannedLauncher(kind, clock)
        super().__init__(self.launcher, shape, config, kind.num_tokens // kind.page_size)
        self.scheduler = LeapingScheduler(self.cache, config, self.max_tokens)
        self._scheduler = self.scheduler
        self._host_step_s = kind.host_step_s

    @property
    def is_steady(self) -> bool:
        """Whether the next step runs what the last one launched, and nothing else."""
        if self._launched is None or not self._is_overlapped:
            return False
        batch, scheduler = self._launched.batch, self.scheduler
        is_alone = not (batch.chunks or scheduler.prompts or scheduler.waiting or self._compiling)
        return is_alone and scheduler.are_all_running(batch.decodes)

    def plan_leap(self, now_s: float, limit: int) -> Leap:
        """Return the passes from now on that may be leapt over; the engine is steady."""
        num = self.scheduler.num_repeatable(min(limit, MAX_LEAP))
        num_requests = len(self.scheduler.decodes)
        num_read = self.scheduler.answers_tokens() + num_requests * np.arange(num)
        took_s = self.launcher.decode_s(num_requests, num_read)
        free_s = self._under_way().end_s
        if num and now_s + self._host_step_s <= free_s and self._host_step_s <= took_s[0]:
            # The device never waits for the loop: one forward behind the other.
            ends_s = np.cumsum(np.append(free_s, took_s))
            return Leap(np.append(now_s, ends_s[:-1]), ends_s[:-1], ends_s[1:], took_s)
        return self._plan_slowly(now_s, free_s, took_s)

    def _plan_slowly(self, now_s: float, free_s: float, took_s: Seconds) -> Leap:
        """Return the passes of a loop that may take longer than the forwards."""
        num = len(took_s)
        starts_s, begins_s, ends_s = np.empty(num + 1), np.empty(num), np.empty(num)
        starts_s[0] = now_s
        for index in range(num):
            begins_s[index] = now_s = max(free_s, now_s + self._host_step_s)
            ends_s[index] = free_s = now_s + float(took_s[index])
            starts_s[index + 1] = now_s
        return Leap(starts_s, begins_s, ends_s, took_s)

    def repeat(
        self, leap: Leap, done: int, until: int, took: Callable[[ActiveRequest], None]
    ) -> None:
        """Do what the passes `done` ... `until - 1` of a leap do.

        Args:
            took: Told of each request, which had one token in each pass.
        """
        count, launched = until - done, self._launched
        assert launched is not None
        self.scheduler.repeat(count)
        rows, slots = self.scheduler.rows(), self.scheduler.slots
        for active in self.scheduler.decodes:
            active.token_ids += [0] * count
            took(active)
        self.num_generated_tokens += count * len(rows)
        busy_s = float(leap.took_s[done:until].sum())
        self.launcher.leapt(float(leap.ends_s[until - 1]), busy_s)
        launched.indexes = (slots.next_index[rows] - 1).tolist()
        old = self._under_way()
        launched.outcome = SimulatedOutcome(
            old.ids,
            old.clock,
            float(leap.begins_s[until - 1]),
            float(leap.ends_s[until - 1]),
            wrote=None,
            num_layers=1,
        )

    def _under_way(self) -> SimulatedOutcome:
        assert self._launched is not None
        outcome = self._launched.outcome
        assert isinstance(outcome, SimulatedOutcome)
        return outcome
