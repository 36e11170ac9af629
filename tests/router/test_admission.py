import heapq
import itertools
import math
import random

import pytest

from router.admission import Admission, Limits
from router.line import Waiting
from wire.errors import DeadlinePassed, Overloaded


def waiting(expires=math.inf, *, client="a", priority=0, num_tokens=1, has_deadline=False):
    return Waiting(client, priority, num_tokens, expires, has_deadline)


def full_line(admission, count, now=0.0, **fields):
    for _ in range(count):
        assert admission.join(waiting(**fields), now) is None


class Places:
    """Some places, each held for a time that is drawn, by requests that come as a Poisson stream."""

    def __init__(self, seed, *, num_places=16, service_s=0.5, max_wait_s=60.0) -> None:
        self.rng = random.Random(seed)
        self.num_places, self.service_s = num_places, service_s
        self.admission = Admission(Limits(max_wait_s=max_wait_s))
        self.begin_s = 0.05
        self.num_good = self.num_late = self.num_refused = 0
        self.retry_after_s = set()
        self.guesses = []  # of a wait, beside what it was

    @property
    def rate(self) -> float:
        return self.num_places / self.service_s

    def run(self, rate, seconds, patience_s, count_from=5.0):
        """Return the requests a second that began within their clients' patience."""
        numbers, now, num_free = itertools.count(), 0.0, self.num_places
        events = [(self.rng.expovariate(rate), next(numbers), None)]
        came = {}
        while events and now < seconds:
            now, _, ends = heapq.heappop(events)
            if ends is None:
                heapq.heappush(events, (now + self.rng.expovariate(rate), next(numbers), None))
                one = waiting(now + patience_s, has_deadline=True)
                came[one] = (now, self.admission.wait_s(0, "a"))
                try:
                    self.admission.join(one, now)
                except Overloaded as refusal:
                    self.num_refused += 1
                    self.retry_after_s.add(refusal.retry_after_s)
            else:
                num_free += 1
            while num_free and (taken := self.admission.take(now)) is not None:
                if self.admission.is_too_late(taken, now):
                    self.num_late += 1
                    continue
                num_free -= 1
                arrived, guess = came.pop(taken)
                self.guesses.append((guess, now - arrived))
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
    assert places.retry_after_s <= {1, 2}  # those in line wait no longer than a second
    # Most hear at once that there is no room, and not after they waited.
    assert places.num_late <= 0.1 * places.num_refused


def test_nobody_is_refused_for_waiting_where_there_is_enough():
    places = Places(0)
    places.run(0.7 * places.rate, 120.0, patience_s=1.0)
    assert places.num_refused == places.num_late == 0


def test_a_told_wait_is_what_it_will_be():
    places = Places(1)
    places.run(2 * places.rate, 60.0, patience_s=4.0)
    later = [(guess, was) for guess, was in places.guesses[len(places.guesses) // 4 :] if was > 1]
    assert len(later) > 500
    errors = [abs(guess - was) / was for guess, was in later]
    assert sum(errors) / len(errors) < 0.25


def test_a_pace_that_falls_is_noticed():
    admission = Admission(Limits())
    full_line(admission, 500)
    for step in range(100):
        assert admission.take(step * 0.01) is not None
    fast = admission.wait_s(0, "b")
    for step in range(60):
        assert admission.take(1.0 + step) is not None
    assert admission.wait_s(0, "b") > 10 * fast


def test_a_line_that_never_moved_is_taken_to_be_as_slow_as_it_has_been():
    admission = Admission(Limits(max_requests=2))
    full_line(admission, 2, client="b")
    with pytest.raises(Overloaded) as refused:
        admission.join(waiting(client="b"), 7.0)
    assert refused.value.retry_after_s == 21  # three, each as long as the first has waited


def test_one_with_a_higher_priority_takes_the_place_of_the_last_in_line():
    admission = Admission(Limits(max_requests=2))
    first, last = waiting(), waiting()
    admission.join(first, 0.0)
    admission.join(last, 0.0)
    with pytest.raises(Overloaded):
        admission.join(waiting(), 0.0)
    high = waiting(priority=1)
    assert admission.join(high, 0.0) is last
    assert [admission.take(0.0), admission.take(0.0)] == [high, first]


def test_a_client_that_fills_the_line_does_not_keep_others_out():
    admission = Admission(Limits(max_requests=10))
    full_line(admission, 10, client="greedy")
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
    admission.take(0.0)
    admission.join(waiting(num_tokens=60), 0.0)
    admission.join(waiting(num_tokens=40), 0.0)


def test_a_time_that_is_over_is_the_clients_error_or_the_lines():
    admission = Admission(Limits(max_wait_s=5.0))
    with pytest.raises(DeadlinePassed):
        admission.join(waiting(1.0, has_deadline=True), 1.0)
    assert admission.expiry(10.0, None) == admission.expiry(10.0, 99.0) == 15.0
    assert admission.expiry(10.0, 11.0) == 11.0
    assert isinstance(admission.too_late(waiting(has_deadline=True)), DeadlinePassed)
    assert isinstance(admission.too_late(waiting()), Overloaded)


def test_who_could_not_begin_in_time_is_not_started_and_slowness_is_forgotten():
    admission = Admission(Limits())
    for _ in range(50):
        admission.began(2.0, now=0.0)
    hurried = waiting(1.0, has_deadline=True)
    assert admission.is_too_late(hurried, 0.0)
    assert not admission.is_too_late(waiting(1.0), 0.0)
    with pytest.raises(Overloaded):
        admission.join(hurried, 0.0)
    # While all are refused nobody is seen to begin: the estimate must not keep the door shut.
    admission.join(waiting(31.0, has_deadline=True), 30.0)


def test_one_that_leaves_is_not_taken():
    admission = Admission(Limits())
    gone, stays = waiting(), waiting()
    admission.join(gone, 0.0)
    admission.join(stays, 0.0)
    assert admission.leave(gone, 0.0)
    assert not admission.leave(gone, 0.0)
    assert admission.take(0.0) is stays
    assert admission.take(0.0) is None
