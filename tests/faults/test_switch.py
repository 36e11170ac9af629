import pytest

from tests.faults.switch import MTU, QUEUE_S, Port


def test_a_cut_link_carries_nothing_and_a_whole_one_at_once():
    assert Port(0, is_cut=True).passed_at(5.0, MTU, 0, draw=0.99) is None
    assert Port(0).passed_at(5.0, MTU, 0, draw=0.0) == 5.0


def test_the_share_that_is_drawn_is_lost_and_the_rest_comes_later():
    port = Port(0, delay_ms=100, loss=0.05)
    assert port.passed_at(5.0, MTU, 0, draw=0.04) is None
    assert port.passed_at(5.0, MTU, 0, draw=0.05) == pytest.approx(5.1)


def test_a_slow_link_spaces_packets_and_drops_what_would_wait_too_long():
    port = Port(0, mbit=8)  # a microsecond a byte
    assert port.passed_at(0.0, 1000, 1, draw=0.5) == pytest.approx(0.001)
    assert port.passed_at(0.0, 1000, 1, draw=0.5) == pytest.approx(0.002)
    assert port.passed_at(0.0, 1000, 0, draw=0.5) == pytest.approx(0.001), "the other direction"
    at_s = [port.passed_at(0.0, 1000, 1, draw=0.5) for _ in range(1000)]
    carried = [at for at in at_s if at is not None]
    assert max(carried) <= QUEUE_S + 0.0011
    assert at_s[-1] is None
