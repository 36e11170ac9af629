from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtier.back_off import FIRST_S, MAX_S, BackOff, Health
from tandem.kvtier.cost import CostMeter, TierCost


def fail_and_probe(back_off, now_s):
    """Return when the next probe is due after a failure."""
    back_off.failed(now_s)
    due_s = back_off.until_s
    assert not back_off.probe(due_s - 0.001)
    assert back_off.probe(due_s)
    assert not back_off.probe(due_s)  # one, until it is answered
    return due_s


def test_each_wait_is_twice_the_last_up_to_a_cap():
    back_off, now_s = BackOff(jitter=lambda: 1.0), 0.0
    waits = []
    for _ in range(9):
        due_s = fail_and_probe(back_off, now_s)
        waits.append(due_s - now_s)
        now_s = due_s
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@given(st.floats(0, 1), st.integers(1, 40))
def test_a_wait_is_drawn_between_half_and_all_of_its_length(jitter, num_failures):
    back_off, now_s = BackOff(jitter=lambda: jitter), 0.0
    for _ in range(num_failures - 1):
        now_s = fail_and_probe(back_off, now_s)
    length_s = min(MAX_S, FIRST_S * 2 ** (num_failures - 1))
    back_off.failed(now_s)
    assert length_s / 2 - 1e-6 <= back_off.until_s - now_s <= length_s + 1e-6


def test_failures_and_answers_of_calls_from_before_change_nothing():
    back_off = BackOff(jitter=lambda: 1.0)
    back_off.failed(0.0)
    back_off.failed(0.1)
    back_off.worked()
    assert back_off.health is Health.WAITING
    assert back_off.until_s == FIRST_S


def test_one_that_fails_again_soon_after_it_came_back_waits_longer():
    back_off = BackOff(jitter=lambda: 1.0)
    fail_and_probe(back_off, 0.0)
    back_off.worked()
    assert fail_and_probe(back_off, 1.0) == 2.0
    back_off.worked()
    assert fail_and_probe(back_off, 100.0) == 100.5


def test_a_cost_is_what_answers_took_lately():
    meter = CostMeter()
    assert meter.cost(0.001) == TierCost(0.0, 0.0, 0)
    meter.looked(0.5)
    meter.got(0, 9.0)
    assert meter.cost(0.001) == TierCost(0.5, 0.0, 0)
    meter.got(10, 1.0)
    cost = meter.cost(0.1)
    assert cost.num_pages == 10
    assert cost.seconds(5) == 0.5 + 5 * 0.2
    for _ in range(50):
        meter.got(10, 2.0)
    assert abs(meter.cost(0.0).page_s - 0.2) < 1e-4
