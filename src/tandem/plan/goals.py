"""What a fleet has to reach, and whether what came of a load does. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.plan.seam import Outcome, Served

# Prefills that were busy for longer than this share of the time had a line that did not get shorter.
FULL_SHARE = 0.97
# A line grows where the median of the last quarter is so many times that of the second one, and near the goal.
GROWS_TIMES, GROWS_SHARE = 2.0, 0.5
# Where it may be anything: what is seen of a line that grows is seen within this.
UNASKED_TTFT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Times that a percentile of requests, or of gaps between tokens, must not be above.

    Attributes:
        ttft_s: To the first token; None: it may be anything.
        itl_s: Between two tokens; None: it may be anything.
        percentile: Of both, such as 99.
    """

    ttft_s: float | None
    itl_s: float | None
    percentile: float = 99.0

    def patience_s(self) -> float:
        """Return how long after the last arrival there is something to be seen that counts."""
        return (self.ttft_s or UNASKED_TTFT_S) + 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a fleet did with a load.

    Attributes:
        ttft_s: The percentile of the goals; infinite where too few had a first token.
        goodput: Requests a second that met both goals, each by its own mean time between tokens.
        share: Of all requests, those that did.
        cached_share: Of prompt tokens, those that prefill found in its cache.
        busy_prefill: Share of the time that prefills' devices were busy; of decodes, `busy_decode`.
        is_full: Prefills had no time left, or the line grew to the end.
    """

    ttft_s: float
    ttft_p50_s: float
    itl_s: float
    itl_p50_s: float
    goodput: float
    share: float
    cached_share: float
    busy_prefill: float
    busy_decode: float
    num_retracted: int
    num_refused: int
    is_full: bool
    misses_ttft: bool
    misses_itl: bool

    @property
    def is_met(self) -> bool:
        """Whether the fleet reaches the goals."""
        return not (self.misses_ttft or self.misses_itl)


def judge(outcome: Outcome, goals: Goals, num_prefill: int) -> Verdict:
    """Return what came of a load, whose first request came at about 0.

    Args:
        num_prefill: Nodes of the fleet that are prefills.
    """
    requests = outcome.requests
    lasts_s = max(requests[-1].arrival_s, 1.0)
    ttfts_s = np.array([request.ttft_s for request in requests])
    gaps_s = _gaps(requests)
    ttft_s, ttft_p50_s = _percentile(ttfts_s, goals.percentile), _percentile(ttfts_s, 50)
    itl_s, itl_p50_s = _percentile(gaps_s, goals.percentile), _percentile(gaps_s, 50)
    busy = [min(each / lasts_s, 1.0) for each in outcome.busy_s]
    busy_prefill = float(np.mean(busy[:num_prefill]))
    is_full = busy_prefill > FULL_SHARE or _grows(ttfts_s, goals)
    num_refused = sum(bool(request.error) for request in requests)
    num_good = sum(_is_good(request, goals) for request in requests)
    misses_ttft = goals.ttft_s is not None and ttft_s > goals.ttft_s
    return Verdict(
        ttft_s=ttft_s,
        ttft_p50_s=ttft_p50_s,
        itl_s=itl_s,
        itl_p50_s=itl_p50_s,
        goodput=num_good / lasts_s,
        share=num_good / len(requests),
        cached_share=sum(r.num_cached for r in requests) / sum(r.num_prompt for r in requests),
        busy_prefill=busy_prefill,
        busy_decode=float(np.mean(busy[num_prefill:])),
        num_retracted=outcome.num_retracted,
        num_refused=num_refused,
        is_full=is_full,
        misses_ttft=misses_ttft or is_full or bool(num_refused),
        misses_itl=goals.itl_s is not None and itl_s > goals.itl_s,
    )


def _gaps(requests: Sequence[Served]) -> npt.NDArray[np.float64]:
    found = [request.itls_s for request in requests if len(request.token_s) > 1]
    return np.concatenate(found) if found else np.zeros(1)


def _percentile(values: npt.NDArray[np.float64], percentile: float) -> float:
    """Return a percentile, without making one between a number and infinity."""
    return float(np.percentile(values, percentile, method="higher"))


def _grows(ttfts_s: npt.NDArray[np.float64], goals: Goals) -> bool:
    quarter = len(ttfts_s) // 4
    if not quarter:
        return False
    before = float(np.median(ttfts_s[quarter : 2 * quarter]))
    last = float(np.median(ttfts_s[3 * quarter :]))
    if np.isinf(before):
        return True
    if np.isinf(last) and goals.ttft_s is None:
        last = UNASKED_TTFT_S  # it is more, and a prompt may take so long
    ttft_s = UNASKED_TTFT_S if goals.ttft_s is None else goals.ttft_s
    return last > GROWS_TIMES * before and last > GROWS_SHARE * ttft_s


def _is_good(request: Served, goals: Goals) -> bool:
    is_soon = goals.ttft_s is None or request.ttft_s <= goals.ttft_s
    is_fast = goals.itl_s is None or request.tpot_s <= goals.itl_s
    return bool(len(request.token_s)) and is_soon and is_fast
