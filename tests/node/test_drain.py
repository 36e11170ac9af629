"""A drain of an engine, with the time given."""

from tandem.node.drain import UNREAD_S, Drain


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
    assert drain.take_end(0, 100.0, is_read=True) == 1
    drain.begin(2, 0.0, 101.0)
    assert drain.take_hand_over(101.0)
    assert drain.take_end(3, 101.0, is_read=True) is None
    assert drain.take_end(0, 101.0, is_read=True) == 2
    assert drain.take_end(0, 101.0, is_read=True) is None


def test_one_that_was_ended_hands_nothing_over_and_says_nothing():
    drain = Drain()
    drain.begin(1, 0.0, 100.0)
    drain.end()
    assert not drain.is_on
    assert not drain.take_hand_over(200.0)
    assert drain.take_end(0, 200.0, is_read=True) is None


def test_it_is_over_when_the_last_answers_were_read_or_had_their_time():
    drain = Drain()
    drain.begin(1, 0.0, 100.0)
    assert drain.take_end(0, 105.0, is_read=False) is None
    assert drain.take_end(0, 105.0 + UNREAD_S, is_read=False) == 1
    drain.begin(2, 0.0, 110.0)
    assert drain.take_end(0, 110.0, is_read=False) is None
    assert drain.take_end(0, 110.1, is_read=True) == 2
