"""Histograms: counts by bucket."""

import pytest

from tandem.telemetry.histogram import Histogram


def test_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    spread = histogram.spread()
    assert (spread.bounds, spread.counts) == ([0.1, 1.0], [2, 2, 1])
    assert spread.total == pytest.approx(8.65)


def test_observe_times_counts_the_value_repeatedly():
    histogram = Histogram((1.0,))
    histogram.observe(0.25, 4)
    histogram.observe(0.0, 0)
    assert histogram.spread().counts == [4, 0]
    assert histogram.spread().total == 1.0


def test_take_resets_the_counts():
    histogram = Histogram((1.0,))
    histogram.observe(2.0)
    assert histogram.take().counts == [0, 1]
    histogram.observe(0.5)
    assert histogram.take().counts == [1, 0]
    assert histogram.take().total == 0.0


def test_spread_is_a_snapshot():
    histogram = Histogram((1.0,))
    before = histogram.spread()
    histogram.observe(0.5)
    assert before.counts == [0, 0]
