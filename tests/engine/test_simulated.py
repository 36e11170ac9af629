"""Tokens of the simulated engine and the time that they take."""

import json
import shutil
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from transformers import DeepseekV3Config

from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.model.loading import load_model
from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import Chunk
from tandem.engine.scheduling.request import ActiveRequest
from tandem.engine.simulated import (
    Clock,
    SimulatedLauncher,
    SimulatedPages,
    answer_key,
    read_model,
    tokens_at,
)
from tandem.wire.errors import ConfigInvalid, InvalidRequest
from tandem.wire.generation import (
    Grammar,
    LogprobOptions,
)
from tests import one_engine
from tests.engine.toy_runner import toy_shape
from tests.one_engine import ask_remote, run
from tests.tiny_models import CONFIGS, CONTEXT_LENGTH, SIZES

PAGE = 4
ORDINARY = np.arange(2, 50)
PROMPTS = [[i + 1, *range(3, 3 + 5 * i)] for i in range(8)]


@dataclass
class FakeTime:
    """A clock that advances only during sleeps."""

    now_s: float = 100.0

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s

    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.sleep)


def make_engine(num_pages=200, profile=None, time=None, ordinary=ORDINARY, **settings) -> Engine:
    shape = toy_shape(num_layers=4, vocab_size=int(ordinary[-1]) + 1)
    config = EngineOptions(page_size=PAGE, **{"chunked_prefill_size": 16, **settings})
    clock = (time or FakeTime()).clock()
    launcher = SimulatedLauncher(profile or Profile(), ordinary, shape.num_layers, clock=clock)
    return Engine(launcher, shape, config, num_pages)


ask = partial(one_engine.ask, max_new_tokens=12, ignore_eos=False)


def answer(prompt, num_new=12, seed=0, first=0) -> list[int]:
    keys = np.full(num_new, answer_key(prompt, seed), np.uint64)
    return tokens_at(keys, np.arange(first, first + num_new), ORDINARY).tolist()


@pytest.mark.parametrize("is_overlapped", [None, False])
def test_answer_has_ordinary_tokens_up_to_its_length(is_overlapped):
    engine = make_engine(is_overlapped=is_overlapped)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(ask(prompt, str(i)))
    answers = run(engine)
    assert answers == {str(i): answer(prompt) for i, prompt in enumerate(PROMPTS)}
    assert {token for tokens in answers.values() for token in tokens} <= set(ORDINARY.tolist())
    assert len({tuple(tokens) for tokens in answers.values()}) == len(PROMPTS)


def test_seed_changes_sampled_answers_but_not_greedy_ones():
    engine = make_engine()
    for seed in (1, 2, -3):
        engine.submit(ask(PROMPTS[1], f"sampled {seed}", seed=seed, temperature=0.5))
        engine.submit(ask(PROMPTS[1], f"greedy {seed}", seed=seed))
    answers = run(engine)
    for seed in (1, 2, -3):
        assert answers[f"sampled {seed}"] == answer(PROMPTS[1], seed=seed)
        assert answers[f"greedy {seed}"] == answer(PROMPTS[1])
    assert answers["sampled 1"] != answers["sampled 2"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_prefill_and_decode_generate_the_tokens_of_one_engine(sampling):
    request = ask(PROMPTS[3], **sampling)
    prefill, decode = make_engine(), make_engine()
    prompt_only = prefill.submit(request, is_prompt_only=True)
    tokens = run(prefill)["r"]
    half = ask_remote(decode, request)
    decode.land(half, tokens[0], prompt_only.seed)
    assert tokens + run(decode)["r"] == answer(PROMPTS[3], seed=sampling.get("seed", 0))


@pytest.mark.parametrize("num_sent", [1, 5, 11])
def test_next_attempt_continues_with_the_same_tokens(num_sent):
    whole = answer(PROMPTS[2], seed=9)
    engine = make_engine()
    prompt = PROMPTS[2] + whole[:num_sent]
    engine.submit(ask(prompt, num_prior=num_sent, temperature=1.0, seed=9))
    assert run(engine)["r"] == whole[num_sent:]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("structured output", {"grammar": Grammar(kind="json_object")}),
        ("logprobs", {"logprobs": LogprobOptions()}),
        ("logit_bias", {"logit_bias": {3: 1.0}}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("min_new_tokens with stop_token_ids", {"min_new_tokens": 3, "stop_token_ids": [5]}),
    ],
)
@pytest.mark.parametrize("is_prompt_only", [True, False])
def test_features_that_need_probabilities_are_refused_by_name(name, asked, is_prompt_only):
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=f"does not support {name}"):
        engine.submit(ask([3], **asked), is_prompt_only=is_prompt_only)
    engine.submit(ask([3], top_p=0.5, min_new_tokens=12))
    assert run(engine)["r"] == answer([3])


