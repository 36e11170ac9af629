"""Tests of counting values by bucket."""

import pytest

from tandem.telemetry.histogram import Histogram


def test_a_value_counts_in_the_first_bucket_that_reaches_it():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    spread = histogram.spread()
    assert (spread.bounds, spread.counts) == ([0.1, 1.0], [2, 2, 1])
    assert spread.total == pytest.approx(8.65)


def test_a_value_that_came_several_times_counts_as_often():
    histogram = Histogram((1.0,))
    histogram.observe(0.25, 4)
    histogram.observe(0.0, 0)
    assert histogram.spread().counts == [4, 0]
    assert histogram.spread().total == 1.0


def test_what_was_taken_is_not_taken_again():
    histogram = Histogram((1.0,))
    histogram.observe(2.0)
    assert histogram.take().counts == [0, 1]
    histogram.observe(0.5)
    assert histogram.take().counts == [1, 0]
    assert histogram.take().total == 0.0


def test_a_spread_stays_as_it_was():
    histogram = Histogram((1.0,))
    before = histogram.spread()
    histogram.observe(0.5)
    assert before.counts == [0, 0]
