from hypothesis import given
from hypothesis import strategies as st

from tandem.router.line import Line, Waiting

CLIENTS, PRIORITIES = ("a", "b", "c"), (-1, 0, 5)
KINDS = st.tuples(st.sampled_from(CLIENTS), st.sampled_from(PRIORITIES))
# A request that comes, one that goes (by its number), or a place that becomes free.
STEPS = st.lists(st.one_of(KINDS, st.integers(0, 50), st.none()), max_size=60)


def waiting(client="a", priority=0, num_tokens=1) -> Waiting:
    return Waiting(client, priority, num_tokens, arrived=0.0, expires=100.0)


def line_of(*clients) -> Line:
    line = Line()
    for client in clients:
        line.add(waiting(client))
    return line


def clients_in_order(line) -> str:
    return "".join(taken.client for taken in iter(line.take, None))


def test_clients_take_turns_however_many_requests_one_has():
    assert clients_in_order(line_of(*"aaaabbc")) == "abcabaa"


def test_who_comes_late_waits_one_turn_of_each_and_not_for_all_of_one():
    line = line_of(*"aaaa")
    assert line.take().client == "a"
    line.add(waiting("b"))
    assert clients_in_order(line) == "abaa"


@given(STEPS)
def test_the_highest_priority_goes_first_and_a_clients_own_keep_their_order(steps):
    line, inside = Line(), []
    for step in steps:
        if isinstance(step, tuple):
            inside.append(waiting(*step, num_tokens=len(inside) + 1))
            line.add(inside[-1])
        elif step is None:
            taken = line.take()
            assert (taken is None) == (not inside)
            if taken is not None:
                assert taken.priority == max(each.priority for each in inside)
                same = [
                    each
                    for each in inside
                    if (each.client, each.priority) == (taken.client, taken.priority)
                ]
                assert same[0] is taken
                inside.remove(taken)
        elif step < len(inside):
            gone = inside.pop(step)
            assert line.remove(gone)
            assert not line.remove(gone)
        assert len(line) == len(inside)
        assert set(line) == set(inside)
        assert line.num_tokens == sum(each.num_tokens for each in inside)


@given(st.lists(KINDS, min_size=1, max_size=30), KINDS)
def test_nobody_is_sent_away_for_an_equal(there, newcomer):
    line = Line()
    for kind in there:
        line.add(waiting(*kind))
    least, one_more = line.least(), waiting(*newcomer)
    assert least.priority == min(priority for _, priority in there)
    if line.yields_to(least, one_more):
        # And once it is in, the one sent away would not get its place back.
        assert least.priority <= one_more.priority
        line.remove(least)
        line.add(one_more)
        assert not (line.least() is one_more and line.yields_to(one_more, least))
