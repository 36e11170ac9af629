"""Cases for every attention backend, and the comparison with the reference."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tandem.engine.attention.paged import (
    AttentionBackend,
    GraphBackend,
    LayerInputs,
    PagedBatch,
    Scoring,
)
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.pages.pool import KVPool
from tandem.engine.shape import ModelShape
from tandem.wire.hand_off import LayerKV

NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    """Sequences of one forward: (keys, rows of this forward) each, decoding ones first."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    has_sinks: bool = False
    has_rotary: bool = False
    value_dim: int | None = None  # None: as head_dim; 0: V is a part of K
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    fill: float = torch.nan  # value of the pool's slots that hold no key of the forward

    @property
    def num_decodes(self) -> int:
        return sum(rows == 1 for _, rows in self.sequences)

    @property
    def own_value_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


DECODES = ((1, 1), (3, 1), (4, 1), (5, 1), (23, 1))
PROMPTS = ((7, 7), (1 + 8, 8), (30, 3), (40, 37))
MIXED = ((9, 1), (33, 1), (21, 21), (50, 2))
FP8 = torch.float8_e4m3fn

CASES = {
    "one row": Case(((1, 1),)),
    "decodes at page borders": Case(DECODES),
    "decodes with a window": Case(DECODES, window=3),
    "decodes with a softcap": Case(DECODES, softcap=2.0),
    "decodes of group 1": Case(DECODES, num_kv_heads=4),
    "decodes of group 3": Case(DECODES, num_heads=9, num_kv_heads=3),
    "decodes of group 8": Case(DECODES, num_heads=8, num_kv_heads=1),
    "a head dim that is no power of two": Case(MIXED, head_dim=24),
    "long decodes in splits": Case(((1200, 1), (2, 1)), num_heads=2, num_kv_heads=1, page_size=16),
    "long decodes in splits, window": Case(
        ((1200, 1), (700, 1), (5, 1)), num_heads=2, num_kv_heads=1, page_size=16, window=600
    ),
    "prompts with cached prefixes": Case(PROMPTS),
    "prompts with a window": Case(PROMPTS, window=5),
    "prompts with a softcap": Case(PROMPTS, softcap=2.0),
    "prompts of group 3": Case(PROMPTS, num_heads=6),
    "prompts of group 8": Case(PROMPTS, num_heads=8, num_kv_heads=1),
    "a prompt of several tiles": Case(((300, 200),), num_heads=2, num_kv_heads=1, page_size=16),
    "decodes and prompts": Case(MIXED),
    "sinks": Case(MIXED, has_sinks=True),
    "sinks with a window": Case(MIXED, has_sinks=True, window=5),
    "a long decode among short ones": Case(
        ((5, 1), (5000, 1), (130, 1), (1, 1)), num_heads=2, num_kv_heads=1, page_size=16
    ),
    "sinks of long decodes in splits": Case(
        ((1200, 1), (2, 1)), num_heads=2, num_kv_heads=1, page_size=16, has_sinks=True
    ),
    "sinks, bfloat16": Case(MIXED, has_sinks=True, dtype=torch.bfloat16),
    "decodes within chunks": Case(DECODES, chunk=8),
    "prompts within chunks": Case(PROMPTS, chunk=8),
    "long decodes in splits, chunks": Case(
        ((1200, 1), (1025, 1)), num_heads=2, num_kv_heads=1, page_size=16, chunk=512
    ),
    "V smaller than K": Case(MIXED, value_dim=8),
    "V larger than K": Case(MIXED, value_dim=24),
    "V a part of K": Case(MIXED, num_kv_heads=1, value_dim=0),
    "V a part of K, bfloat16": Case(MIXED, num_kv_heads=1, value_dim=0, dtype=torch.bfloat16),
    "rotated": Case(MIXED, num_heads=36, num_kv_heads=18, head_dim=24, has_rotary=True),
    "rotated, bfloat16": Case(MIXED, has_rotary=True, dtype=torch.bfloat16),
    "rotated, fp8 pool": Case(MIXED, has_rotary=True, kv_dtype=FP8),
    "bfloat16": Case(MIXED, dtype=torch.bfloat16),
    "float16": Case(MIXED, dtype=torch.float16),
    "fp8 pool, float32": Case(MIXED, kv_dtype=FP8),
    "fp8 pool, bfloat16": Case(MIXED, dtype=torch.bfloat16, kv_dtype=FP8),
}


def shape_of(layers: tuple[LayerKV, ...]) -> ModelShape:
    """Return the shape of a float32 model with these KV layers."""
    return ModelShape(
        num_layers=len(layers),
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        context_length=1,
        eos_token_ids=frozenset(),
        dtype="float32",
        kv_dtype="float32",
        fingerprint="",
        layers=layers,
    )


