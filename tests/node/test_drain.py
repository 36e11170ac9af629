"""A drain of an engine, with the time given."""

from node.drain import Drain


def test_nothing_is_handed_over_before_the_deadline_and_once_after_it():
    drain = Drain()
    assert not drain.take_hand_over(100.0)
    drain.begin(1, 30.0, 100.0)
    assert not drain.take_hand_over(129.9)
    assert drain.take_hand_over(130.0)
    assert not drain.take_hand_over(131.0)


def test_a_later_order_moves_the_deadline_and_is_answered_for_itself():
    drain = Drain()
    drain.begin(1, 30.0, 100.0)
    assert drain.take_end(0) == 1
    drain.begin(2, 0.0, 101.0)
    assert drain.take_hand_over(101.0)
    assert drain.take_end(3) is None
    assert drain.take_end(0) == 2
    assert drain.take_end(0) is None


def test_one_that_was_ended_hands_nothing_over_and_says_nothing():
    drain = Drain()
    drain.begin(1, 0.0, 100.0)
    drain.end()
    assert not drain.is_on
    assert not drain.take_hand_over(200.0)
    assert drain.take_end(0) is None
