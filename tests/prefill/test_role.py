"""What a prefill does when its own clients, and not its peers, do the unexpected."""

import pytest

from tandem.wire.errors import DeadlinePassed, EngineFailed, InvalidRequest
from tandem.wire.generation import GenerateRequest, LogprobsWanted, RequestId, SamplingParams
from tandem.wire.messages import StartColocated
from tests.hand_off_rig import Pair, prompt_of
from tests.loopback import Fault, LoopbackTransport


@pytest.fixture
def pair(tiny_model):
    made = Pair(tiny_model("llama"), "shm")
    yield made
    made.close()


def test_what_is_still_to_be_said_of_a_request_is_not_said_of_the_next_with_its_id(pair):
    pair.start("a", prompt_of(30), max_new_tokens=1)
    pair.run_until(lambda: pair.prefill_answers.finishes["a"] == ["length"])
    assert pair.prefill.tickets() == []
    pair.decode.cancel(pair.ticket("a"))
    for answers in (pair.prefill_answers, pair.decode_answers):
        answers.tokens.clear()
    pair.start("a", prompt_of(50), max_new_tokens=4)
    pair.run_until(lambda: "handed_off" in pair.prefill_answers.finishes["a"])
    assert pair.prefill_answers.finishes["a"] == ["length", "handed_off"]
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    pair.run_until(pair.all_pages_are_back)


def test_a_request_can_be_cancelled_when_an_earlier_one_with_its_id_ends_late(pair):
    pair.start("a", prompt_of(30), max_new_tokens=9)
    pair.prefill.cancel(pair.ticket("a"))
    pair.decode.cancel(pair.ticket("a"))
    pair.start("a", prompt_of(300), max_new_tokens=9)
    pair.run_until(lambda: pair.prefill.load().num_running == 1)
    assert pair.prefill.tickets() == [pair.ticket("a")]
    pair.prefill.cancel(pair.ticket("a"))
    pair.decode.cancel(pair.ticket("a"))
    pair.run_until(pair.all_pages_are_back)


def test_requests_whose_pages_are_under_way_do_not_wait(tiny_model):
    transport = LoopbackTransport([Fault("hang")])
    made = Pair(tiny_model("llama"), transport)
    try:
        made.prefill._max_waiting = 1
        made.start("a", prompt_of(30), max_new_tokens=3)
        made.run_until(lambda: made.prefill_answers.tokens["a"])
        assert made.prefill.load().num_transferring == 1
        made.start("b", prompt_of(20), max_new_tokens=3)
        transport.release()
        made.run_until(lambda: made.decode_answers.finishes["b"])
        made.run_until(made.all_pages_are_back)
    finally:
        made.close()


def test_the_pages_of_an_answer_of_one_token_stay_until_they_were_pushed(tiny_model):
    transport = LoopbackTransport([Fault("hang")])
    made = Pair(tiny_model("llama"), transport)
    try:
        made.start("a", prompt_of(30), max_new_tokens=1)
        made.run_until(lambda: made.prefill_answers.finishes["a"] == ["length"])
        assert made.prefill_engine.counts().held > 0
        transport.release()
        made.run_until(made.all_pages_are_back)
    finally:
        made.close()


def test_a_prompt_whose_deadline_passes_before_its_grant_is_rejected_at_both_nodes(pair):
    pair.start("a", prompt_of(30), max_new_tokens=3, deadline_s=0)
    pair.prefill.poll()
    assert isinstance(pair.prefill_answers.errors["a"], DeadlinePassed)
    pair.run_until(lambda: "a" in pair.decode_answers.errors)
    assert pair.prefill.tickets() == pair.decode.tickets() == []
    pair.run_until(pair.all_pages_are_back)


def test_a_failure_is_told_once_however_often_the_engine_fails(pair):
    told = []
    pair.prefill_answers.fail = lambda ticket, error: told.append(ticket.request_id)
    pair.start("a", prompt_of(100), max_new_tokens=3)
    pair.run_until(lambda: pair.prefill.load().num_running == 1)
    for _ in range(2):
        pair.prefill.fail_all(EngineFailed("as the loop does"))
    assert told == ["a"]
    pair.run_until(pair.all_pages_are_back)


def alone(name: str, num_new=1, **fields) -> StartColocated:
    return StartColocated(
        request=GenerateRequest(
            request_id=RequestId(name),
            prompt_ids=prompt_of(30),
            sampling=SamplingParams(max_new_tokens=num_new, ignore_eos=True, seed=0),
            **fields,
        )
    )


def test_a_whole_request_of_one_token_needs_no_decode_node(pair):
    pair.prefill.start(pair.ticket("probe"), alone("probe"))
    pair.start("beside", prompt_of(50), max_new_tokens=4)
    pair.run_until(lambda: pair.prefill_answers.finishes["probe"] == ["length"])
    assert len(pair.prefill_answers.tokens["probe"]) == 1
    pair.run_until(lambda: pair.decode_answers.finishes["beside"])
    pair.run_until(pair.all_pages_are_back)
    assert pair.prefill.tickets() == []
    assert pair.prefill.load().num_transferring == 0


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_whole_request_of_one_token_can_be_ended(pair, end):
    pair.prefill.start(pair.ticket("probe"), alone("probe"))
    assert pair.prefill.tickets() == [pair.ticket("probe")]
    if end == "cancel":
        pair.prefill.cancel(pair.ticket("probe"))
    else:
        pair.prefill.fail_all(EngineFailed("as the loop does"))
        assert pair.prefill_answers.errors["probe"]
    assert pair.prefill.tickets() == []
    pair.run_until(pair.all_pages_are_back)


@pytest.mark.parametrize("fields", [{"num_new": 2}, {"logprobs": LogprobsWanted(num_top=1)}])
def test_no_other_whole_request_is_taken(pair, fields):
    with pytest.raises(InvalidRequest, match="may have one token here"):
        pair.prefill.start(pair.ticket("a"), alone("a", **fields))
