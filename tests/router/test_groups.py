import pytest

from tandem.router.groups import Groups
from tandem.router.policy import Pair

PAIR = Pair(prefill="p", decode="d")


def test_requests_of_one_group_see_the_same_pair():
    groups = Groups()
    with groups.entered("g") as first:
        assert first.pair is None
        first.pair = PAIR
        with groups.entered("g") as second:
            assert second.pair == PAIR


def test_a_group_is_forgotten_at_its_last_end_and_not_before():
    groups = Groups()
    with groups.entered("g") as first:
        first.pair = PAIR
        with groups.entered("g"):
            pass
        with groups.entered("g") as third:
            assert third.pair == PAIR
    assert len(groups) == 0
    with groups.entered("g") as later:
        assert later.pair is None


def test_groups_know_nothing_of_each_other():
    groups = Groups()
    with groups.entered("g") as one, groups.entered("h") as other:
        one.pair = PAIR
        assert other.pair is None
        assert len(groups) == 2


def test_a_request_without_a_group_shares_with_nobody():
    groups = Groups()
    with groups.entered("") as one, groups.entered("") as other:
        one.pair = PAIR
        assert other.pair is None
        assert len(groups) == 0


def test_a_failure_ends_a_request_too():
    groups = Groups()
    with pytest.raises(RuntimeError), groups.entered("g"):
        raise RuntimeError
    assert len(groups) == 0
