"""Measures forwards of an engine with the engine's own clock, and fits a profile to the measurements.

The context before a forward is not computed: its pages are granted and landed as if another node had written
them. So a context of any length costs nothing to set up. The content of its pages does not matter.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from tandem.engine.core import Engine
from tandem.engine.profile import DecodeTimes, PrefillTimes, attended_pairs
from tandem.engine.request import ActiveRequest
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams

# Share of the pool for contexts; the rest is for answers that grow during the measurement.
POOL_SHARE = 0.9
# Maximum growth of an answer during the measurement, one token per step.
GROWTH_TOKENS = 64
SMALLEST_CHUNK = 16
MOST_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Point:
    """A forward: `size` new tokens of one prompt, or `size` answers, each after a context of `num_context` tokens."""

    size: int
    num_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Chooses the points to measure. Pure.

    Attributes:
        num_tokens: The capacity of the pool.
        context_length: The maximum length of a request.
        page_size: Contexts are whole pages, because a partial page would be recomputed.
        chunk: The maximum prompt tokens of one forward.
        max_running: The maximum answers of one forward.
        longest_context: The longest context to measure.
        is_quick: Choose fewer points.
    """

    num_tokens: int
    context_length: int
    page_size: int
    chunk: int
    max_running: int
    longest_context: int
    is_quick: bool = False

    def prefills(self) -> list[Point]:
        """Return chunks of several sizes after contexts of several lengths."""
        chunk = min(self.chunk, max(self._longest(1) // 2, 1))
        parts = (1, 4) if self.is_quick else (1, 4, 16)
        sizes = {max(chunk // part, min(SMALLEST_CHUNK, chunk)) for part in parts}
        shares = (0, 1 / 2, 1) if self.is_quick else (0, 1 / 8, 1 / 3, 2 / 3, 1)
        contexts = self._contexts(self._longest(1) - chunk - 1, shares)
        return [Point(size, context) for context in contexts for size in sorted(sizes)]

    def decodes(self) -> list[Point]:
        """Return batches of several sizes, each with several contexts that fit the pool."""
        factor = 8 if self.is_quick else 4
        batches = [1]
        while batches[-1] * factor < self.max_running:
            batches.append(batches[-1] * factor)
        shares = (1 / 16, 1) if self.is_quick else (1 / 16, 1 / 4, 1)
        return [
            Point(batch, context)
            for batch in sorted({*batches, self.max_running})
            for context in self._contexts(self._longest(batch) - GROWTH_TOKENS, shares)
            if context > 0
        ]

    def _longest(self, num_requests: int) -> int:
        return min(self.context_length, int(self.num_tokens * POOL_SHARE) // num_requests)

    def _contexts(self, most: int, shares: Sequence[float]) -> list[int]:
        longest, size = min(most, self.longest_context), self.page_size
        return sorted({int(longest * share) // size * size for share in shares})


# ── measuring ────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """Measures points on an engine that serves nothing else.

    Args:
        engine: An idle engine with its prefix cache enabled.
        point_s: The time to spend on each point.
        clock: The clock for whole decode steps, in seconds.

    Attributes:
        host_s: The host time of each measured decode step: its duration minus the device's time.
    """

    def __init__(
        self, engine: Engine, point_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine, self._point_s, self._clock = engine, point_s, clock
        self._numbers = count()
        self._draws = np.random.default_rng(0)
        self._known_sizes: set[int] = set()
        self.host_s: list[float] = []

    def prefill_s(self, point: Point) -> float:
        """Return the median seconds of a point's prefill forward."""
        context = self._draw(point.num_context)
        if context:  # puts the context into the prefix cache, with arbitrary KV
            self._land(context, max_new_tokens=1)
        if point.size not in self._known_sizes:  # compiles for a new size before the measurement
            self._known_sizes.add(point.size)
            self._chunk_s([], point.size)
        return self._median_s(lambda: self._chunk_s(context, point.size))

    def decode_s(self, point: Point) -> float:
        """Return the median seconds of a point's decode step, without the first two steps."""
        running = [self._land(self._draw(point.num_context)) for _ in range(point.size)]
        try:
            for _ in range(2):  # with overlap, the first step launches a forward but reads none
                self._engine.step()
            return self._median_s(lambda: self._step_s(point.size))
        finally:
            for active in running:
                self._engine.cancel(active)
            while self._engine.has_work:
                self._engine.step()
            self._engine.cache.flush()

    def _median_s(self, measure: Callable[[], float]) -> float:
        found_s = [measure()]
        while sum(found_s) < self._point_s and len(found_s) < MOST_SAMPLES:
            found_s.append(measure())
        return statistics.median_low(found_s)

    def _chunk_s(self, context: list[int], num_new: int) -> float:
        self._engine.steps.tokens.take()
        self._engine.steps.device_seconds.take()
        active = self._engine.submit(self._request(context + self._draw(num_new), 1))
        while self._engine.has_work:
            self._engine.step()
        tokens = self._engine.steps.tokens.take()
        assert (sum(tokens.counts), tokens.total) == (1, num_new), f"{active} took other chunks"
        return self._engine.steps.device_seconds.take().total

    def _step_s(self, batch: int) -> float:
        self._engine.steps.tokens.take()
        self._engine.steps.device_seconds.take()
        begin_s = self._clock()
        self._engine.step()
        took_s = self._clock() - begin_s
        assert self._engine.steps.tokens.take().total == batch, "not all that landed decode"
        device_s = self._engine.steps.device_seconds.take().total
        self.host_s.append(max(took_s - device_s, 0.0))
        return device_s

    def _land(self, token_ids: list[int], max_new_tokens: int = GROWTH_TOKENS) -> ActiveRequest:
        active = self._engine.check(self._request(token_ids, max_new_tokens), is_remote=True)
        self._engine.queue(active)
        self._engine.admit()
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
        drawn = self._draws.integers(0, self._engine.shape.vocab_size, num_tokens)
        return [int(token_id) for token_id in drawn]


# ── fitting ──────────────────────────────────────────────────────────────────────────────────────


def fit_prefill(measured_s: Mapping[Point, float]) -> tuple[PrefillTimes, float]:
    """Return the chunk times that fit the measurements best, and the mean relative error."""
    parts = [[1, p.size, p.num_context, attended_pairs(p.size, p.num_context)] for p in measured_s]
    (base, token, context, pair), error = _least(parts, measured_s)
    return PrefillTimes(
        base_ms=base, per_token_ms=token, per_context_token_ms=context, per_pair_ms=pair
    ), error


def fit_decode(measured_s: Mapping[Point, float]) -> tuple[DecodeTimes, float]:
    """Return the batch times that fit the measurements best, and the mean relative error."""
    parts = [[1, p.size, p.size * p.num_context] for p in measured_s]
    (base, request, context), error = _least(parts, measured_s)
    return DecodeTimes(base_ms=base, per_request_ms=request, per_context_token_ms=context), error


def _least(
    parts: Sequence[Sequence[float]], measured_s: Mapping[Point, float]
) -> tuple[list[float], float]:
    """Return the milliseconds of each part, and the mean relative error of the fit.

    Least squares over relative errors. The most negative part is dropped until no part is negative.

    Args:
        parts: How often each forward contains each part. Shape (num_forwards, num_parts).
    """
    relative = np.array(parts) / np.array([*measured_s.values()])[:, None]
    # Parts differ by many orders of magnitude: scaling columns to a maximum of 1 keeps the solution accurate.
    scale = np.maximum(relative.max(axis=0), 1e-300)
    columns, chosen = relative / scale, [*range(relative.shape[1])]
    while True:
        found, *_ = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)
        if (found >= 0).all():
            break
        del chosen[int(found.argmin())]
    costs = np.zeros(len(scale))
    costs[chosen] = found
    error = float(np.abs(columns @ costs - 1).mean())
    return [rounded(each) for each in 1000 * costs / scale], rounded(error)


def rounded(value: float) -> float:
    """Round to four significant digits: a fit is no more accurate."""
    return float(f"{value:.4g}")
