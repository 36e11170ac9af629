"""Attention over paged KV, as a function that transformers' models call.

Registered under `NAME` with `AttentionInterface` and, returning no mask, with
`AttentionMaskInterface`. This is the reference in plain torch: it gathers a request's pages and
calls scaled_dot_product_attention. Grouped heads are never expanded for decoding rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "tandem_paged"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns queries and keys into weights.

    Attributes:
        scaling: Of the scores; 1/sqrt(head_dim) when None.
        window: Keys a query sees, itself included; all when None.
        softcap: Scores are bounded to ± this by tanh, as in Gemma 2; unbounded when None.
    """

    scaling: float | None
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Rows of one request with more than one query token.

    Attributes:
        start: First row in the batch.
        num_rows: Query tokens.
        kv_len: Keys, the queries' own included.
        rows: Where the keys' pages are, see `head_rows`. Shape (num_kv_heads, pages).
    """

    start: int
    num_rows: int
    kv_len: int
    rows: torch.Tensor


@dataclass(slots=True)
class PagedBatch:
    """Where the rows of one forward read and write KV.

    Attributes:
        kv: The pool. Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim).
        write_pages, write_offsets: Where each row's KV goes. Shape (num_rows,).
        prompts: Requests with several rows.
        decode_rows: Rows that are one request each. Shape (num_decodes,).
        decode_kv_rows: Where their pages are, padded with page 0, see `head_rows`.
            Shape (num_kv_heads, num_decodes, max_pages).
        kv_lens: Their number of keys. Shape (num_decodes,).
    """

    kv: torch.Tensor
    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    prompts: Sequence[PromptSpan]
    decode_rows: torch.Tensor
    decode_kv_rows: torch.Tensor
    kv_lens: torch.Tensor
    _masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv.shape[4]

    def prompt_mask(self, span: PromptSpan, window: int | None) -> torch.Tensor:
        """Return which keys each query of a prompt may see. Shape (num_rows, kv_len)."""
        found = self._masks.get((span.start, window))
        if found is None:
            keys = torch.arange(span.kv_len, device=self.kv.device)
            queries = keys[span.kv_len - span.num_rows :].unsqueeze(1)
            found = self._masks[span.start, window] = _visible(queries, keys, window)
        return found

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """Return which keys each decoding row may see. Shape (1, num_decodes, 1, padded keys)."""
        found = self._masks.get((-1, window))
        if found is None:
            num_keys = self.decode_kv_rows.shape[-1] * self.page_size
            keys = torch.arange(num_keys, device=self.kv.device)
            queries = (self.kv_lens - 1).unsqueeze(1)
            # Four dimensions: with three, torch leaves its fast kernel.
            found = self._masks[-1, window] = _visible(queries, keys, window)[None, :, None]
        return found

    def gather(self, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of one layer out of the pool.

        Args:
            rows: As of `head_rows`. Shape (num_kv_heads, ..., pages).

        Returns:
            Two tensors of shape (num_kv_heads, ..., pages * page_size, head_dim).
        """
        _, _, _, num_heads, page_size, head_dim = self.kv.shape
        runs = self.kv.view(-1, page_size * head_dim)
        shape = (*rows.shape[:-1], -1, head_dim)
        # Whole rows by index_select: five times as fast as indexing the six-dimensional pool.
        first = rows.flatten() + 2 * layer * num_heads
        key, value = (runs.index_select(0, first + which * num_heads) for which in (0, 1))
        return key.view(shape), value.view(shape)


def head_rows(kv: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
    """Return where pages begin, for each KV head, in the pool seen as runs of one head.

    Args:
        kv: The pool. Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim).
        page_ids: Shape (..., pages).

    Returns:
        Rows of layer 0's K in `kv.view(-1, page_size * head_dim)`; `2 * layer * num_kv_heads`
        further is another layer, `num_kv_heads` further V. Shape (num_kv_heads, ..., pages).
    """
    _, num_layers, _, num_heads, _, _ = kv.shape
    heads = torch.arange(num_heads, device=kv.device).view(-1, *[1] * page_ids.dim())
    return page_ids * (num_layers * 2 * num_heads) + heads


def _visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Write this layer's K and V into the pool and attend over it.

    Args:
        module: The attention module; `layer_idx` names the layer.
        query: Shape (1, num_heads, num_rows, head_dim), after rotary embedding.
        key, value: Shape (1, num_kv_heads, num_rows, head_dim).
        attention_mask: Always None: masks come from the batch.
        scaling, sliding_window, softcap: See `Scoring`.

    Returns:
        The output, shape (1, num_rows, num_heads, head_dim), and no weights.
    """
    del attention_mask
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch, scoring = paged_batch, Scoring(scaling, sliding_window, softcap)
    keys, values = batch.kv[:, layer, 0], batch.kv[:, layer, 1]  # (pages, kv heads, tokens, dim)
    keys[batch.write_pages, :, batch.write_offsets] = key[0].transpose(0, 1)
    values[batch.write_pages, :, batch.write_offsets] = value[0].transpose(0, 1)
    out = torch.empty_like(query[0].transpose(0, 1))  # (num_rows, num_heads, head_dim)
    for span in batch.prompts:
        rows = slice(span.start, span.start + span.num_rows)
        known_keys, known_values = batch.gather(span.rows, layer)
        result = _attend(
            query[:, :, rows],
            known_keys[None, :, : span.kv_len],
            known_values[None, :, : span.kv_len],
            batch.prompt_mask(span, sliding_window),
            scoring,
        )
        out[rows] = result[0].transpose(0, 1)
    if len(batch.decode_rows):
        out[batch.decode_rows] = _attend_decodes(
            query[0][:, batch.decode_rows], layer, batch, scoring
        )
    return out.unsqueeze(0), None


def _attend_decodes(
    query: torch.Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> torch.Tensor:
    """Attend with one query for each request.

    A KV head is the batch, a request is a head and the query heads of a group are its rows: so
    grouped KV is read once and never expanded.

    Args:
        query: Shape (num_heads, num_decodes, head_dim).

    Returns:
        Shape (num_decodes, num_heads, head_dim).
    """
    num_heads, num_decodes, head_dim = query.shape
    keys, values = batch.gather(batch.decode_kv_rows, layer)
    grouped = query.view(len(keys), -1, num_decodes, head_dim).transpose(1, 2)
    # (kv heads, decodes, group, dim)
    result = _attend(grouped, keys, values, batch.decode_mask(scoring.window), scoring)
    return result.permute(1, 0, 2, 3).reshape(num_decodes, num_heads, head_dim)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    if scoring.softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scaling, enable_gqa=is_grouped
        )
    if is_grouped:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    scores = torch.tanh(query @ key.transpose(-1, -2) * scale / scoring.softcap) * scoring.softcap
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(dim=-1).to(query.dtype)
    return weights @ value


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Tell transformers that no mask is to be built."""


def register() -> str:
    """Make the attention known to transformers; return the name to load models with."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME
