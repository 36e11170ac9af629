"""K and V in unscaled e4m3: how far attention is off, and that engines run on it."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.attention_torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.core import Engine
from tandem.engine.model import load_model
from tests.attention_cases import CASES, FP8, clear_nan, make
from tests.engine.test_core import PAGE, make_engine, prompts
from tests.one_engine import ask, run


@pytest.mark.parametrize("name", ["decodes at page borders", "prompts with cached prefixes"])
def test_attention_is_off_by_no_more_than_the_rounding_of_keys_and_values(name):
    """e4m3 has 3 bits of mantissa, so a relative error of at most 2^-4.

    Values around 1, up to 4 here, are then off by up to 0.25 before averaging, and scores of the same
    size shift the weights about as much: 0.25 for the largest of all elements, 0.05 for their mean.
    """
    outputs = []
    for kv_dtype in (None, FP8):
        layer, batch = make(replace(CASES[name], kv_dtype=kv_dtype), TorchAttention(), "cpu")
        clear_nan(batch)
        outputs.append(batch.backend.attend(layer, batch))
    difference = (outputs[0] - outputs[1]).abs()
    assert 0 < difference.max() < 0.25
    assert difference.mean() < 0.05


def test_what_is_too_large_becomes_the_largest_and_not_nan():
    layer, batch = make(replace(CASES["one row"], kv_dtype=FP8), TorchAttention(), "cpu")
    layer.key[:] = 1e4
    layer.value[:] = -1e4
    batch.write(layer)
    pages = batch.pool.layers[layer.index]
    assert (pages.key[batch.write_pages, :, batch.write_offsets].float() == 448).all()
    assert (pages.value[batch.write_pages, :, batch.write_offsets].float() == -448).all()


@pytest.fixture
def engine(tiny_model) -> Engine:
    return make_engine(tiny_model("llama"), kv_cache_dtype="fp8_e4m3")


def test_a_generation_is_the_same_from_chunks_or_from_a_cached_prefix(engine, tiny_model):
    """Rounding is at the write, so whoever reads a page reads the same numbers."""
    prompt = prompts(9)[8]
    answers = []
    chunked = make_engine(tiny_model("llama"), kv_cache_dtype="fp8_e4m3", chunked_prefill_size=PAGE)
    for one, name in ((engine, "first"), (engine, "again"), (chunked, "chunked")):
        one.submit(ask(prompt, name, max_new_tokens=8))
        answers.append(run(one)[name])
    assert len(answers[0]) == 8
    assert answers[0] == answers[1] == answers[2]


def test_the_pool_is_of_bytes_and_its_fingerprint_its_own(engine, tiny_model):
    path = tiny_model("llama")
    _, shape = load_model(EngineConfig(model_dir=str(path), dtype="float32"))
    assert engine._launcher._runner.pool.dtype is torch.float8_e4m3fn
    assert engine.shape.kv_bytes_per_token * 4 == shape.kv_bytes_per_token
    assert engine.shape.fingerprint != shape.fingerprint
