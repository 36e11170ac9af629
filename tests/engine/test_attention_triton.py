"""The Triton kernels: their answers, in Triton's interpreter, and that they compile for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.attention_torch import TorchAttention
from tandem.engine.attention_triton import TritonAttention, prompt_tiles
from tests.attention_cases import CASES, PROMPTS, Case, make, tolerance
from tests.engine.triton_compiled import SAMPLER, Geometry, compile_kernel, compile_of_sampler
from tests.engine.triton_interpreted import KV_DTYPES, generate

INTERPRETED = "tests.engine.triton_interpreted"
KERNELS = ("write_rows", "attend_prompts", "attend_decodes", "merge_splits")


@pytest.fixture(scope="module")
def interpreted(tiny_model) -> dict[str, Any]:
    """What a process that interprets the kernels found."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", INTERPRETED, str(tiny_model("llama"))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_layer_may_have_other_sizes_than_the_layer_before_it(interpreted):
    assert interpreted["behind"] <= tolerance(CASES["one row"])


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_answer_as_the_reference_does(interpreted, name):
    assert interpreted["errors"][name] <= tolerance(CASES[name])


def test_the_noise_of_draws_is_that_of_a_cpu(interpreted):
    assert interpreted["noise_error"] < 1e-5


def test_the_kernel_keeps_the_tokens_that_the_definition_keeps(interpreted):
    assert interpreted["wrongly_cut"] == []


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_an_engine_generates_the_references_tokens(interpreted, tiny_model, kv_cache_dtype):
    expected = generate(str(tiny_model("llama")), kv_cache_dtype, TorchAttention())
    assert interpreted["tokens"][kv_cache_dtype] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(torch.bfloat16, head_dim=128, group=4),
        Geometry(torch.bfloat16, head_dim=128, group=7, is_fp8=True),
        Geometry(torch.float32, head_dim=64, group=3, has_window=True, has_softcap=True),
        Geometry(torch.bfloat16, head_dim=64, group=8, has_window=True, has_sinks=True),
        Geometry(torch.bfloat16, head_dim=128, group=5, has_chunk=True),
        Geometry(torch.bfloat16, head_dim=512, group=8),
    ],
    ids=str,
)
def test_the_kernels_compile_and_fit_into_shared_memory(geometry, capability):
    for name in KERNELS:
        # 99 KiB: what a block may have on GPUs of 2020's consumer line and later; others have more.
        assert compile_kernel(name, geometry, capability).metadata.shared <= 99 << 10, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", SAMPLER)
def test_the_samplers_kernels_compile(name, capability):
    assert compile_of_sampler(name, capability).metadata.shared <= 48 << 10


def test_tiles_cover_every_row_of_every_prompt_once_and_the_longest_come_first():
    case = Case(((9, 1), *PROMPTS))
    _, batch = make(case, TritonAttention(1), "cpu")
    tiles = prompt_tiles(batch, 5)
    rows = np.concatenate([np.arange(first, first + num) for _, first, num, _ in tiles])
    assert sorted(rows) == list(range(1, 1 + sum(rows for _, rows in PROMPTS)))
    assert list(tiles[:, 3]) == sorted(tiles[:, 3], reverse=True)
    starts = batch.host_query_starts
    for sequence, first, _, position in tiles:
        keys, num_rows = case.sequences[sequence]
        assert position == keys - num_rows + first - starts[sequence]


@pytest.mark.parametrize(
    ("num_decodes", "max_keys", "num_splits"),
    [
        (1, 8192, 32),  # a lone long context fills the GPU
        (1, 300, 2),  # but no split is left with next to nothing
        (256, 8192, 1),  # a full batch fills it by itself
        (4, 1 << 20, 8),
        (3, 1 << 20, 8),  # 11 would do, but is no power of two
    ],
)
def test_keys_are_split_until_the_processors_have_work(num_decodes, max_keys, num_splits):
    assert TritonAttention(132).num_splits(num_decodes, 8, max_keys) == num_splits
