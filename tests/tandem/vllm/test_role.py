"""The role over an engine that answers as it is told to."""

import pytest

from tandem.node.answers import Ticket
from tandem.vllm.halves import First, Reports
from tandem.vllm.outputs import Counts, Output, draws_first
from tandem.vllm.role import VllmRole
from tandem.wire.channel import Peer
from tandem.wire.errors import EngineFailed, InvalidRequest, NodeDraining, Overloaded, PeerLost
from tandem.wire.generation import (
    Finish,
    GenerateRequest,
    Grammar,
    LogprobsWanted,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from tandem.wire.messages import ModelInfo, StartColocated, StartDecode, StartPrefill
from tests.hand_off_rig import CollectedAnswers

EOS, ROOM = 2, 7


class FakeGenerator:
    """vLLM's engine: remembers what it is asked, and answers with what a test puts into `outputs` and `reports`."""

    def __init__(self):
        self.asked, self.aborted, self.apart = [], [], {}
        self.outputs, self.reports = [], Reports()
        self.num_waiting = 0
        self.model = ModelInfo(
            name="m", fingerprint="f", context_length=99, vocab_size=50, eos_token_ids=[EOS]
        )

    has_work = True

    def check(self, request, apart):
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty")
        return request, apart

    def add(self, request_id, checked):
        self.asked.append(request_id)
        self.apart[request_id] = checked[1]

    def abort(self, request_id):
        self.aborted.append(request_id)

    def step(self):
        outputs, self.outputs = self.outputs, []
        return outputs

    def take_transfers(self):
        reports, self.reports = self.reports, Reports()
        return reports

    def counts(self):
        return Counts(num_waiting=self.num_waiting, num_pages=10, pages_free=6, page_size=4)


class Rig:
    def __init__(self, role):
        self.generator, self.answers = FakeGenerator(), CollectedAnswers()
        self.role = VllmRole(role, self.generator, self.answers, max_running=4, max_waiting=2)

    def start(self, message, attempt=0):
        self.ticket = Ticket(Peer(b"edge"), message.request.request_id, attempt)
        self.role.start(self.ticket, message)
        return self.generator.asked[-1]

    def step(self, *outputs, **reports):
        self.generator.outputs, self.generator.reports = list(outputs), Reports(**reports)
        self.role.step()

    @property
    def tokens(self):
        return self.answers.tokens["r"]

    @property
    def finishes(self):
        return self.answers.finishes["r"]


def request(*, prior=0, deadline_s=None, logprobs=None, **sampling):
    return GenerateRequest(
        request_id=RequestId("r"),
        prompt_ids=[5, 6, 7],
        sampling=SamplingParams(**sampling),
        num_prior_tokens=prior,
        deadline_s=deadline_s,
        logprobs=logprobs,
    )


def to_decode(wanted):
    return StartDecode(request=wanted, room=ROOM, bootstrap_host="p", bootstrap_port=1)


def to_prefill(wanted):
    return StartPrefill(request=wanted, room=ROOM)


LENGTH = Finish(reason="length")


def test_prefill_sends_the_first_token_and_ends_when_decode_has_the_prompt():
    rig = Rig("prefill")
    name = rig.start(to_prefill(request()))
    rig.step(Output(name, [9], finish=LENGTH))
    assert (rig.tokens, rig.finishes) == ([9], [])
    assert rig.role.tickets()
    rig.step(handed_off={name: 1})
    assert (rig.tokens, rig.finishes) == ([9], ["handed_off"])
    assert not rig.role.tickets()


def test_decode_sends_the_token_that_prefill_drew_and_goes_on():
    rig = Rig("decode")
    name = rig.start(to_decode(request(max_new_tokens=3)))
    # Its first own token may come with the news of the landing.
    rig.step(Output(name, [10]), landed={name: First(9, 2)})
    rig.step(Output(name, [11], finish=LENGTH))
    assert (rig.tokens, rig.finishes) == ([9, 10, 11], ["length"])
    assert rig.answers.cached["r"] == 2
    assert not rig.role.tickets()


@pytest.mark.parametrize(
    ("sampling", "is_last"),
    [
        ({}, True),
        ({"ignore_eos": True}, False),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, True),
    ],
)
def test_an_answer_that_ends_with_its_first_token_ends_at_decode_too(sampling, is_last):
    rig = Rig("decode")
    name = rig.start(to_decode(request(**sampling)))
    rig.step(landed={name: First(EOS, 0)})
    assert rig.tokens == [EOS]
    assert (rig.finishes == ["stop"], rig.generator.aborted == [name]) == (is_last, is_last)


def test_an_answer_that_ends_with_its_first_token_ends_at_prefill_and_is_still_handed_off():
    rig = Rig("prefill")
    name = rig.start(to_prefill(request()))
    rig.step(Output(name, [EOS], finish=Finish(reason="stop", matched=EOS)))
    assert (rig.tokens, rig.finishes, rig.generator.aborted) == ([EOS], ["stop"], [])
    rig.step(handed_off={name: 1})
    assert rig.finishes == ["stop"]


