"""The hand-off's protocol, explored as a model; `protocol_model.py` does the same at length."""

import pytest

from tandem.kvtransfer.session import ReceiverState, SenderState
from tests.kvtransfer.model.explore import Failure, explore_all, replay, run_random, shrink
from tests.kvtransfer.model.mutants import MUTANTS
from tests.kvtransfer.model.rules import AGREEING, Plan, Rules


@pytest.mark.parametrize("is_one_sided", [True, False])
@pytest.mark.parametrize("num_pages", [1, 2])
def test_every_schedule_of_one_room_and_one_fault_keeps_the_promises(num_pages, is_one_sided):
    plan = Plan(num_pages=num_pages, pool_pages=num_pages, is_one_sided=is_one_sided, faults=1)
    assert explore_all(plan, Rules()) > 1000


@pytest.mark.parametrize(
    "fault", ["kill", "stop", "cut", "abort", "withdraw", "early", "break write"]
)
def test_every_schedule_of_one_fault_twice_keeps_the_promises(fault):
    assert explore_all(Plan(faults=2, only=frozenset({fault, "early"})), Rules()) > 200


def test_without_a_fault_every_order_ends_with_the_pages_filled():
    assert explore_all(Plan(faults=0, num_pages=3, pool_pages=3, num_pieces=2), Rules()) > 100


def test_random_schedules_of_rooms_that_share_pages_keep_the_promises():
    seen = set()
    for seed in range(3000):
        world = run_random(Rules(), seed)
        for room in range(world.plan.num_rooms):
            seen.add((world.ends_of_prefill.get(room), world.ends_of_decode.get(room)))
    assert seen == set(AGREEING), "these schedules do not see every way to end"


def test_decode_never_takes_pages_that_prefill_released():
    assert (SenderState.RELEASED, ReceiverState.READY) not in AGREEING


@pytest.mark.parametrize("name", MUTANTS)
def test_a_protocol_that_is_wrong_in_one_place_is_caught(name):
    with pytest.raises(Failure):
        for faults in (1, 2):
            explore_all(Plan(faults=faults), MUTANTS[name])


def test_decode_needs_no_answer_to_a_withdraw_that_crossed_the_last_word():
    silent = Rules(habits=frozenset({"pass over the Withdraw of an unknown room"}))
    assert explore_all(Plan(faults=2, only=frozenset({"withdraw", "abort", "early"})), silent)


def test_random_schedules_catch_a_late_write_and_are_printed_short_enough_to_read():
    rules = MUTANTS["decode frees on its own Withdraw"]
    with pytest.raises(Failure, match="landed in page") as caught:
        for seed in range(3000):
            run_random(rules, seed)
    short = shrink(caught.value, rules)
    assert len(short.schedule) < len(caught.value.schedule)
    assert replay(short.plan, rules, short.schedule)
    assert replay(short.plan, Rules(), short.schedule) is None