def test_step_takes_the_time_of_its_profile():
    profile = Profile(
        prefill=PrefillTimes(base_ms=100, per_token_ms=10, per_context_token_ms=1),
        decode=DecodeTimes(base_ms=1000, per_request_ms=10, per_context_token_ms=1),
    )
    time = FakeTime()
    engine = make_engine(profile=profile, time=time)
    engine.submit(ask([3] * 20, max_new_tokens=3))
    begin_s = time.now_s
    run(engine)
    chunks_s = (0.1 + 16 * 0.01) + (0.1 + 4 * 0.01 + 16 * 0.001)
    decodes_s = 2 * (1 + 0.01) + (21 + 22) * 0.001
    assert time.now_s - begin_s == pytest.approx(chunks_s + decodes_s)


def test_layers_are_reported_one_by_one_over_time():
    time = FakeTime()
    engine = make_engine(profile=Profile(prefill=PrefillTimes(base_ms=1000)), time=time)
    begin_s, told = time.now_s, []

    def begin(pages):
        assert [each.page_ids for each in pages] == [[0, 1, 2]]
        return lambda layer: told.append((layer, time.now_s - begin_s))

    engine.watch_layers(begin)
    engine.submit(ask([3] * 10), is_prompt_only=True)
    run(engine)
    assert told == [(i, pytest.approx(0.25 * (i + 1))) for i in range(4)]


def test_forward_marks_only_the_pages_it_fills():
    memory = np.zeros(6 * 2 * 32, np.uint8)
    pages = SimulatedPages(memory, num_pages=6, page_size=PAGE, num_slabs=2)
    request = ActiveRequest(ask([3] * 11), 0, 20, 0, page_ids=[5, 0, 3])
    pages.fill(Chunk.next_of(request, 4, 0))
    request.num_computed = 4
    first = memory.copy()
    pages.fill(Chunk.next_of(request, 7, 0))
    by_page = memory.reshape(6, 2, 32)
    assert (by_page[5] == first.reshape(6, 2, 32)[5]).all(), "the page may have been pushed already"
    assert by_page[[0, 3], :, :8].any(axis=2).all()
    assert (by_page[0] != by_page[3]).any()
    assert not by_page[[1, 2, 4]].any()
    assert not by_page[:, :, 8:].any()


# ── what is read of a model, against what loading it finds ───────────────────────────────────────


def config_of(path, **settings) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **settings)


def write_config(directory, **facts):
    (directory / "config.json").write_text(json.dumps(facts))
    return directory


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_shape_matches_the_loaded_model(tiny_model, tmp_path, kind, kv_cache_dtype):
    for file in tiny_model(kind).glob("*.json"):
        shutil.copy(file, tmp_path)
    settings = {"kv_cache_dtype": kv_cache_dtype, "context_length": 100}
    loaded = load_model(config_of(tiny_model(kind), **settings))[1]
    shape, _ = read_model(config_of(tmp_path, **settings), "real")
    assert replace(shape, fingerprint="") == replace(loaded, fingerprint="", model_kv_heads=0)


def test_latents_have_the_size_of_the_loaded_model(tmp_path):
    sizes = SIZES | {"num_key_value_heads": 4, "first_k_dense_replace": 3, "q_lora_rank": None}
    sizes |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
    DeepseekV3Config(**sizes).save_pretrained(tmp_path)
    loaded = load_model(config_of(tmp_path, load_format="dummy"))[1]
    shape, _ = read_model(config_of(tmp_path), "real")
    assert shape.kv_bytes_per_token == 3 * (16 + 8) * 4
    assert replace(shape, fingerprint="") == replace(loaded, fingerprint="", model_kv_heads=0)
    assert read_model(config_of(tmp_path), "none")[0].kv_bytes_per_token == 2


def test_missing_config_fields_use_the_architecture_defaults(tmp_path):
    write_config(tmp_path, model_type="gpt2", n_layer=3, n_head=4, n_embd=64, n_positions=128)
    shape, _ = read_model(config_of(tmp_path), "real")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 4, 16)
    assert shape.context_length == 128


def test_sim_kv_none_has_two_bytes_per_token_and_the_same_model(tiny_model):
    path = tiny_model("llama")
    real, ordinary = read_model(config_of(path), "real")
    none, same = read_model(config_of(path), "none")
    assert none.kv_bytes_per_token == 2
    assert (none.vocab_size, none.context_length) == (real.vocab_size, CONTEXT_LENGTH)
    assert ordinary.tolist() == same.tolist()
    assert none.fingerprint != real.fingerprint, "their pages cannot be pushed into each other"


def test_answers_contain_no_special_tokens(embedded_model):
    facts = json.loads((embedded_model / "tokenizer.json").read_text())
    marks = {token["id"] for token in facts["added_tokens"]}
    shape, ordinary = read_model(config_of(embedded_model), "real")
    assert set(ordinary.tolist()) == set(range(shape.vocab_size)) - marks
    assert shape.eos_token_ids <= marks


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_type": "unheard-of"}, "cannot be determined"),
        ({"torch_dtype": "int3"}, "dtype int3"),
        ({"max_position_embeddings": 50}, "--context-length 64"),
    ],
)
def test_invalid_config_is_refused_with_a_remedy(tmp_path, facts, words):
    whole = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": 64,
    }
    write_config(tmp_path, **(facts if "model_type" in facts else whole | facts))
    with pytest.raises(ConfigInvalid, match=words):
        read_model(config_of(tmp_path, context_length=64), "real")
