"""From measured forwards to the numbers of a profile, and how far these are off. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.engine.profile import DecodeTimes, PrefillTimes, attended_pairs
from tandem.profile.grid import DecodePoint, PrefillPoint

Array = npt.NDArray[np.float64]
TimesT = TypeVar("TimesT", PrefillTimes, DecodeTimes)


@dataclass(frozen=True, slots=True)
class Timed:
    """A point, how long its forward took, and how long the fit says that it takes."""

    point: PrefillPoint | DecodePoint
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Return how far the fit is off: 0.1 says 10 % too long."""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Fit(Generic[TimesT]):
    """The times that describe measurements best, and what they say of each."""

    times: TimesT
    points: Sequence[Timed]

    @property
    def mean_error(self) -> float:
        """Return the mean of how far points are off, too long or too short."""
        return float(np.mean([abs(each.error) for each in self.points]))

    @property
    def worst(self) -> Timed:
        """Return the point that is described worst."""
        return max(self.points, key=lambda each: abs(each.error))


def fit_prefill(measured_s: Mapping[PrefillPoint, float]) -> Fit[PrefillTimes]:
    """Return the times of chunks that describe what was measured best."""
    parts = [
        [1.0, p.num_new, p.num_context, attended_pairs(p.num_new, p.num_context)]
        for p in measured_s
    ]
    base, token, context, pair = (1000 * each for each in _least(parts, measured_s.values()))
    times = PrefillTimes(
        base_ms=base, per_token_ms=token, per_context_token_ms=context, per_pair_ms=pair
    )
    return Fit(
        times,
        [Timed(p, s, times.forward_s(p.num_new, p.num_context)) for p, s in measured_s.items()],
    )


def fit_decode(measured_s: Mapping[DecodePoint, float]) -> Fit[DecodeTimes]:
    """Return the times of batches that describe what was measured best."""
    parts = [[1.0, p.batch, p.batch * p.num_context] for p in measured_s]
    base, request, context = (1000 * each for each in _least(parts, measured_s.values()))
    times = DecodeTimes(base_ms=base, per_request_ms=request, per_context_token_ms=context)
    return Fit(
        times,
        [
            Timed(p, s, times.forward_s(p.batch, p.batch * p.num_context))
            for p, s in measured_s.items()
        ],
    )


def _least(parts: Iterable[Sequence[float]], took_s: Iterable[float]) -> list[float]:
    """Return what each part costs, none less than nothing, with the least relative errors.

    Least squares over each choice of parts that may cost something: of so few, all choices are tried,
    and the best without a negative number is the answer.

    Args:
        parts: How often each part is in each forward. Shape (num_forwards, num_parts).
        took_s: Shape (num_forwards,).
    """
    seconds = np.array(list(took_s))
    relative = np.array(list(parts)) / seconds[:, None]
    # Parts differ by many orders of magnitude: as shares of the largest they are solved exactly enough.
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    columns, num_parts = relative / scale, relative.shape[1]
    best, least = np.zeros(num_parts), np.inf
    for count in range(1, num_parts + 1):
        for chosen in map(list, combinations(range(num_parts), count)):
            found, *_ = np.linalg.lstsq(columns[:, chosen], np.ones(len(seconds)), rcond=None)
            off = float(np.square(columns[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and off < least - 1e-12:
                best, least = np.zeros(num_parts), off
                best[chosen] = found
    costs: list[float] = (best / scale).tolist()
    return costs
