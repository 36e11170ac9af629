"""Measures forwards of an engine, one point at a time, by the engine's own clock.

What stands before a forward is not computed: pages are granted and landed as if another node had written
them. So a context of any length costs nothing to set up, whatever lies in its pages.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from typing_extensions import override

from tandem.engine.core import Engine
from tandem.engine.request import ActiveRequest, Stage
from tandem.engine.step import Launched, StepCounts
from tandem.profile.grid import GROWTH_TOKENS, DecodePoint, PrefillPoint
from tandem.wire.generation import GenerateRequest, SamplingParams
from tandem.wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class Effort:
    """How often a point is measured: for so long, and at least and at most so often."""

    point_s: float
    least: int = 2
    most: int = 20

    def wants_more(self, found_s: Sequence[float]) -> bool:
        """Tell whether a point is to be measured once more."""
        is_short = sum(found_s) < self.point_s and len(found_s) < self.most
        return len(found_s) < self.least or is_short


QUICK, THOROUGH = Effort(0.3, least=1), Effort(2.0)


class ForwardLog(StepCounts):
    """Counts forwards, and keeps what the newest was."""

    def __init__(self) -> None:
        super().__init__()
        self.device_s = 0.0
        self.num_new = self.num_decodes = 0

    @override
    def collected(self, launched: Launched) -> None:
        """See `StepCounts.collected`."""
        super().collected(launched)
        self.device_s = launched.outcome.times().device_s
        self.num_new = sum(chunk.num_tokens for chunk in launched.batch.chunks)
        self.num_decodes = len(launched.batch.decodes)


class Bench:
    """An engine that does nothing else.

    Args:
        engine: Idle, with its prefix cache on.
        clock: Of the loop's own time.

    Attributes:
        host_s: What steps took beside the device, one for each decode step measured.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._log = engine.steps = ForwardLog()
        self._clock = clock
        self._numbers = count()
        self._draws = np.random.default_rng(0)
        self.host_s: list[float] = []
        self._known_sizes: set[int] = set()

    def prefill_s(self, point: PrefillPoint, effort: Effort) -> float:
        """Return how long the forward of a point takes: the median of several."""
        context = self._draw(point.num_context)
        if context:
            self._cache(context)
        if point.num_new not in self._known_sizes:  # what is compiled for a size is not measured
            self._known_sizes.add(point.num_new)
            self._chunk_s([], point.num_new)
        found_s: list[float] = []
        while effort.wants_more(found_s):
            found_s.append(self._chunk_s(context, point.num_new))
        return statistics.median_low(found_s)

    def decode_s(self, point: DecodePoint, effort: Effort) -> float:
        """Return how long a step of a point takes: the median of several, the first two left out."""
        running = [self._land(self._draw(point.num_context)) for _ in range(point.batch)]
        found_s: list[float] = []
        try:
            for _ in range(2):  # where forwards are launched ahead, the first step reads none
                self._engine.step()
            while effort.wants_more(found_s):
                begin_s = self._clock()
                self._engine.step()
                took_s = self._clock() - begin_s
                assert self._log.num_decodes == point.batch, "not all that landed decode"
                found_s.append(self._log.device_s)
                self.host_s.append(max(took_s - self._log.device_s, 0.0))
        finally:
            for active in running:
                self._engine.cancel(active)
            while self._engine.has_work:
                self._engine.step()
            self._engine.cache.flush()
        return statistics.median_low(found_s)

    def _chunk_s(self, context: list[int], num_new: int) -> float:
        active = self._engine.submit(self._request(context + self._draw(num_new), 1))
        while self._engine.has_work:
            self._engine.step()
        assert self._log.num_new == num_new, f"{active} was computed in other chunks"
        return self._log.device_s

    def _cache(self, token_ids: list[int]) -> None:
        """Have the prefix cache know these tokens, whatever is in their pages."""
        self._land(token_ids, max_new_tokens=1)

    def _land(self, token_ids: list[int], max_new_tokens: int = GROWTH_TOKENS) -> ActiveRequest:
        active = self._engine.check(self._request(token_ids, max_new_tokens), is_remote=True)
        self._engine.queue(active)
        self._engine.admit()
        has_room = active.stage is Stage.RESERVED
        assert has_room, f"no room for {active}"
        self._engine.land(active, first_token=0, seed=0)
        return active

    def _request(self, token_ids: list[int], max_new_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(f"profile-{next(self._numbers)}"),
            prompt_ids=token_ids,
            sampling=SamplingParams(
                max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True
            ),
        )

    def _draw(self, num_tokens: int) -> list[int]:
        drawn: list[int] = self._draws.integers(
            0, self._engine.shape.vocab_size, num_tokens
        ).tolist()
        return drawn