def tolerance(case: Case) -> float:
    """Return the largest allowed difference; outputs are averages of values around 1.

    Reference and backend read the same pool, even in e4m3. They differ only in the rounding of the
    compute type: bfloat16 has 8 bits of precision, float16 has 11.
    """
    return {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[case.dtype]


def make(case: Case, backend: AttentionBackend, device: str) -> tuple[LayerInputs, PagedBatch]:
    """Return seeded inputs; the pool holds the earlier keys of each sequence."""
    random = torch.Generator().manual_seed(1)
    lens = np.array([keys for keys, _ in case.sequences], np.int32)
    counts = [rows for _, rows in case.sequences]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    widths = -(-lens // case.page_size)
    order = torch.randperm(int(widths.sum()) + 3, generator=random)[3:].numpy()
    table = np.zeros((len(lens), int(widths.max())), np.int32)
    pages = np.split(order, np.cumsum(widths)[:-1])
    kv_layer = LayerKV(case.num_kv_heads, case.head_dim, case.own_value_dim)
    shape = shape_of((kv_layer,) * NUM_LAYERS)
    elements = case.page_size * shape.kv_bytes_per_token // 4
    pool = KVPool(torch.full((len(order) + 3, elements), case.fill), shape, case.page_size)
    positions, write_pages = [], []
    for row, (own, (keys, rows)) in enumerate(zip(pages, case.sequences, strict=True)):
        table[row, : len(own)] = own
        for position in range(keys - rows):
            for view in pool.layers:
                for plane in (view.key, view.value):
                    at = plane[own[position // case.page_size], :, position % case.page_size]
                    at[:] = torch.randn(at.shape, generator=random)
        positions += range(keys - rows, keys)
        write_pages += [own[p // case.page_size] for p in range(keys - rows, keys)]

    def rows_of(num_heads: int, dim: int) -> torch.Tensor:
        # The memory layout of models: heads first.
        made = torch.randn((num_heads, len(positions), dim), generator=random)
        return made.to(case.dtype).to(device).transpose(0, 1)

    scoring = Scoring(case.head_dim**-0.5, case.window, case.softcap, case.chunk)
    query, key = (rows_of(num, case.head_dim) for num in (case.num_heads, case.num_kv_heads))
    if case.own_value_dim:
        value = rows_of(case.num_kv_heads, case.own_value_dim)
    else:
        value = key[..., : case.head_dim // 2]
    sinks = torch.randn(case.num_heads, generator=random).to(case.dtype).to(device)
    layer = LayerInputs(LAYER, query, key, value, scoring, sinks if case.has_sinks else None)
    if case.has_rotary:  # as if halves had angles of their own
        cos, sin = torch.randn(2, len(positions), case.head_dim, generator=random).to(case.dtype)
        layer.rotary = cos.to(device), sin.to(device)
    pages_of = pool.pages.to(case.kv_dtype or case.dtype).to(device)
    batch = PagedBatch(
        backend=backend,
        pool=KVPool(pages_of, shape, case.page_size),
        num_decodes=case.num_decodes,
        page_table=torch.from_numpy(table).to(device),
        kv_lens=torch.from_numpy(lens).to(device),
        write_pages=torch.tensor(np.array(write_pages), dtype=torch.int64, device=device),
        write_offsets=torch.tensor(positions, dtype=torch.int64, device=device) % case.page_size,
        host_page_table=table,
        host_kv_lens=lens,
        host_query_starts=starts,
    )
    return layer, batch


def clear_nan(batch: PagedBatch) -> None:
    """Replace NaN in the pool by zeros, in place."""
    pages = batch.pool.pages
    pages.copy_(pages.float().nan_to_num(0.0).to(pages.dtype))


def error(
    case: Case,
    backend: AttentionBackend,
    device: str = "cpu",
    *,
    behind: Case | None = None,
    recorded: Case | None = None,
) -> float:
    """Return the largest difference of the output to the reference; infinity if the pools differ.

    Args:
        behind: Case of a layer that precedes this one in the same forward.
        recorded: Case of decoding rows at which a graph was recorded, of the same shapes. This forward replays it.
    """
    scratch = {}
    for earlier in filter(None, (behind, recorded)):
        layer, batch = make(earlier, backend, device)
        backend.attend(layer, batch)
        scratch = batch.scratch
    layer, batch = make(case, backend, device)
    batch.scratch = scratch
    if recorded is not None:
        assert isinstance(backend, GraphBackend)
        backend.prepare(batch)
    got = backend.attend(layer, batch)
    layer, reference = make(case, TorchAttention(), "cpu")
    # The reference also multiplies masked values.
    clear_nan(reference)
    expected = reference.backend.attend(layer, reference)
    written = batch.pool.pages.cpu().float().nan_to_num(0.0)
    # A GPU multiplies and adds angles in one step, which rounds once.
    is_near = torch.equal if not case.has_rotary else partial(torch.allclose, atol=tolerance(case))
    if not is_near(written, reference.pool.pages.float()):
        return float("inf")
    difference = (got.cpu().float() - expected.float()).abs()
    return float(difference.nan_to_num(torch.inf).max())
