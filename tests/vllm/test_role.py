"""`VllmRole` with a scripted engine."""

import pytest

from tandem.node.answers import Ticket
from tandem.vllm.hand_offs import FirstToken, WorkerReports
from tandem.vllm.node.outputs import EngineCounts, StepOutput
from tandem.vllm.node.role import VllmRole
from tandem.wire.channel import Peer
from tandem.wire.errors import EngineFailed, InvalidRequest, NodeDraining, Overloaded, PeerLost
from tandem.wire.generation import (
    Finish,
    GenerateRequest,
    Grammar,
    LogprobOptions,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from tandem.wire.messages import (
    LoadAdapter,
    LoadedAdapter,
    ModelInfo,
    StartColocated,
    StartDecode,
    StartPrefill,
)
from tests.hand_off_rig import CollectedAnswers

EOS, ROOM = 2, 7


class FakeAdapters:
    """Applies a change when the role polls."""

    def __init__(self):
        self.changes, self.applied = [], []

    def loaded(self):
        return [LoadedAdapter(id=each, path="") for each in self.applied]

    def change(self, change, answer):
        self.changes.append((change, answer))

    def poll(self):
        for change, answer in self.changes:
            self.applied.append(f"{change.name}@1")
            answer(f"{change.name}@1")
        self.changes.clear()


class FakeGenerator:
    """A fake engine: records requests, and returns the `outputs` and `reports` that a test sets."""

    def __init__(self):
        self.requests, self.aborted, self.landed, self.hand_offs = [], [], [], {}
        self.end = None
        self.outputs, self.reports = [], WorkerReports()
        self.num_waiting, self.adapters = 0, FakeAdapters()
        self.model = ModelInfo(
            name="m", fingerprint="f", context_length=99, vocab_size=50, eos_token_ids=[EOS]
        )

    has_work = True

    def meet(self):
        pass

    def check(self, request, hand_off):
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty")
        return request, hand_off

    def add(self, request_id, checked):
        self.requests.append(request_id)
        self.hand_offs[request_id] = checked[1]

    def abort(self, request_id):
        self.aborted.append(request_id)

    def land(self, request_id, first_id):
        self.landed.append((request_id, first_id))
        if isinstance(self.end, EngineFailed):
            raise self.end
        return self.end

    def step(self):
        outputs, self.outputs = self.outputs, []
        return outputs

    def take_transfers(self):
        reports, self.reports = self.reports, WorkerReports()
        return reports

    def counts(self):
        return EngineCounts(
            num_waiting=self.num_waiting, max_running=4, num_pages=10, pages_free=6, page_size=4
        )


class Rig:
    def __init__(self, role):
        self.generator, self.answers = FakeGenerator(), CollectedAnswers()
        self.role = VllmRole(role, self.generator, self.answers, max_waiting=2)

    def start(self, message, attempt=0):
        self.ticket = Ticket(Peer(b"edge"), message.request.request_id, attempt)
        self.role.start(self.ticket, message)
        return self.generator.requests[-1]

    def step(self, *outputs, **reports):
        self.generator.outputs, self.generator.reports = list(outputs), WorkerReports(**reports)
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


def test_prefill_sends_the_first_token_and_finishes_at_hand_off():
    rig = Rig("prefill")
    name = rig.start(to_prefill(request()))
    rig.step(StepOutput(name, [9], finish=LENGTH))
    assert (rig.tokens, rig.finishes) == ([9], [])
    assert rig.role.tickets()
    rig.step(handed_off={name: 1})
    assert (rig.tokens, rig.finishes) == ([9], ["handed_off"])
    assert not rig.role.tickets()


def test_prefill_that_needs_no_grant_finishes_at_the_first_token():
    rig = Rig("prefill")
    start = StartPrefill(request=request(), room=ROOM, waits_for_grant=False)
    name = rig.start(start)
    assert rig.generator.hand_offs[name].params()["waits_for_grant"] is False
    rig.step(StepOutput(name, [9], finish=LENGTH))
    assert (rig.tokens, rig.finishes, rig.generator.aborted) == ([9], ["length"], [])
    rig.step(handed_off={name: 1})
    assert not rig.role.tickets()


def test_decode_sends_the_token_of_prefill_and_continues():
    rig = Rig("decode")
    name = rig.start(to_decode(request(max_new_tokens=3)))
    rig.step(landed={name: FirstToken(9, 2)})
    rig.step(StepOutput(name, [10]))
    rig.step(StepOutput(name, [11], finish=LENGTH))
    assert (rig.tokens, rig.finishes) == ([9, 10, 11], ["length"])
    assert rig.answers.cached["r"] == 2
    assert not rig.role.tickets()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_decode_finishes_when_the_first_token_ends_the_answer(reason):
    rig = Rig("decode")
    rig.generator.end = Finish(reason=reason)
    name = rig.start(to_decode(request()))
    rig.step(landed={name: FirstToken(9, 0)})
    assert (rig.tokens, rig.finishes, rig.generator.aborted) == ([9], [reason], [name])


def test_prefill_hands_off_even_if_the_first_token_ends_the_answer():
    rig = Rig("prefill")
    name = rig.start(to_prefill(request()))
    rig.step(StepOutput(name, [EOS], finish=Finish(reason="stop", matched=EOS)))
    assert (rig.tokens, rig.finishes, rig.generator.aborted) == ([EOS], ["stop"], [])
    rig.step(handed_off={name: 1})
    assert rig.finishes == ["stop"]


def test_landed_token_has_the_log_probabilities_of_prefill():
    rig, logprobs = Rig("decode"), TokenLogprobs(logprob=-0.5)
    name = rig.start(to_decode(request(logprobs=LogprobOptions())))
    rig.step(landed={name: FirstToken(9, 0, logprobs=logprobs)})
    assert (rig.generator.landed, rig.answers.logprobs["r"]) == ([(name, 9)], [logprobs])


def test_first_token_that_the_grammar_does_not_allow_fails_the_request():
    rig = Rig("decode")
    rig.generator.end = EngineFailed("not allowed")
    name = rig.start(to_decode(request(grammar=Grammar(kind="json_object"))))
    rig.step(landed={name: FirstToken(9, 0)})
    assert (rig.tokens, type(rig.answers.errors["r"])) == ([], EngineFailed)
    assert rig.generator.aborted == [name]


def test_prompt_logprobs_start_at_the_requested_position():
    entries = [TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0)]
    for start, positions in ((0, [0, 1, 2]), (2, [2]), (-1, [])):
        rig = Rig("prefill")
        name = rig.start(to_prefill(request(logprobs=LogprobOptions(prompt_start=start))))
        rig.step(StepOutput(name, [9], finish=LENGTH, prompt_logprobs=entries))
        assert rig.answers.prompt_positions["r"] == positions


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_failed_hand_off_fails_the_request_with_its_error(role):
    rig = Rig(role)
    name = rig.start((to_prefill if role == "prefill" else to_decode)(request()))
    rig.step(failed={name: PeerLost("the other node is lost").info()})
    assert isinstance(rig.answers.errors["r"], PeerLost)
    assert rig.generator.aborted == [name]
    assert not rig.role.tickets()


