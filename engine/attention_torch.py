"""Paged attention in plain torch, for any device and type: the reference that others are held to.

It gathers a sequence's pages and calls scaled_dot_product_attention. Grouped heads are never
expanded for decoding rows.
"""

import torch
from torch.nn import functional

from engine.attention import LayerInputs, PagedBatch, Scoring


class TorchAttention:
    """The reference backend."""

    name = "torch"

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch.write(layer)
        out = torch.empty(layer.query.shape, dtype=layer.query.dtype, device=layer.query.device)
        if batch.num_decodes:
            out[: batch.num_decodes] = _attend_decodes(layer, batch)
        attend_prompts(layer, batch, out)
        return out


def attend_prompts(layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
    """Attend with the rows of every chunk of a prompt.

    Args:
        out: Their rows are filled. Shape (num_rows, num_heads, head_dim).
    """
    starts = batch.host_query_starts
    for sequence in range(batch.num_decodes, len(batch.host_kv_lens)):
        rows = slice(int(starts[sequence]), int(starts[sequence + 1]))
        query = layer.query[rows].transpose(0, 1)[None]  # (1, heads, rows, dim)
        result = _attend_whole(layer, rows, query, batch, sequence)
        out[rows] = result[0].transpose(0, 1)


def _attend_whole(
    layer: LayerInputs, rows: slice, query: torch.Tensor, batch: PagedBatch, sequence: int
) -> torch.Tensor:
    """Attend with the rows of one chunk. Shape (1, num_heads, num_rows, head_dim) in and out."""
    scoring, kv_len = layer.scoring, int(batch.host_kv_lens[sequence])
    num_rows = rows.stop - rows.start
    is_plain = scoring.window is None and scoring.softcap is None
    if num_rows == kv_len and is_plain and batch.kv.dtype == layer.key.dtype:
        # A whole prompt: its keys are at hand, and need not be read back from the pages.
        return functional.scaled_dot_product_attention(
            query,
            layer.key[rows].transpose(0, 1)[None],
            layer.value[rows].transpose(0, 1)[None],
            is_causal=True,
            scale=scoring.scale,
            enable_gqa=layer.key.shape[1] != layer.query.shape[1],
        )
    pages = batch.page_table[sequence, : -(-kv_len // batch.page_size)]
    key, value = _gather(batch, sequence, pages, layer)
    mask = _prompt_mask(batch, sequence, num_rows, scoring.window)
    return _attend(query, key[None, :, :kv_len], value[None, :, :kv_len], mask, scoring)


def _attend_decodes(layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
    """Attend with one row for each sequence.

    A KV head is the batch, a sequence is a head and the query heads of a group are its rows: so
    grouped KV is read once and never expanded.

    Returns:
        Shape (num_decodes, num_heads, head_dim).
    """
    num_decodes, (_, num_heads, head_dim) = batch.num_decodes, layer.query.shape
    width = -(-int(batch.host_kv_lens[:num_decodes].max()) // batch.page_size)
    table = batch.page_table[:num_decodes, :width]
    key, value = _gather(batch, "decode", table, layer)
    grouped = layer.query[:num_decodes].reshape(num_decodes, len(key), -1, head_dim)
    grouped = grouped.transpose(0, 1)  # (kv heads, decodes, group, dim)
    mask = _decode_mask(batch, width * batch.page_size, layer.scoring.window)
    result = _attend(grouped, key, value, mask, layer.scoring)
    return result.transpose(0, 1).reshape(num_decodes, num_heads, head_dim)


def _gather(
    batch: PagedBatch, name: int | str, pages: torch.Tensor, layer: LayerInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy K and V of one layer out of the pool.

    Args:
        name: Of these pages in this batch: where they begin is worked out once for all layers.
        pages: Shape (..., num_pages).

    Returns:
        Two tensors of shape (num_kv_heads, ..., num_pages * page_size, head_dim).
    """
    _, num_layers, _, num_heads, page_size, head_dim = batch.kv.shape
    rows: torch.Tensor | None = batch.scratch.get(("rows", name))
    if rows is None:
        heads = torch.arange(num_heads, device=pages.device).view(-1, *[1] * pages.dim())
        rows = pages.long() * (num_layers * 2 * num_heads) + heads
        batch.scratch["rows", name] = rows
    runs = batch.kv.view(-1, page_size * head_dim)
    # Whole rows by index_select: five times as fast as indexing the six-dimensional pool.
    first = rows.flatten() + 2 * layer.index * num_heads
    shape = (*rows.shape[:-1], -1, head_dim)
    key, value = (_select(runs, first + which * num_heads) for which in (0, 1))
    return key.view(shape).to(layer.key.dtype), value.view(shape).to(layer.key.dtype)


def _select(runs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if runs.dtype.itemsize > 1:
        return runs.index_select(0, rows)
    # index_select knows no eight-bit floats.
    return runs.view(torch.uint8).index_select(0, rows).view(runs.dtype)


def _prompt_mask(
    batch: PagedBatch, sequence: int, num_rows: int, window: int | None
) -> torch.Tensor:
    """Return which keys each row of a chunk may see. Shape (num_rows, kv_len)."""
    found: torch.Tensor | None = batch.scratch.get(("prompt", sequence, window))
    if found is None:
        keys = torch.arange(int(batch.host_kv_lens[sequence]), device=batch.kv.device)
        queries = keys[len(keys) - num_rows :].unsqueeze(1)
        batch.scratch["prompt", sequence, window] = found = _visible(queries, keys, window)
    return found


def _decode_mask(batch: PagedBatch, num_keys: int, window: int | None) -> torch.Tensor:
    """Return which keys each decoding row may see. Shape (1, num_decodes, 1, num_keys)."""
    found: torch.Tensor | None = batch.scratch.get(("decode", window))
    if found is None:
        keys = torch.arange(num_keys, device=batch.kv.device)
        queries = (batch.kv_lens[: batch.num_decodes].long() - 1).unsqueeze(1)
        # Four dimensions: with three, torch leaves its fast kernel.
        found = _visible(queries, keys, window)[None, :, None]
        batch.scratch["decode", window] = found
    return found


def _visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


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
            query, key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=is_grouped
        )
    if is_grouped:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scoring.scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(dim=-1).to(query.dtype)
    return weights @ value
