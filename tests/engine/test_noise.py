"""The noise of draws is a function of seed, index and token alone, and its distribution is Gumbel's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.noise import gumbels, gumbels_of

EULER = 0.5772156649
SEEDS, INDEXES = st.integers(0, 2**64 - 1), st.integers(0, 2**40)


@given(SEEDS, INDEXES, st.integers(1, 50))
def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary(seed, index, size):
    assert gumbels(seed, index, size).tolist() == gumbels(seed, index, 50)[:size].tolist()


@given(SEEDS, INDEXES)
def test_another_seed_or_index_has_other_noise(seed, index):
    noise = gumbels(seed, index, 8)
    assert (gumbels(seed ^ 1, index, 8) != noise).any()
    assert (gumbels(seed, index + 1, 8) != noise).any()


def test_noise_is_finite_whatever_the_random_word():
    noise = gumbels_of(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert noise[0] > 22


def test_noise_is_spread_as_gumbels_distribution_is():
    noise = np.concatenate([gumbels(seed, seed % 7, 50_000) for seed in range(20)]).astype(float)
    assert abs(noise.mean() - EULER) < 0.005
    assert abs(noise.std() - np.pi / 6**0.5) < 0.005
    below = [(noise < bound).mean() for bound in (-1, 0, 1, 3, 6)]
    assert np.allclose(below, np.exp(-np.exp([1, 0, -1, -3, -6])), atol=0.002)


def test_noise_of_neighbours_is_independent():
    noise = np.stack([gumbels(seed, 5, 10_000) for seed in range(20)])
    pairs = [(noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[:, 8:], noise[:, :-8])]
    for first, second in pairs:
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01
