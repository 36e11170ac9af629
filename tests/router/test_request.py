import pytest

from tandem.router.pairing.pairing import PairGroups
from tandem.router.pairing.policy import Pair
from tandem.router.serving.request import MAX_HAND_OVERS, Replays
from tandem.wire.errors import (
    AttemptsUsedUp,
    NodeDraining,
    PeerDraining,
    PeerLost,
    TransferFailed,
)

PAIR = Pair(prefill="p", decode="d")


def test_exhausted_attempts_report_only_the_code_of_an_internal_error():
    replays = Replays(2)
    replays.after(PeerLost("gone"))
    with pytest.raises(
        AttemptsUsedUp, match=r"after 2 attempts; the last error was: transfer_failed$"
    ):
        replays.after(TransferFailed("at 10.0.0.7"))


def test_hand_overs_use_no_attempt_and_are_bounded():
    replays = Replays(1)
    for number in range(MAX_HAND_OVERS):
        replays.after((NodeDraining if number % 2 else PeerDraining)("draining"))
    with pytest.raises(NodeDraining):
        replays.after(NodeDraining("draining"))


def test_group_keeps_its_pair_until_its_last_request_ends():
    groups = PairGroups()
    first, other, alone = groups.enter("g"), groups.enter("h"), groups.enter("")
    first.pair = PAIR
    assert groups.enter("g").pair == PAIR
    assert other.pair is alone.pair is groups.enter("").pair is None
    groups.leave("g")
    groups.leave("")
    assert len(groups) == 2
    groups.leave("g")
    groups.leave("h")
    assert len(groups) == 0
    assert groups.enter("g").pair is None
