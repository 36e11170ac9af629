"""K and V in unscaled e4m3: the error of attention, and engines that use it."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.attention.torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.model.loading import load_model
from tandem.engine.scheduling.core import Engine
from tests.attention_cases import CASES, FP8, clear_nan, make
from tests.engine.test_core import PAGE, make_engine, prompts
from tests.one_engine import ask, run


@pytest.mark.parametrize("name", ["decodes at page borders", "prompts with cached prefixes"])
def test_fp8_attention_error_is_within_the_rounding_of_kv(name):
    """e4m3 has a mantissa of 3 bits, so its relative error is at most 2^-4.

    Values here are around 1 and up to 4, so their error is up to 0.25 before averaging, and errors of scores shift the
    weights by about as much. The limits are 0.25 for the largest error and 0.05 for the mean.
    """
    outputs = []
    for kv_dtype in (None, FP8):
        layer, batch = make(replace(CASES[name], kv_dtype=kv_dtype), TorchAttention(), "cpu")
        clear_nan(batch)
        outputs.append(batch.backend.attend(layer, batch))
    difference = (outputs[0] - outputs[1]).abs()
    assert 0 < difference.max() < 0.25
    assert difference.mean() < 0.05


def test_values_beyond_the_fp8_range_are_clamped():
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


def test_fp8_kv_generates_the_same_tokens_from_chunks_and_cache(engine, tiny_model):
    """Values are rounded when they are written, so all readers of a page read the same values."""
    prompt = prompts(9)[8]
    answers = []
    chunked = make_engine(tiny_model("llama"), kv_cache_dtype="fp8_e4m3", chunked_prefill_size=PAGE)
    for one, name in ((engine, "first"), (engine, "again"), (chunked, "chunked")):
        one.submit(ask(prompt, name, max_new_tokens=8))
        answers.append(run(one)[name])
    assert len(answers[0]) == 8
    assert answers[0] == answers[1] == answers[2]


def test_fp8_pool_has_one_byte_elements_and_its_own_fingerprint(engine, tiny_model):
    path = tiny_model("llama")
    _, shape = load_model(EngineConfig(model_dir=str(path), dtype="float32"))
    assert engine._launcher._runner.pool.dtype is torch.float8_e4m3fn
    assert engine.shape.kv_bytes_per_token * 4 == shape.kv_bytes_per_token
    assert engine.shape.fingerprint != shape.fingerprint
