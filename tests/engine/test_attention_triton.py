"""The Triton attention and sampler kernels: results in Triton's interpreter, and compilation for GPUs."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.attention.paged import Scoring
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.attention.triton import TritonAttention, prompt_tiles
from tests.attention_cases import CASES, PROMPTS, Case, make, tolerance
from tests.engine.triton_compiled import SAMPLER, Geometry, compile_kernel, compile_typed
from tests.engine.triton_interpreted import KV_DTYPES, generate
from tests.interpreter import interpreted

KERNELS = ("write_rows", "rotate_and_write", "attend_prompts", "attend_decodes", "merge_splits")


# Triton's interpreter takes minutes of CPU time.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def found(tiny_model) -> dict[str, Any]:
    """Results of a process that interprets the kernels."""
    return interpreted("tests.engine.triton_interpreted", str(tiny_model("llama")))


def test_layers_of_different_sizes_are_independent(found):
    assert found["behind"] <= tolerance(CASES["one row"])


@pytest.mark.parametrize("name", CASES)
def test_triton_kernels_match_the_reference(found, name):
    assert found["errors"][name] <= tolerance(CASES[name])


def test_replayed_forward_uses_the_current_lengths(found):
    assert found["replayed"] <= tolerance(CASES["one row"])


def test_noise_kernel_matches_the_cpu(found):
    assert found["noise_error"] < 1e-5


def test_cutoff_kernel_keeps_the_same_tokens_as_the_definition(found):
    assert found["wrongly_cut"] == []


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_engine_generates_the_tokens_of_the_reference(found, tiny_model, kv_cache_dtype):
    expected = generate(str(tiny_model("llama")), kv_cache_dtype, TorchAttention())
    assert found["tokens"][kv_cache_dtype] == expected


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
        Geometry(torch.float16, head_dim=256, group=4, has_softcap=True),
        Geometry(torch.float32, head_dim=256, group=2),
        Geometry(torch.bfloat16, head_dim=512, group=8),
    ],
    ids=str,
)
def test_kernels_compile_and_fit_into_shared_memory(geometry, capability):
    # Shared memory per program: 99 KiB on consumer GPUs, which run code for capability 80; 227 KiB on an H100.
    limit = {80: 99 << 10, 90: 227 << 10}[capability]
    for name in KERNELS:
        assert compile_kernel(name, geometry, capability).metadata.shared <= limit, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_four_decode_programs_fit_on_a_multiprocessor_and_load_ahead(head_dim, capability):
    compiled = compile_kernel(
        "attend_decodes", Geometry(torch.bfloat16, head_dim, group=4), capability
    )
    # An A100 has 164 KiB for all programs, and reserves 1 KiB per program.
    assert 4 * (compiled.metadata.shared + (1 << 10)) <= 164 << 10
    # The wait before each product leaves at least the loads of a later block outstanding.
    waits = [int(num) for num in re.findall(r"async_wait.*num = (\d+)", compiled.asm["ttgir"])]
    assert max(waits) >= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", SAMPLER)
def test_sampler_kernels_compile(name, capability):
    assert compile_typed(name, SAMPLER[name], capability).metadata.shared <= 48 << 10


def test_tiles_cover_each_prompt_row_once_longest_first():
    case = Case(((9, 1), *PROMPTS))
    _, batch = make(case, TritonAttention(1), "cpu")
    tiles = prompt_tiles(batch, range(batch.num_decodes, len(batch.host_kv_lens)), 5)
    rows = np.concatenate([np.arange(first, first + num) for _, first, num, _ in tiles])
    assert sorted(rows) == list(range(1, 1 + sum(rows for _, rows in PROMPTS)))
    assert list(tiles[:, 3]) == sorted(tiles[:, 3], reverse=True)
    starts = batch.host_query_starts
    for sequence, first, _, position in tiles:
        keys, num_rows = case.sequences[sequence]
        assert position == keys - num_rows + first - starts[sequence]


def table_of(kv_lens, **scoring):
    """Return the splits of rows with 8 KV heads on a GPU with 132 multiprocessors."""
    splits = TritonAttention(132).splits(len(kv_lens), 8, 131_072, Scoring(1.0, **scoring))
    return splits.table(np.array(kv_lens, np.int32))


@pytest.mark.parametrize(
    ("kv_lens", "scoring", "first"),
    [
        ([1], {}, [0]),
        ([128, 129, 20_000, 1, 700], {}, [0] * 5),
        ([9000] * 70, {}, [0] * 70),
        ([5000, 900, 20], {"window": 1000}, [4000, 0, 0]),
        ([5000, 4096, 20], {"chunk": 1024}, [4096, 3072, 0]),
    ],
)
def test_splits_cover_each_visible_key_once(kv_lens, scoring, first):
    table = table_of(kv_lens, **scoring)
    starts = table[: len(kv_lens) + 1, 3]
    for row, (begin, end) in enumerate(zip(first, kv_lens, strict=True)):
        own = table[starts[row] : starts[row + 1]]
        assert (own[:, 0] == row).all()
        assert (own[:, 1] < own[:, 2]).all()
        assert [own[0, 1], *own[:, 2]] == [begin, *own[1:, 1], end]
    assert (table[starts[-1] :, :3] == 0).all()


def test_single_long_context_is_split_over_four_programs_per_multiprocessor():
    table = table_of([100_000])
    assert (table[:, 2] > table[:, 1]).sum() * 8 >= 0.95 * 4 * 132


def test_long_context_among_short_ones_is_split_over_many_programs():
    table = table_of([1000] * 63 + [100_000])
    sizes = table[:, 2] - table[:, 1]
    assert sizes.max() <= 2500  # of 163000 keys, for 66 programs in addition to one per row
    assert (table[:, 0] == 63).sum() >= 40


def test_full_batch_of_equal_lengths_and_short_contexts_are_not_split():
    for kv_lens in ([8000] * 256, [100] * 3):
        table = table_of(kv_lens)
        assert (table[:, 2] > table[:, 1]).sum() == len(kv_lens)


def test_number_of_splits_is_limited_by_their_minimum_size():
    splits = TritonAttention(132).splits(2, 8, 300, Scoring(1.0))
    assert splits.num_programs == 2 * 3
