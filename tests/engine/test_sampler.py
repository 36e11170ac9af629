"""Sampling follows the parameters of each request; noise depends only on seed, index and token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.sampling.penalties import Penalties
from tandem.engine.sampling.sampler import _excluded, gumbels, to_gumbel
from tandem.engine.sampling.sampler import sample as sample_slots
from tandem.engine.scheduling.forward import Slots
from tandem.engine.scheduling.request import ActiveRequest
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams
from tests.engine.cut_off import kept_by_definition

NO_EOS: frozenset[int] = frozenset()
LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.5, 2.5])


def active(prompt=(1,), output=(), seed=0, num_prior=0, **sampling) -> ActiveRequest:
    request = GenerateRequest(
        request_id=RequestId("r"),
        prompt_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        num_prior_tokens=num_prior,
    )
    made = ActiveRequest(
        request,
        arrival=0,
        max_tokens=100,
        seed=seed,
        token_ids=list(prompt),
    )
    for token in output:
        made.accept(token)
    return made


def sample(logits: torch.Tensor, requests: list[ActiveRequest], eos=NO_EOS) -> list[int]:
    slots = Slots(len(requests), 1)
    for request in requests:
        slots.take(request)
    rows = np.array([request.slot for request in requests])
    logits = logits.clone()
    Penalties(logits.shape[1], eos, logits.device).apply(logits, slots, rows, requests)
    return sample_slots(logits, slots, rows).tolist()


def draws(num: int, logits=LOGITS, **sampling) -> list[int]:
    requests = [active(seed=seed, **sampling) for seed in range(num)]
    return sample(logits.repeat(num, 1), requests, NO_EOS)


def test_zero_temperature_is_greedy():
    assert sample(LOGITS[None], [active(temperature=0)], NO_EOS) == [1]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.01}], ids=str)
def test_draw_is_independent_of_the_batch(cut):
    requests = [active(seed=seed, temperature=0.9, **cut) for seed in range(20)]
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    together = sample(logits.clone(), requests, NO_EOS)
    alone = [sample(logits[i : i + 1].clone(), [r], NO_EOS)[0] for i, r in enumerate(requests)]
    assert together == alone


def test_small_logit_differences_keep_the_draw():
    """The same prompt in a different batch has such differences, because sums have a different order."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(500, 49152, generator=generator) * 3
    other = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    alone, in_a_batch = (
        [active(seed=seed, num_prior=seed % 3) for seed in range(500)] for _ in "12"
    )
    assert sample(logits, alone) == sample(other, in_a_batch)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(temperature):
    num, generator = 20_000, torch.Generator().manual_seed(4)
    logits = torch.cat([LOGITS, torch.randn(35, generator=generator)])
    expected = (logits / temperature).softmax(0).double() * num
    found = torch.bincount(torch.tensor(draws(num, logits, temperature=temperature)), minlength=40)
    statistic = ((found - expected) ** 2 / expected).sum()
    assert statistic < 72  # for 39 degrees of freedom, exceeded once in a thousand


def test_draws_of_one_seed_follow_the_distribution():
    requests = [active(prompt=(1,) * 5000, seed=9, num_prior=index) for index in range(5000)]
    found = torch.bincount(torch.tensor(sample(LOGITS.repeat(5000, 1), requests)), minlength=5)
    expected = LOGITS.softmax(0).double() * 5000
    assert ((found - expected) ** 2 / expected).sum() < 18  # for 4 degrees of freedom


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-38, 1e-45, 5e-324])
def test_tiny_temperature_is_greedy(temperature, cut):
    logits = 30 * LOGITS
    assert set(draws(50, logits, temperature=temperature, **cut)) == {1}


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}], ids=str)
def test_largest_temperature_is_uniform_over_allowed_tokens(cut):
    found = draws(300, temperature=3.4e38, min_new_tokens=1, stop_token_ids=[1], **cut)
    assert set(found) == {0, 2, 3, 4}


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 4}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.7}, {1, 4}),
        ({"min_p": 0.5}, {1, 4}),
        ({"min_p": 1.0}, {1}),
        ({"logit_bias": {3: 100.0}}, {3}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
    ],
)
def test_exactly_the_kept_tokens_are_drawn(sampling, possible):
    assert set(draws(300, **sampling)) == possible


@pytest.mark.parametrize("top_k", [-1, 1, 3, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
def test_kept_tokens_match_the_definition(top_k, top_p):
    logits = torch.randn(8, 60, generator=torch.Generator().manual_seed(2)) * 2
    logits[:4] = logits[:4].round()  # with ties
    for row in logits:
        seen = set(draws(400, row, top_k=top_k, top_p=top_p))
        assert seen <= kept_by_definition(row.numpy(), top_k, top_p)
    together = [active(seed=i, top_k=top_k, top_p=top_p) for i in range(8)]
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(together)]
    assert sample(logits, [active(seed=i, top_k=top_k, top_p=top_p) for i in range(8)]) == alone


def test_row_without_top_p_keeps_all_tokens_in_a_mixed_batch():
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).repeat(2, 1) * 5
    slots = Slots(2, 1)
    for request in (active(), active(top_p=0.9)):
        slots.take(request)
    cut = _excluded(logits, slots, np.arange(2), has_top=True)
    assert cut.any(dim=1).tolist() == [False, True]


# ── noise ────────────────────────────────────────────────────────────────────────────────────────

EULER = 0.5772156649
SEEDS, INDEXES = st.integers(0, 2**64 - 1), st.integers(0, 2**40)


@given(SEEDS, INDEXES, st.integers(1, 50))
def test_noise_is_independent_of_the_vocabulary_size(seed, index, size):
    assert gumbels(seed, index, size).tolist() == gumbels(seed, index, 50)[:size].tolist()


@given(SEEDS, INDEXES)
def test_noise_differs_by_seed_and_index(seed, index):
    noise = gumbels(seed, index, 8)
    assert (gumbels(seed ^ 1, index, 8) != noise).any()
    assert (gumbels(seed, index + 1, 8) != noise).any()


def test_noise_is_finite_for_all_random_words():
    noise = to_gumbel(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert noise[0] > 22
