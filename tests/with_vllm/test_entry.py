"""What vLLM's scheduler and its two model runners are given of a request that another node has begun."""

from types import SimpleNamespace

import pytest
import torch

from tandem.wire.errors import EngineFailed

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROMPT, PRIOR = [5, 6, 7], [8, 9]


class Core:
    """The parts of an EngineCore that `Entry` uses; records what it is given, in order."""

    def __init__(self, *, is_v2, device="cpu", allows=True):
        self.given, self.aborted = [], []
        self.scheduler = SimpleNamespace(
            use_v2_model_runner=is_v2,
            max_model_len=20,
            requests={},
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_given: allows),
        )
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        self.model_executor = SimpleNamespace(
            collective_rpc=lambda _install, args: self.given.append(args[0])
        )

    def preprocess_add_request(self, asked):
        return asked, 0

    def add_request(self, request):
        self.given.append(request)
        self.scheduler.requests[request.request_id] = request

    def abort_requests(self, request_ids):
        self.aborted += request_ids


def request(*, grammar=None, source=None, **sampling):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = {} if source is None else {"kv_transfer_params": source}
    made = Request("r", PROMPT, SamplingParams(**sampling, extra_args=params), None)
    if grammar is not None:
        made.structured_output_request = grammar
    return made


def entered(core, asked, prior_ids):
    from tandem.vllm.node.entry import Entry

    entry = Entry(core)
    entry.add(asked, prior_ids)
    return entry


def test_runner_v2_is_given_the_answer_so_far_as_output_and_the_seed_unchanged():
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import RequestStatus

    core = Core(is_v2=True, device="cuda")
    entered(core, request(seed=3, temperature=1.0), PRIOR)
    [added] = core.given
    assert (added.status, added.num_preemptions) == (RequestStatus.PREEMPTED, 1)
    data = NewRequestData.from_request(added, ([],), added._all_token_ids)
    assert (data.prompt_token_ids, data.prefill_token_ids) == (PROMPT, PROMPT + PRIOR)
    assert data.sampling_params.seed == 3


def test_runner_v1_is_given_its_state_before_the_scheduler_has_the_request():
    core = Core(is_v2=False)
    entered(core, request(), PRIOR)
    kept, added = core.given
    assert (kept["req_id"], kept["prompt_token_ids"]) == ("r", PROMPT)
    assert (kept["output_token_ids"], list(added.output_token_ids)) == (PRIOR, PRIOR)


@pytest.mark.parametrize(
    ("is_v2", "device", "seed", "is_kept"),
    [
        (False, "cpu", None, False),
        (False, "cpu", 3, True),  # its generator takes draws back
        (False, "cuda", 3, False),
        (True, "cpu", 3, False),
    ],
)
def test_new_request_is_left_to_vllm_unless_seeded_on_a_cpu(is_v2, device, seed, is_kept):
    from vllm.v1.request import RequestStatus

    core = Core(is_v2=is_v2, device=device)
    entered(core, request(seed=seed, temperature=1.0), [])
    assert len(core.given) == 1 + is_kept
    expected = RequestStatus.PREEMPTED if is_kept else RequestStatus.WAITING
    assert (core.given[-1].status, core.given[-1].num_preemptions) == (expected, 0)


def test_request_with_a_grammar_waits_until_it_is_compiled():
    core, grammar = Core(is_v2=True), SimpleNamespace(grammar=None)
    entry = entered(core, request(grammar=grammar), PRIOR)
    assert (len(entry), core.given) == (1, [])
    grammar.grammar = object()
    entry.admit()
    assert (len(entry), len(core.given)) == (0, 1)


def test_request_aborted_while_its_grammar_is_compiled_never_enters():
    core, grammar = Core(is_v2=True), SimpleNamespace(grammar=None)
    entry = entered(core, request(grammar=grammar), PRIOR)
    entry.abort("r")
    grammar.grammar = object()
    entry.admit()
    assert (core.given, core.aborted) == ([], [])


def test_answer_that_the_grammar_does_not_allow_fails_alone():
    core, grammar = Core(is_v2=True, allows=False), SimpleNamespace(grammar=object())
    entered(core, request(grammar=grammar), PRIOR)
    assert isinstance(grammar.grammar, ValueError)


SOURCE = {"bootstrap_room": 1, "bootstrap_host": "p", "bootstrap_port": 2}


def test_landed_request_continues_after_its_first_token():
    core = Core(is_v2=False)
    entry = entered(core, request(source=SOURCE), PRIOR)
    [added] = core.given  # the workers get their state with the first token
    assert added.num_tokens == len(PROMPT + PRIOR) + 1, "vLLM reserves a block for the first token"
    assert entry.land("r", 4) is None
    assert core.given[1]["output_token_ids"] == [*PRIOR, 4]
    assert list(added.all_token_ids) == [*PROMPT, *PRIOR, 4]
    assert entry.land("unknown", 4) is None


@pytest.mark.parametrize(
    ("first_id", "prior_ids", "sampling", "reason"),
    [
        (4, [], {"stop_token_ids": [4]}, "stop"),
        (4, PRIOR, {"max_tokens": 3}, "length"),
        (4, [8] * 16, {}, "length"),  # 3 + 16 + 1 tokens are the maximum length
    ],
)
def test_first_token_ends_the_answer_as_in_vllm(first_id, prior_ids, sampling, reason):
    core = Core(is_v2=False)
    how = {"max_tokens": 50} | sampling
    entry = entered(core, request(source=SOURCE, **how), prior_ids)
    status = core.given[0].status
    finish = entry.land("r", first_id)
    assert (finish.reason, len(core.given), core.given[0].status) == (reason, 1, status)


def test_first_token_that_the_grammar_does_not_allow_fails_the_request():
    core, grammar = Core(is_v2=False), SimpleNamespace(grammar=object())
    entry = entered(core, request(source=SOURCE, grammar=grammar), [])
    core.scheduler.structured_output_manager.accept_tokens = lambda *_given: False
    with pytest.raises(EngineFailed):
        entry.land("r", 4)


@pytest.mark.parametrize("num_draws", [0, 1, 5])
def test_cpu_generator_takes_back_the_draws_after_its_tokens(num_draws):
    from vllm.platforms import current_platform

    from tandem.vllm.node.entry import CpuGenerator

    current_platform.import_kernels()  # as in a worker

    def draw(generator):
        if hasattr(torch.ops._C, "fused_gumbel_argmax"):
            return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))
        return torch.empty(10).exponential_(generator=generator).tolist()

    plain = torch.Generator().manual_seed(3)
    expected = [draw(plain) for _ in range(num_draws + 2)][num_draws:]
    state = SimpleNamespace(
        output_token_ids=[0] * num_draws, sampling_params=SimpleNamespace(seed=3)
    )
    generator = CpuGenerator.of(state, vocab_size=10)
    for _ in range(2):
        assert draw(generator) == expected[0]
        generator.set_offset(generator.get_offset() - 4)
    state.output_token_ids.append(draw(generator))
    assert draw(generator) == expected[1]
    generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) == expected[1]
