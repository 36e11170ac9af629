"""The Triton kernels: their answers, in Triton's interpreter, and that they compile for GPUs."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.attention import Scoring
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.attention_triton import TritonAttention, prompt_tiles
from tests.attention_cases import CASES, PROMPTS, Case, make, tolerance
from tests.engine.triton_compiled import SAMPLER, Geometry, compile_kernel, compile_typed
from tests.engine.triton_interpreted import KV_DTYPES, generate
from tests.interpreter import interpreted

KERNELS = ("write_rows", "rotate_and_write", "attend_prompts", "attend_decodes", "merge_splits")


@pytest.fixture(scope="module")
def found(tiny_model) -> dict[str, Any]:
    """What a process that interprets the kernels found."""
    return interpreted("tests.engine.triton_interpreted", str(tiny_model("llama")))


def test_a_layer_may_have_other_sizes_than_the_layer_before_it(found):
    assert found["behind"] <= tolerance(CASES["one row"])


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_answer_as_the_reference_does(found, name):
    assert found["errors"][name] <= tolerance(CASES[name])


def test_a_recorded_forward_follows_the_lengths_of_each_replay(found):
    assert found["replayed"] <= tolerance(CASES["one row"])


def test_the_noise_of_draws_is_that_of_a_cpu(found):
    assert found["noise_error"] < 1e-5


def test_the_kernel_keeps_the_tokens_that_the_definition_keeps(found):
    assert found["wrongly_cut"] == []


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_an_engine_generates_the_references_tokens(found, tiny_model, kv_cache_dtype):
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
def test_the_kernels_compile_and_fit_into_shared_memory(geometry, capability):
    # What a program may have: on consumer GPUs, which run code like that for 80, 99 KiB; on an H100, 227 KiB.
    limit = {80: 99 << 10, 90: 227 << 10}[capability]
    for name in KERNELS:
        assert compile_kernel(name, geometry, capability).metadata.shared <= limit, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_four_decoding_programs_share_a_multiprocessor_and_load_ahead(head_dim, capability):
    compiled = compile_kernel(
        "attend_decodes", Geometry(torch.bfloat16, head_dim, group=4), capability
    )
    # An A100 has 164 KiB for all programs, and takes one more for each.
    assert 4 * (compiled.metadata.shared + (1 << 10)) <= 164 << 10
    # One wait before each product leaves at least the loads of a later block under way.
    waits = [int(num) for num in re.findall(r"async_wait.*num = (\d+)", compiled.asm["ttgir"])]
    assert max(waits) >= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", SAMPLER)
def test_the_samplers_kernels_compile(name, capability):
    assert compile_typed(name, SAMPLER[name], capability).metadata.shared <= 48 << 10


def test_tiles_cover_every_row_of_every_prompt_once_and_the_longest_come_first():
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
    """Return how rows with 8 KV heads are split on a GPU of 132 multiprocessors."""
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
def test_splits_cover_each_key_that_a_row_sees_once(kv_lens, scoring, first):
    table = table_of(kv_lens, **scoring)
    starts = table[: len(kv_lens) + 1, 3]
    for row, (begin, end) in enumerate(zip(first, kv_lens, strict=True)):
        own = table[starts[row] : starts[row + 1]]
        assert (own[:, 0] == row).all()
        assert (own[:, 1] < own[:, 2]).all()
        assert [own[0, 1], *own[:, 2]] == [begin, *own[1:, 1], end]
    assert (table[starts[-1] :, :3] == 0).all()


def test_a_lone_long_context_is_work_for_four_programs_on_each_multiprocessor():
    table = table_of([100_000])
    assert (table[:, 2] > table[:, 1]).sum() * 8 >= 0.95 * 4 * 132


def test_a_long_context_among_short_ones_is_shared_by_many_programs():
    table = table_of([1000] * 63 + [100_000])
    sizes = table[:, 2] - table[:, 1]
    assert sizes.max() <= 2500  # of 163000 keys, for 66 programs beside one for each row
    assert (table[:, 0] == 63).sum() >= 40


def test_a_full_batch_of_equal_lengths_and_short_contexts_are_not_split():
    for kv_lens in ([8000] * 256, [100] * 3):
        table = table_of(kv_lens)
        assert (table[:, 2] > table[:, 1]).sum() == len(kv_lens)


def test_a_table_has_no_more_lines_than_splits_that_are_worth_a_merge():
    splits = TritonAttention(132).splits(2, 8, 300, Scoring(1.0))
    assert splits.num_programs == 2 * 3
