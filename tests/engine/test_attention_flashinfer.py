"""What we hand to FlashInfer, through a stand-in that computes with it."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.attention_cases import CASES, Case, error, make, tolerance


@pytest.fixture
def backend(fake_flashinfer):
    from tandem.engine.attention_flashinfer import FlashInferAttention

    return FlashInferAttention("cpu")


def wrappers():
    return sys.modules["flashinfer"].WRAPPERS


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_special])
def test_what_is_handed_over_gives_the_reference_answer(backend, name):
    assert error(CASES[name], backend) <= tolerance(CASES[name])


def test_a_forward_is_planned_once_for_all_layers_that_score_alike(backend):
    layer, batch = make(CASES["decodes and prompts"], backend, "cpu")
    for index in (0, 1):
        layer.index = index
        backend.attend(layer, batch)
    assert [wrapper.num_plans for wrapper in wrappers()] == [1, 1]
    layer.scoring = replace(layer.scoring, window=4)
    backend.attend(layer, batch)
    assert [wrapper.num_plans for wrapper in wrappers()] == [1, 1, 1, 1]


def test_the_next_forward_plans_the_same_wrappers_again(backend):
    for _ in range(2):
        layer, batch = make(CASES["decodes and prompts"], backend, "cpu")
        backend.attend(layer, batch)
    assert [wrapper.num_plans for wrapper in wrappers()] == [2, 2]


def test_a_recorded_forward_has_a_wrapper_of_its_own_that_follows_the_host_numbers(backend):
    layer, batch = make(Case(((9, 1), (5, 1))), backend, "cpu")
    batch.is_recorded = True
    backend.attend(layer, batch)
    [wrapper] = wrappers()
    assert wrapper.use_cuda_graph
    batch.host_kv_lens = np.array([10, 1], np.int32)
    backend.prepare(batch)
    assert wrapper.num_plans == 2
    assert wrapper.indptr.tolist() == [0, 3, 4]
    assert wrapper.last_page_len.tolist() == [2, 1]