@pytest.mark.parametrize(
    "wanted",
    [
        request(grammar=Grammar(kind="json_object")),
        request(presence_penalty=0.5),
        request(frequency_penalty=0.5),
        request(logprobs=LogprobsWanted()),
        request(max_new_tokens=1),
        request(max_new_tokens=5, prior=4),
    ],
)
def test_decode_draws_the_first_token_where_vllm_must_know_it_for_the_answers(wanted):
    assert not draws_first(wanted)
    prefill, decode = Rig("prefill"), Rig("decode")
    name = prefill.start(to_prefill(wanted))
    prefill.answers.tokens["r"] = decode.answers.tokens["r"] = list(range(wanted.num_prior_tokens))
    prefill.step(Output(name, [9], finish=LENGTH))
    assert len(prefill.tokens) == wanted.num_prior_tokens
    name = decode.start(to_decode(wanted))
    decode.step(landed={name: First(9, 0)})
    assert len(decode.tokens) == wanted.num_prior_tokens
    decode.step(Output(name, [8], finish=LENGTH))
    assert decode.tokens[-1:] == [8]


def test_log_probabilities_of_the_prompt_begin_where_they_were_asked_for():
    entries = [TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0)]
    for start, positions in ((0, [0, 1, 2]), (2, [2]), (-1, [])):
        rig = Rig("prefill")
        name = rig.start(to_prefill(request(logprobs=LogprobsWanted(prompt_start=start))))
        rig.step(Output(name, [9], finish=LENGTH, prompt_logprobs=entries))
        assert rig.answers.prompt_positions["r"] == positions


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_failed_hand_off_fails_the_request_with_its_reason(role):
    rig = Rig(role)
    name = rig.start((to_prefill if role == "prefill" else to_decode)(request()))
    rig.step(failed={name: PeerLost("the other node is lost").info()})
    assert isinstance(rig.answers.errors["r"], PeerLost)
    assert rig.generator.aborted == [name]
    assert not rig.role.tickets()


def test_tokens_that_come_with_the_news_of_a_failure_are_not_sent():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.step(Output(name, [9]), failed={name: EngineFailed("no first token").info()})
    assert (rig.tokens, type(rig.answers.errors["r"])) == ([], EngineFailed)


def test_a_request_that_vllm_ends_fails_so_that_it_is_sent_again():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.step(Output(name, error="no blocks"))
    assert isinstance(rig.answers.errors["r"], EngineFailed)
    assert rig.answers.errors["r"].is_retryable


def test_a_cancelled_request_is_aborted_and_answers_nothing_any_more():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.role.cancel(rig.ticket)
    rig.role.cancel(rig.ticket)
    rig.step(Output(name, [9]), landed={name: First(9, 0)}, failed={name: PeerLost("x").info()})
    assert (rig.generator.aborted, rig.tokens, rig.answers.errors) == ([name], [], {})


def test_a_drain_hands_over_every_request():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.role.hand_over(NodeDraining("it ends"))
    assert isinstance(rig.answers.errors["r"], NodeDraining)
    assert rig.generator.aborted == [name]


def test_a_request_whose_time_passed_before_it_began_is_ended():
    rig = Rig("decode")
    name = rig.start(to_decode(request(deadline_s=-1.0)))
    rig.role.poll()
    assert rig.answers.errors["r"].code == "deadline_passed"
    assert rig.generator.aborted == [name]


def test_a_request_that_began_is_not_ended_by_its_deadline():
    rig = Rig("decode")
    name = rig.start(StartColocated(request=request(deadline_s=-1.0)))
    rig.step(Output(name, [9]))
    rig.role.poll()
    assert not rig.answers.errors


def test_tokens_of_one_step_are_numbered_and_the_last_one_ends():
    rig = Rig("decode")
    name = rig.start(StartColocated(request=request()))
    rig.step(Output(name, [9, 8]))
    rig.step(Output(name, [7, EOS], finish=Finish(reason="stop", matched=EOS)))
    assert (rig.tokens, rig.finishes) == ([9, 8, 7, EOS], ["stop"])


@pytest.mark.parametrize(
    ("role", "message", "words"),
    [
        ("prefill", to_decode(request()), "prefill node"),
        ("decode", to_prefill(request()), "decode node"),
        ("prefill", StartColocated(request=request()), "one token"),
        ("colocated", to_decode(request()), "colocated node"),
    ],
)
def test_a_half_of_another_role_is_refused(role, message, words):
    rig = Rig(role)
    with pytest.raises(InvalidRequest, match=words):
        rig.start(message)
    assert not rig.role.tickets()


def test_a_room_in_use_and_a_full_queue_are_refused():
    rig = Rig("decode")
    rig.start(to_decode(request()))
    with pytest.raises(InvalidRequest, match="in use"):
        rig.start(to_decode(request()), attempt=1)
    rig.generator.num_waiting = 2
    with pytest.raises(Overloaded):
        rig.start(StartColocated(request=request()), attempt=2)


def test_the_load_counts_blocks_requests_and_tokens():
    rig = Rig("prefill")
    name = rig.start(to_prefill(request()))
    load = rig.role.load()
    assert (load.num_pages, load.pages_free, load.pages_held) == (10, 6, 4)
    assert (load.num_transferring, load.queued_tokens) == (1, 3)
    rig.step(Output(name, [9], cached_tokens=2, finish=LENGTH))
    load = rig.role.load()
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (3, 2, 1)
    assert "input throughput (token/s): 3.00" in (rig.role.log_line(1.0) or "")
    assert rig.role.log_line(1.0) is None
