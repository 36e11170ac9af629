"""When requests are sent in an open loop. Pure, and the same for the same seed."""

import math

import numpy as np


def arrival_times(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """Return `count` times in seconds, the first at 0, in order.

    The time between two is drawn from a gamma distribution of mean 1 / rate and shape `burstiness`,
    as vLLM's load client draws it: 1 is a Poisson process, less comes in bursts, more is more even.

    Args:
        rate: Requests a second; infinity sends all at once.
        burstiness: Positive; infinity sends at equal distances.
        count: How many.
        seed: Of the draws.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [index / rate for index in range(count)]
    rng = np.random.default_rng([seed, count])
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), max(count - 1, 0))
    times: list[float] = np.concatenate([[0.0], np.cumsum(gaps)])[:count].tolist()
    return times
