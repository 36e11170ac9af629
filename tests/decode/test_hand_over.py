"""A node that hands its requests over: both clients hear that another goes on, at whatever stage, and pages go back."""

import pytest

from tandem.engine.request import Stage
from tandem.node.life import hand_over
from tests.hand_off_rig import Pair, prompt_of
from tests.sample import sampled


@pytest.fixture
def pair(tiny_model):
    made = Pair(tiny_model("llama"), "shm")
    yield made
    made.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("num_passes", sampled([0, 1, 2, 3, 5, 8], 1, 3, 8))
def test_no_half_is_told_that_it_was_cancelled_and_every_page_goes_back(pair, side, num_passes):
    for index in range(4):
        pair.start(f"r{index}", prompt_of(40 + 30 * index), max_new_tokens=50)
    for _ in range(num_passes):
        pair.run_until(lambda: True)
    role = getattr(pair, side)
    told = {ticket.request_id for ticket in role.tickets()}
    role.hand_over(hand_over())
    assert role.tickets() == []
    answers = {"prefill": pair.prefill_answers, "decode": pair.decode_answers}
    assert set(answers[side].errors) == told

    def ended() -> bool:
        """Do as an edge does: whose one half failed, the other is cancelled."""
        failed = {name for side_answers in answers.values() for name in side_answers.errors}
        for ticket in [*pair.prefill.tickets(), *pair.decode.tickets()]:
            if ticket.request_id in failed:
                pair.prefill.cancel(ticket)
                pair.decode.cancel(ticket)
        return not pair.prefill.tickets() and not pair.decode.tickets()

    pair.run_until(ended)
    pair.run_until(pair.all_pages_are_back)
    # The link may tell the far half before its edge cancels it.
    codes = {"prefill": "peer_draining", "decode": "peer_draining", side: "node_draining"}
    for name, side_answers in answers.items():
        assert {error.code for error in side_answers.errors.values()} <= {codes[name]}


def test_a_prefill_whose_grant_is_withdrawn_by_a_drain_tells_its_client_so(pair):
    pair.start("a", prompt_of(400), max_new_tokens=5)
    pair.run_until(lambda: pair.prefill.load().num_running == 1)
    (half,) = pair.decode._granted.values()
    assert half.active.stage is Stage.RESERVED
    pair.decode.hand_over(hand_over())
    pair.run_until(lambda: "a" in pair.prefill_answers.errors)
    error = pair.prefill_answers.errors["a"]
    assert (error.code, error.is_retryable) == ("peer_draining", True)
    pair.run_until(pair.all_pages_are_back)
