import heapq
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.admission import Admission, Limits
from tandem.router.line import Waiting
from tandem.wire.errors import DeadlinePassed, Overloaded


def waiting(
    expires=math.inf, *, arrived=0.0, client="a", priority=0, num_tokens=1, has_deadline=False
):
    return Waiting(client, priority, num_tokens, arrived, expires, has_deadline)


def fill(admission, count, **fields):
    for _ in range(count):
        assert admission.join(waiting(**fields), 0.0) is None


class Places:
    """Some places, each held for a time that is drawn, by requests that come as a Poisson stream."""

    def __init__(self, seed, *, num_places=16, service_s=0.5, max_wait_s=60.0) -> None:
        self.rng = random.Random(seed)
        self.num_places, self.service_s = num_places, service_s
        self.admission = Admission(Limits(max_wait_s=max_wait_s))
        self.begin_s = 0.05
        self.num_good = self.num_late = 0

    @property
    def rate(self) -> float:
        return self.num_places / self.service_s

    def run(self, rate, seconds, patience_s, count_from=5.0):
        """Return the requests a second that began within their clients' patience."""
        numbers, now, num_free = itertools.count(), 0.0, self.num_places
        events = [(self.rng.expovariate(rate), next(numbers), None)]
        while events and now < seconds:
            now, _, ends = heapq.heappop(events)
            if ends is None:
                heapq.heappush(events, (now + self.rng.expovariate(rate), next(numbers), None))
                one = waiting(now + patience_s, arrived=now, has_deadline=True)
                assert self.admission.join(one, now) is None
            else:
                num_free += 1
            while num_free and (taken := self.admission.take()) is not None:
                if self.admission.is_too_late(taken, now):
                    self.num_late += 1
                    continue
                num_free -= 1
                self.admission.began(self.begin_s, now)
                self.num_good += now > count_from and now + self.begin_s <= taken.expires
                ends_at = now + self.rng.uniform(0.5, 1.5) * self.service_s
                heapq.heappush(events, (ends_at, next(numbers), taken))
        return self.num_good / (seconds - count_from)


@pytest.mark.parametrize("factor", [1.5, 2, 10])
@pytest.mark.parametrize("seed", range(2))
def test_goodput_beyond_capacity_is_what_it_is_at_capacity(seed, factor):
    places = Places(seed)
    goodput = places.run(factor * places.rate, 40.0, patience_s=1.0)
    assert goodput >= 0.95 * places.rate


def test_no_request_is_too_late_where_there_is_enough():
    places = Places(0)
    places.run(0.7 * places.rate, 120.0, patience_s=1.0)
    assert places.num_late == 0


# What may happen to a queue: so much time passes, a request comes, the next one is taken or leaves, a first
# token comes after so long.
EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.floats(0, 1e4)),
    st.tuples(st.just("join"), st.sampled_from([None, 0.0, 0.5, 60.0, 1e4])),
    st.tuples(st.sampled_from(["take", "leave"]), st.none()),
    st.tuples(st.just("began"), st.floats(0, 1e4)),
)


def live(admission, limits, history) -> float:
    """Have a queue live through a history; return what time it is then."""
    now, inside = 0.0, []
    for event, value in history:
        if event == "pass":
            now += value
        elif event == "began":
            admission.began(value, now)
        elif event == "join" and (value is None or value > 0) and len(inside) < limits.max_requests:
            deadline = None if value is None else now + value
            expires = admission.expiry(now, deadline)
            inside.append(waiting(expires, arrived=now, has_deadline=expires == deadline))
            assert admission.join(inside[-1], now) is None  # there is room
        elif event == "take" and inside:
            assert admission.take() is inside.pop(0)
        elif event == "leave" and inside:
            assert admission.leave(inside.pop())
    return now


@given(st.lists(EVENTS, max_size=40), st.sampled_from([None, 0.01, 60.0]))
def test_from_any_history_a_queue_with_room_takes_a_newcomer(history, patience_s):
    limits = Limits(max_requests=4)
    admission = Admission(limits)
    now = live(admission, limits, history)
    newcomer = waiting(
        now + (patience_s or limits.max_wait_s), arrived=now, has_deadline=patience_s is not None
    )
    if len(admission) == limits.max_requests:
        admission.take()
    assert admission.join(newcomer, now) is None
    assert list(iter(admission.take, None))[-1] is newcomer


def test_a_full_queue_tells_how_long_its_next_request_has_waited():
    admission = Admission(Limits(max_requests=2))
    assert admission.retry_after_s(0.0) == 1
    fill(admission, 2)
    for now, after_s in ((0.3, 1), (6.5, 7)):
        with pytest.raises(Overloaded) as refused:
            admission.join(waiting(), now)
        assert refused.value.retry_after_s == after_s


def test_one_with_a_higher_priority_takes_the_place_of_the_last_in_line():
    admission = Admission(Limits(max_requests=2))
    first, last = waiting(), waiting()
    admission.join(first, 0.0)
    admission.join(last, 0.0)
    with pytest.raises(Overloaded):
        admission.join(waiting(), 0.0)
    high = waiting(priority=1)
    assert admission.join(high, 0.0) is last
    assert [admission.take(), admission.take()] == [high, first]


def test_a_client_that_fills_the_line_does_not_keep_others_out():
    admission = Admission(Limits(max_requests=10))
    fill(admission, 10, client="greedy")
    for _ in range(5):
        sent_away = admission.join(waiting(client="modest"), 0.0)
        assert sent_away.client == "greedy"
    with pytest.raises(Overloaded):  # now they have as much as each other
        admission.join(waiting(client="modest"), 0.0)


def test_the_line_is_bounded_in_tokens_but_for_one_alone():
    admission = Admission(Limits(max_tokens=100))
    admission.join(waiting(num_tokens=1000), 0.0)
    with pytest.raises(Overloaded):
        admission.join(waiting(num_tokens=1), 0.0)
    admission.take()
    admission.join(waiting(num_tokens=60), 0.0)
    admission.join(waiting(num_tokens=40), 0.0)


def test_a_time_that_is_over_is_the_clients_error_or_the_lines():
    admission = Admission(Limits(max_wait_s=5.0))
    with pytest.raises(DeadlinePassed):
        admission.join(waiting(1.0, has_deadline=True), 1.0)
    assert admission.expiry(10.0, None) == admission.expiry(10.0, 99.0) == 15.0
    assert admission.expiry(10.0, 11.0) == 11.0
    assert isinstance(admission.too_late(waiting(has_deadline=True), 0.0), DeadlinePassed)
    assert isinstance(admission.too_late(waiting(), 0.0), Overloaded)


def test_a_request_that_could_not_begin_in_time_is_not_started_and_slowness_is_forgotten():
    admission = Admission(Limits())
    for _ in range(50):
        admission.began(2.0, now=0.0)
    assert admission.is_too_late(waiting(1.0, has_deadline=True), 0.0)
    assert not admission.is_too_late(waiting(1.0), 0.0)
    # While no request is started none is seen to begin: the measure must not keep them all out.
    assert not admission.is_too_late(waiting(31.0, has_deadline=True), 30.0)


def test_one_that_leaves_is_not_taken():
    admission = Admission(Limits())
    gone, stays = waiting(), waiting()
    admission.join(gone, 0.0)
    admission.join(stays, 0.0)
    assert admission.leave(gone)
    assert not admission.leave(gone)
    assert admission.take() is stays
    assert admission.take() is None