def test_tokens_of_the_step_that_reports_a_failure_are_not_sent():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.step(StepOutput(name, [9]), failed={name: EngineFailed("no first token").info()})
    assert (rig.tokens, type(rig.answers.errors["r"])) == ([], EngineFailed)


def test_request_failed_by_vllm_is_retryable():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.step(StepOutput(name, error="no blocks"))
    assert isinstance(rig.answers.errors["r"], EngineFailed)
    assert rig.answers.errors["r"].is_retryable


def test_cancelled_request_is_aborted_and_sends_nothing():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.role.cancel(rig.ticket)
    rig.role.cancel(rig.ticket)
    rig.step(
        StepOutput(name, [9]), landed={name: FirstToken(9, 0)}, failed={name: PeerLost("x").info()}
    )
    assert (rig.generator.aborted, rig.tokens, rig.answers.errors) == ([name], [], {})


def test_drain_hands_over_every_request():
    rig = Rig("decode")
    name = rig.start(to_decode(request()))
    rig.role.hand_over(NodeDraining("it ends"))
    assert isinstance(rig.answers.errors["r"], NodeDraining)
    assert rig.generator.aborted == [name]


def test_request_past_its_deadline_before_start_is_failed():
    rig = Rig("decode")
    name = rig.start(to_decode(request(deadline_s=-1.0)))
    rig.role.poll()
    assert rig.answers.errors["r"].code == "deadline_passed"
    assert rig.generator.aborted == [name]


def test_started_request_ignores_its_deadline():
    rig = Rig("decode")
    name = rig.start(StartColocated(request=request(deadline_s=-1.0)))
    rig.step(StepOutput(name, [9]))
    rig.role.poll()
    assert not rig.answers.errors


def test_tokens_of_a_step_are_numbered_and_the_last_has_the_finish():
    rig = Rig("decode")
    name = rig.start(StartColocated(request=request()))
    rig.step(StepOutput(name, [9, 8]))
    rig.step(StepOutput(name, [7, EOS], finish=Finish(reason="stop", matched=EOS)))
    assert (rig.tokens, rig.finishes) == ([9, 8, 7, EOS], ["stop"])


@pytest.mark.parametrize(
    ("role", "message", "words"),
    [
        ("prefill", to_decode(request()), "prefill node"),
        ("decode", to_prefill(request()), "decode node"),
        ("prefill", StartColocated(request=request()), "max_new_tokens 1"),
        ("colocated", to_decode(request()), "colocated node"),
    ],
)
def test_half_for_a_different_role_is_rejected(role, message, words):
    rig = Rig(role)
    with pytest.raises(InvalidRequest, match=words):
        rig.start(message)
    assert not rig.role.tickets()


def test_room_in_use_and_full_queue_are_rejected():
    rig = Rig("decode")
    rig.start(to_decode(request()))
    with pytest.raises(InvalidRequest, match="in use"):
        rig.start(to_decode(request()), attempt=1)
    rig.generator.num_waiting = 2
    with pytest.raises(Overloaded):
        rig.start(StartColocated(request=request()), attempt=2)


def test_load_counts_blocks_requests_and_tokens():
    rig = Rig("prefill")
    name = rig.start(to_prefill(request()))
    load = rig.role.load()
    assert (load.num_pages, load.pages_free, load.pages_held) == (10, 6, 4)
    assert (load.num_transferring, load.queued_tokens) == (1, 3)
    rig.step(StepOutput(name, [9], cached_tokens=2, finish=LENGTH))
    load = rig.role.load()
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens) == (3, 2, 1)
    assert "input throughput (token/s): 3.00" in (rig.role.log_line(1.0) or "")
    assert rig.role.log_line(1.0) is None


def test_load_reports_an_adapter_before_its_sender_gets_the_answer():
    rig, seen = Rig("prefill"), []
    rig.role.change_adapter(
        LoadAdapter(name="sql", path="/sql"),
        lambda adapter: seen.append((adapter, rig.role.load().adapters[0].id)),
    )
    assert (seen, rig.role.load().adapters) == ([], [])
    rig.role.poll()
    assert seen == [("sql@1", "sql@1")]
