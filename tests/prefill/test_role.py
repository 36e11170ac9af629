"""Unexpected requests of a prefill node's own clients."""

import msgspec
import pytest

from tandem.wire.errors import DeadlinePassed, EngineFailed, InvalidRequest, Overloaded
from tandem.wire.generation import (
    GenerateRequest,
    LogprobOptions,
    RequestId,
    SamplingParams,
    new_room,
)
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill
from tests.calm import calm_sender
from tests.hand_off_rig import Pair, prompt_of
from tests.loopback import Fault, LoopbackTransport


@pytest.fixture
def pair(tiny_model):
    made = Pair(tiny_model("llama"), "shm")
    yield made
    made.close()


def test_late_events_do_not_reach_a_new_request_with_the_same_id(pair):
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


def test_request_can_be_cancelled_while_an_earlier_one_with_its_id_is_ending(pair):
    pair.start("a", prompt_of(30), max_new_tokens=9)
    pair.prefill.cancel(pair.ticket("a"))
    pair.decode.cancel(pair.ticket("a"))
    pair.start("a", prompt_of(300), max_new_tokens=9)
    pair.run_until(lambda: pair.prefill.load().num_running == 1)
    assert pair.prefill.tickets() == [pair.ticket("a")]
    pair.prefill.cancel(pair.ticket("a"))
    pair.decode.cancel(pair.ticket("a"))
    pair.run_until(pair.all_pages_are_back)


def test_requests_with_pages_in_flight_do_not_count_as_waiting(tiny_model):
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


def test_requests_without_a_grant_count_as_waiting(pair):
    pair.prefill._max_waiting = 1
    sampling = SamplingParams(max_new_tokens=3)
    request = GenerateRequest(request_id=RequestId("a"), prompt_ids=[5], sampling=sampling)
    pair.prefill.start(pair.ticket("a"), StartPrefill(request=request, room=new_room()))
    with pytest.raises(Overloaded):
        pair.prefill.start(pair.ticket("b"), StartPrefill(request=request, room=new_room()))
    pair.prefill.cancel(pair.ticket("a"))
    pair.run_until(pair.all_pages_are_back)


def test_pages_of_a_one_token_answer_are_held_until_pushed(tiny_model):
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


def one_token(num_prompt: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
    prompt = prompt_of(num_prompt)
    return GenerateRequest(request_id=RequestId("a"), prompt_ids=prompt, sampling=sampling)


def start_decode(pair, request, room) -> GenerateRequest:
    """Start decode's half of a request for more tokens, and return that request."""
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=6)
    whole = msgspec.structs.replace(request, sampling=sampling)
    address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.sender.port}
    pair.decode.start(pair.ticket("a"), StartDecode(request=whole, room=room, **address))
    return whole


def sequential(pair, room) -> GenerateRequest:
    """Run prefill's half as a router sends it that starts decode only after prefill's answer."""
    request = one_token(50)
    start = StartPrefill(request=request, room=room, waits_for_grant=False)
    pair.prefill.start(pair.ticket("a"), start)
    pair.run_until(lambda: pair.prefill_answers.finishes["a"])
    assert pair.prefill_answers.finishes["a"] == ["length"]
    assert pair.prefill.tickets() == []
    return request


@pytest.mark.parametrize("pushes_layers", [True, False])
def test_prefill_answers_before_decode_starts_and_holds_the_pages_for_it(tiny_model, pushes_layers):
    made = Pair(tiny_model("llama"), "shm", pushes_layers=pushes_layers)
    try:
        room = new_room()
        request = sequential(made, room)
        assert made.prefill_engine.counts().held > 0
        assert made.prefill.load().num_transferring == 1, "a drain waits for it"
        with pytest.raises(InvalidRequest, match="in use"):
            sequential(made, room)
        whole = start_decode(made, request, room)
        made.run_until(lambda: made.decode_answers.finishes["a"])
        assert made.decode_answers.tokens["a"] == made.alone(whole)["a"]
        made.run_until(made.all_pages_are_back)
    finally:
        made.close()


def test_prompt_that_needs_no_grant_is_computed_once_if_decode_starts_first(pair):
    room = new_room()
    request = one_token(400)
    whole = start_decode(pair, request, room)
    pair.run_until(lambda: pair.sender.statistics().num_early_grants)
    start = StartPrefill(request=request, room=room, waits_for_grant=False)
    pair.prefill.start(pair.ticket("a"), start)
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    assert pair.decode_answers.tokens["a"] == pair.alone(whole)["a"]
    assert pair.prefill_answers.finishes["a"] == ["length"]
    pair.run_until(pair.all_pages_are_back)


def test_held_pages_are_released_when_no_decode_starts_in_time(tiny_model):
    made = Pair(tiny_model("llama"), "shm", sender_timeouts=calm_sender(grant_s=0.1))
    try:
        sequential(made, new_room())
        made.run_until(made.all_pages_are_back)
        assert not made.prefill.load().num_transferring
    finally:
        made.close()


def test_deadline_before_grant_fails_the_request_on_both_nodes(pair):
    pair.start("a", prompt_of(30), max_new_tokens=3, deadline_s=0)
    pair.prefill.poll()
    assert isinstance(pair.prefill_answers.errors["a"], DeadlinePassed)
    pair.run_until(lambda: "a" in pair.decode_answers.errors)
    assert pair.prefill.tickets() == pair.decode.tickets() == []
    pair.run_until(pair.all_pages_are_back)


def test_failure_is_reported_once_even_if_the_engine_fails_repeatedly(pair):
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


def test_whole_request_of_one_token_needs_no_decode_node(pair):
    pair.prefill.start(pair.ticket("probe"), alone("probe"))
    pair.start("beside", prompt_of(50), max_new_tokens=4)
    pair.run_until(lambda: pair.prefill_answers.finishes["probe"] == ["length"])
    assert len(pair.prefill_answers.tokens["probe"]) == 1
    pair.run_until(lambda: pair.decode_answers.finishes["beside"])
    pair.run_until(pair.all_pages_are_back)
    assert pair.prefill.tickets() == []
    assert pair.prefill.load().num_transferring == 0


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_whole_request_of_one_token_can_be_ended(pair, end):
    pair.prefill.start(pair.ticket("probe"), alone("probe"))
    assert pair.prefill.tickets() == [pair.ticket("probe")]
    if end == "cancel":
        pair.prefill.cancel(pair.ticket("probe"))
    else:
        pair.prefill.fail_all(EngineFailed("as the loop does"))
        assert pair.prefill_answers.errors["probe"]
    assert pair.prefill.tickets() == []
    pair.run_until(pair.all_pages_are_back)


@pytest.mark.parametrize("fields", [{"num_new": 2}, {"logprobs": LogprobOptions(num_top=1)}])
def test_other_whole_requests_are_rejected(pair, fields):
    with pytest.raises(InvalidRequest, match="only with max_new_tokens 1"):
        pair.prefill.start(pair.ticket("a"), alone("a", **fields))
