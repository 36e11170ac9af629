import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.arrivals import arrival_times

RATES = st.floats(0.01, 1000)
COUNTS = st.integers(0, 200)


@given(RATES, st.floats(0.05, 20), COUNTS, st.integers(0, 1000))
def test_times_begin_at_zero_and_never_go_back(rate, burstiness, count, seed):
    times = arrival_times(rate, burstiness, count, seed)
    assert len(times) == count
    assert times[:1] in ([], [0.0])
    assert times == sorted(times)


@given(RATES, st.integers(0, 1000))
def test_the_same_seed_gives_the_same_times_and_another_gives_others(rate, seed):
    times = arrival_times(rate, 1.0, 20, seed)
    assert times == arrival_times(rate, 1.0, 20, seed)
    assert times != arrival_times(rate, 1.0, 20, seed + 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    gaps = np.diff(arrival_times(5.0, burstiness, 20_000, 1))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once_and_infinite_burstiness_evenly():
    assert arrival_times(math.inf, 1.0, 3, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(4.0, math.inf, 3, 0) == [0.0, 0.25, 0.5]
