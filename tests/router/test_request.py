import pytest

from tandem.router.pairing import Groups
from tandem.router.policy import Pair
from tandem.router.request import MAX_HAND_OVERS, Replays
from tandem.wire.errors import (
    AttemptsUsedUp,
    InvalidRequest,
    NodeDraining,
    Overloaded,
    PeerDraining,
    PeerLost,
    TransferFailed,
)

PAIR = Pair(prefill="p", decode="d")


def test_the_last_failure_is_named_and_one_that_is_not_public_only_by_its_code():
    replays = Replays(2)
    replays.after(PeerLost("gone"))
    with pytest.raises(AttemptsUsedUp, match=r"after 2 attempts, .* ended with: transfer_failed$"):
        replays.after(TransferFailed("at 10.0.0.7"))


def test_what_no_retry_helps_is_told_at_once():
    with pytest.raises(InvalidRequest):
        Replays(9).after(InvalidRequest("too long"))


def test_a_refusal_for_want_of_room_is_tried_elsewhere_once_and_is_no_failure():
    replays = Replays(2)
    replays.after(Overloaded("full"))
    replays.after(PeerLost("gone"))
    with pytest.raises(Overloaded):
        replays.after(Overloaded("full, too"))


def test_hand_overs_use_up_no_attempt_but_do_not_go_on_for_ever():
    replays = Replays(1)
    for number in range(MAX_HAND_OVERS):
        replays.after((NodeDraining if number % 2 else PeerDraining)("draining"))
    with pytest.raises(NodeDraining):
        replays.after(NodeDraining("draining"))


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
