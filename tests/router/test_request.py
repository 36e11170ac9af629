import pytest

from tandem.router.pairing import Groups
from tandem.router.policy import Pair
from tandem.router.request import MAX_HAND_OVERS, Replays
from tandem.wire.errors import (
    AttemptsUsedUp,
    NodeDraining,
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


def test_hand_overs_use_up_no_attempt_but_do_not_go_on_for_ever():
    replays = Replays(1)
    for number in range(MAX_HAND_OVERS):
        replays.after((NodeDraining if number % 2 else PeerDraining)("draining"))
    with pytest.raises(NodeDraining):
        replays.after(NodeDraining("draining"))


def test_requests_of_one_group_share_a_pair_until_the_last_of_them_ends():
    groups = Groups()
    with groups.entered("g") as first, groups.entered("h") as other, groups.entered("") as alone:
        first.pair = PAIR
        with pytest.raises(RuntimeError), groups.entered("g"):
            raise RuntimeError
        with groups.entered("g") as second, groups.entered("") as also_alone:
            assert second.pair == PAIR
            assert other.pair is alone.pair is also_alone.pair is None
        assert len(groups) == 2
    assert len(groups) == 0
    with groups.entered("g") as later:
        assert later.pair is None
