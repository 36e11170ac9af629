"""Logits and tokens from the state on the device compared with a plain reference that has all tokens."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.config import EngineOptions
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.sampling.penalties import Penalties
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import Slots
from tandem.engine.scheduling.request import ActiveRequest
from tests.engine.test_sampler import LOGITS, NO_EOS, active, sample
from tests.engine.toy_grammars import ANY_TEXT, ToyGrammars
from tests.engine.toy_runner import EOS, VOCAB, ToyRunner, toy_engine, toy_shape
from tests.one_engine import ask, ask_remote, run

IDS = st.integers(0, VOCAB - 1)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([-0.7, 0.0, 0.3]),
        "presence_penalty": st.sampled_from([-0.4, 0.0, 1.1]),
        "logit_bias": st.dictionaries(IDS, st.sampled_from([-3.0, 0.25, 2.0]), max_size=4),
        "min_new_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(IDS, max_size=2),
    },
)


def changed(logits: np.ndarray, tokens: list[int], start: int, p) -> np.ndarray:
    """Return the logits by definition. `tokens[start:]` is the answer so far."""
    logits, answer = logits.copy(), tokens[start:]
    factor = np.float32(p.repetition_penalty)
    for token in set(tokens):
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(answer).items():
        logits[token] += np.float32(-p.frequency_penalty * count - p.presence_penalty)
    for token, bias in p.logit_bias.items():
        logits[token] += np.float32(bias)
    if len(answer) < p.min_new_tokens:
        logits[[EOS, *p.stop_token_ids]] = -np.inf
    return logits


# ── logits ───────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.tuples(
            st.lists(IDS, min_size=1, max_size=9),  # prompt
            st.lists(IDS, max_size=4),  # tokens that an earlier attempt generated
            SAMPLING,
            st.integers(0, 12),  # the step at which it comes
            st.integers(1, 12),  # steps that it stays
            st.integers(0, 3),  # it sits out one step in so many
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 2**32 - 1),
)
def test_penalized_logits_match_a_reference_as_requests_come_and_go(asked, seed):
    rng, slots = np.random.default_rng(seed), Slots(8, 1)
    penalties = Penalties(VOCAB, frozenset({EOS}), torch.device("cpu"))
    requests = [
        active(prompt=prompt + prior, num_prior=len(prior), **sampling)
        for prompt, prior, sampling, *_ in asked
    ]
    # The requests themselves do not record their tokens.
    tokens = [prompt + prior for prompt, prior, *_ in asked]
    for step in range(25):
        batch = []
        for i, (*_, begin, num_steps, pause) in enumerate(asked):
            if step == begin:
                slots.take(requests[i])
            if step == begin + num_steps:
                slots.release(requests[i])
            if begin <= step < begin + num_steps and (not pause or step % (pause + 1)):
                batch.append(i)
        rows = np.array([requests[i].slot for i in batch], np.int64)
        logits = torch.from_numpy(rng.normal(size=(len(batch), VOCAB)).astype(np.float32))
        expected = [
            changed(own, tokens[i], len(asked[i][0]), requests[i].request.sampling).tolist()
            for own, i in zip(logits.numpy(), batch, strict=True)
        ]
        count = penalties.apply(logits, slots, rows, [requests[i] for i in batch])
        assert logits.tolist() == expected
        sampled = rng.integers(VOCAB, size=len(batch))
        count(torch.from_numpy(sampled))
        slots.record_launch(rows)
        for i, token in zip(batch, sampled.tolist(), strict=True):
            tokens[i].append(token)


def test_rows_are_reused_and_memory_follows_the_peak_of_requests():
    slots = Slots(256, 1)
    penalties = Penalties(VOCAB, NO_EOS, torch.device("cpu"))
    others = [active() for _ in range(100)]
    for other in others:
        slots.take(other)
    for _ in range(20):
        penalized = [active(frequency_penalty=1.0) for _ in range(3)]
        for request in penalized:
            slots.take(request)
        rows = np.array([request.slot for request in penalized])
        penalties.apply(torch.zeros(3, VOCAB), slots, rows, penalized)
        slots.record_launch(rows)
        for request in (*penalized, others.pop()):
            slots.release(request)
    assert len(penalties._marks) <= 4
    assert not len(penalties._biases)


def test_repetition_penalty_includes_the_prompt():
    chosen = sample(
        LOGITS[None].clone(),
        [active(prompt=(1,), temperature=0, repetition_penalty=2.0)],
        NO_EOS,
    )
    assert chosen == [4]


def test_repetition_penalty_lowers_negative_logits():
    request = active(prompt=(1,), temperature=0, repetition_penalty=2.0)
    assert sample(LOGITS[None] - 100, [request], NO_EOS) == [4]


def test_frequency_and_presence_penalties_exclude_the_prompt():
    request = active(prompt=(1, 1, 1), output=(1,), temperature=0, frequency_penalty=0.4)
    assert sample(LOGITS[None].clone(), [request], NO_EOS) == [1]
    request = active(prompt=(4,), output=(1, 1), temperature=0, frequency_penalty=0.4)
    assert sample(LOGITS[None].clone(), [request], NO_EOS) == [4]
    request = active(prompt=(4,), output=(1,), temperature=0, presence_penalty=0.6)
    assert sample(LOGITS[None].clone(), [request], NO_EOS) == [4]


def test_end_of_sequence_is_banned_before_min_new_tokens():
    request = active(temperature=0, min_new_tokens=1, stop_token_ids=[4])
    assert sample(LOGITS[None].clone(), [request], frozenset({1})) == [2]
    request = active(output=(0,), temperature=0, min_new_tokens=1)
    assert sample(LOGITS[None].clone(), [request], frozenset({1})) == [1]


def test_tokens_of_earlier_attempts_count_as_output():
    resumed = active(prompt=(0, 1), num_prior=1, temperature=0, presence_penalty=0.6)
    assert resumed.next_index == 1
    assert sample(LOGITS[None].clone(), [resumed], NO_EOS) == [4]


def test_stop_id_outside_the_vocabulary_is_ignored():
    strange = active(temperature=0, min_new_tokens=3, stop_token_ids=[1, 99999, -3])
    assert sample(LOGITS.repeat(2, 1), [strange, active(temperature=0)], NO_EOS) == [4, 1]


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


class WideToyRunner(ToyRunner):
    """A toy runner whose logits are close together, so that every penalty matters."""

    def logits_after(self, tokens):
        return torch.from_numpy(wide_logits(tokens))


def wide_logits(tokens) -> np.ndarray:
    rng = np.random.default_rng(np.asarray(tokens, np.int64).view(np.uint32))
    return rng.normal(size=VOCAB).astype(np.float32)


def reference(prompt: list[int], prior: list[int], num_new: int, sampling) -> list[int]:
    """Return the tokens that follow those of an earlier attempt, until the first stop id."""
    params, tokens = ask(prompt, **sampling).sampling, prompt + prior
    for _ in range(num_new):
        logits = changed(wide_logits(tokens), tokens, len(prompt), params)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt + prior) :]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=20),  # prompt
            st.lists(st.integers(2, VOCAB - 1), max_size=4),  # tokens of an earlier attempt
            st.integers(1, 20),  # new tokens
            SAMPLING,
            st.integers(0, 20),  # the step before which it comes
            st.one_of(st.none(), st.integers(0, 30)),  # the step before which it is cancelled
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(11, 24),
    st.booleans(),
    st.integers(1, 5),
)
def test_answers_match_a_reference_in_any_schedule(asked, num_pages, is_overlapped, max_running):
    engine, _ = toy_engine(
        num_pages,
        make_runner=WideToyRunner,
        is_overlapped=is_overlapped,
        max_running_requests=max_running,
        chunked_prefill_size=9,
    )
    engine._scheduler.growth_share = 0.0  # so that requests are retracted
    out: dict[str, list[int]] = {}
    running: dict[int, ActiveRequest] = {}
    for step in range(31):
        for i, (prompt, prior, num_new, sampling, begin, end) in enumerate(asked):
            if end == step and i in running:
                engine.cancel(running[i])
            if begin == step:
                params = {"max_new_tokens": len(prior) + num_new, **sampling}
                request = ask(prompt + prior, str(i), num_prior=len(prior), **params)
                running[i] = engine.submit(request)
        for token in engine.step().tokens:
            out.setdefault(token.request.request.request_id, []).append(token.token)
    run(engine, out)
    for i, (prompt, prior, num_new, sampling, begin, end) in enumerate(asked):
        expected = reference(prompt, prior, num_new, sampling)
        got = out.get(str(i), [])
        is_cancelled = end is not None and end > begin
        assert got == expected[: len(got)] if is_cancelled else got == expected


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_first_token_counts_as_output_on_decode(is_overlapped):
    sampling = {"repetition_penalty": 1.3, "presence_penalty": 0.8, "min_new_tokens": 3}
    engine, runner = toy_engine(20, make_runner=WideToyRunner, is_overlapped=is_overlapped)
    prompt = [5, 6, 7, 8, 5]
    expected = reference(prompt, [], 9, sampling)
    half = ask_remote(engine, ask(prompt, max_new_tokens=9, **sampling))
    runner.pages[half.page_ids] = [[5, 6, 7, 8], [5, 0, 0, 0]]
    engine.land(half, expected[0], seed=0)
    assert run(engine)["r"] == expected[1:]


class LauncherBesideHost:
    """Launches like a GPU, and records the order of launches and reads."""

    is_asynchronous = True

    def __init__(self, launcher: ModelLauncher) -> None:
        self._launcher = launcher
        self.events: list[str] = []

    def seed(self, request, drawn):
        return self._launcher.seed(request, drawn)

    def launch(self, batch, slots, on_layer_written):
        read = self._launcher.launch(batch, slots, on_layer_written)
        self.events.append("launch")

        def noted():
            self.events.append("read")
            return read()

        return noted


@pytest.mark.parametrize(
    ("sampling", "order"),
    [
        ({}, "launch launch read launch read read"),
        (
            {"frequency_penalty": 0.5, "presence_penalty": 0.5},
            "launch launch read launch read read",
        ),
        ({"repetition_penalty": 1.2}, "launch launch read launch read read"),
        ({"logit_bias": {5: 1.0}, "min_new_tokens": 2}, "launch launch read launch read read"),
        ({"grammar": ANY_TEXT}, "launch read launch read launch read"),
    ],
    ids=str,
)
def test_only_grammars_wait_for_the_previous_token_on_the_host(sampling, order):
    shape, config = toy_shape(), EngineOptions(page_size=4)
    launcher = LauncherBesideHost(ModelLauncher(ToyRunner(20, 4), shape, 4))
    engine = Engine(launcher, shape, config, 20, grammars=ToyGrammars())
    engine.submit(ask([5, 6, 7], max_new_tokens=3, **sampling))
    assert len(run(engine)["r"]) == 3
    assert " ".join(launcher.events) == order
