"""Paged attention in plain torch for any device, type and feature; the reference for other backends.

It gathers the pages of a sequence and calls scaled_dot_product_attention. For decoding rows, grouped KV heads
are not expanded.
"""

import torch
from torch.nn import functional

from tandem.engine.attention.paged import LayerInputs, PagedBatch, Scoring

# Attention scores of latent layers that are computed at a time: 256 MiB in float32.
_MOST_SCORES = 1 << 26


class TorchAttention:
    """The reference backend."""

    name = "torch"

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V, then compute attention."""
        batch.write(layer)
        out = empty_output(layer)
        if batch.num_decodes:
            out[: batch.num_decodes] = _attend_decodes(layer, batch)
        attend_prompts(layer, batch, out)
        return out


def empty_output(layer: LayerInputs, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor, shape (num_rows, num_heads, value_dim). `dtype` defaults to the query's."""
    return layer.query.new_empty((*layer.query.shape[:2], layer.value.shape[-1]), dtype=dtype)


def attend_prompts(layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
    """Compute attention for the rows of all prompt chunks into `out`."""
    for sequence in attend_fresh(layer, batch, out):
        rows = rows_of(batch, sequence)
        query = layer.query[rows].transpose(0, 1)[None]  # (1, heads, rows, dim)
        out[rows] = _attend_chunk(layer, query, batch, sequence)[0].transpose(0, 1)


def attend_fresh(layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> list[int]:
    """Compute attention into `out` for chunks that are whole prompts, whose keys need not be read from pages.

    Returns:
        Sequence numbers of the remaining chunks.
    """
    scoring, chunks = layer.scoring, range(batch.num_decodes, len(batch.host_kv_lens))
    has_values = bool(batch.pool.layers[layer.index].value.shape[-1])  # latents have none
    is_plain = scoring == Scoring(scoring.scale) and layer.sinks is None and has_values
    if not is_plain or batch.dtype != layer.key.dtype:
        return list(chunks)
    remaining = []
    for sequence in chunks:
        rows = rows_of(batch, sequence)
        if rows.stop - rows.start < batch.host_kv_lens[sequence]:
            remaining.append(sequence)
            continue
        query, key, value = (
            part[rows].transpose(0, 1)[None] for part in (layer.query, layer.key, layer.value)
        )
        is_grouped = layer.key.shape[1] != layer.query.shape[1]
        out[rows] = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=is_grouped
        )[0].transpose(0, 1)
    return remaining


def rows_of(batch: PagedBatch, sequence: int) -> slice:
    """Return the rows of a sequence."""
    first, end = batch.host_query_starts[sequence : sequence + 2].tolist()
    return slice(first, end)


def _attend_chunk(
    layer: LayerInputs, query: torch.Tensor, batch: PagedBatch, sequence: int
) -> torch.Tensor:
    """Compute attention of one chunk over its pages. Shape (1, num_heads, num_rows, dim) in and out."""
    scoring, kv_len = layer.scoring, int(batch.host_kv_lens[sequence])
    pages = batch.page_table[sequence, : -(-kv_len // batch.page_size)]
    key, value = _gather(batch, sequence, pages, layer)
    key, value = key[None, :, :kv_len], value[None, :, :kv_len]
    mask = _prompt_mask(batch, sequence, query.shape[2], scoring)
    if not batch.pool.layers[layer.index].value.shape[-1]:
        return _attend_latents(query, key, value, mask, scoring)
    sinks = None if layer.sinks is None else layer.sinks.view(1, -1, 1, 1)
    return _attend(query, key, value, mask=mask, scoring=scoring, sinks=sinks)


def _attend_decodes(layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
    """Compute attention of one row per sequence. Shape (num_decodes, num_heads, value_dim).

    KV heads become the batch dimension, sequences the heads, and the query heads of a group the rows. So grouped
    KV is read once and not expanded.
    """
    num_decodes, (_, num_heads, key_dim) = batch.num_decodes, layer.query.shape
    width = -(-int(batch.host_kv_lens[:num_decodes].max()) // batch.page_size)
    table = batch.page_table[:num_decodes, :width]
    key, value = _gather(batch, "decode", table, layer)
    # Values beyond a sequence's end are stale and may be NaN, which a weight of 0 does not cancel.
    past_end = _past_end(batch, width * batch.page_size)
    key, value = key.masked_fill(past_end, 0), value.masked_fill(past_end, 0)
    grouped = layer.query[:num_decodes].reshape(num_decodes, len(key), -1, key_dim)
    grouped = grouped.transpose(0, 1)  # (kv heads, decodes, group, dim)
    mask = _decode_mask(batch, width * batch.page_size, layer.scoring)
    sinks = None if layer.sinks is None else layer.sinks.view(len(key), 1, -1, 1)
    result = _attend(grouped, key, value, mask=mask, scoring=layer.scoring, sinks=sinks)
    return result.transpose(0, 1).reshape(num_decodes, num_heads, -1)


def _gather(
    batch: PagedBatch, name: int | str, pages: torch.Tensor, layer: LayerInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy K and V of one layer out of the pool.

    Args:
        name: Identifies these pages in this batch, so that layers of the same size share the row numbers.
        pages: Shape (..., num_pages).

    Returns:
        Shape (num_kv_heads, ..., num_pages * page_size, key_dim), and likewise with value_dim.
    """
    view = batch.pool.layers[layer.index]
    key = _gather_plane(batch, name, pages, view.key, view.begin)
    if not view.value.shape[-1]:  # latents
        value = key[..., : layer.value.shape[-1]]
    else:
        value = _gather_plane(batch, name, pages, view.value, view.begin + view.key[0].numel())
    return key.to(layer.key.dtype), value.to(layer.key.dtype)


def _gather_plane(
    batch: PagedBatch, name: int | str, pages: torch.Tensor, plane: torch.Tensor, begin: int
) -> torch.Tensor:
    """Copy K or V of one layer, which starts at element `begin` of a page."""
    _, num_heads, page_size, dim = plane.shape

    def first_rows() -> torch.Tensor:
        # Rows of `KVPool.rows` start at multiples of the page size, and so do heads.
        heads = torch.arange(num_heads, device=pages.device).view(-1, *[1] * pages.dim())
        return pages.long() * (batch.pool.page_elements // page_size) + heads * dim

    first = batch.cached(("rows", name, num_heads, dim), first_rows)
    # Selecting whole rows is five times faster than indexing the plane.
    rows = first.flatten() + begin // page_size
    found = _select(batch.pool.rows(page_size * dim), rows)
    return found.view(*first.shape[:-1], -1, dim)


def _select(runs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if runs.dtype.itemsize > 1:
        return runs.index_select(0, rows)
    # index_select does not support eight-bit floats.
    return runs.view(torch.uint8).index_select(0, rows).view(runs.dtype)


def _prompt_mask(batch: PagedBatch, sequence: int, num_rows: int, scoring: Scoring) -> torch.Tensor:
    """Return which keys each row of a chunk may see. Shape (num_rows, kv_len)."""

    def mask() -> torch.Tensor:
        keys = torch.arange(int(batch.host_kv_lens[sequence]), device=batch.pool.device)
        return visible(keys[len(keys) - num_rows :].unsqueeze(1), keys, scoring)

    return batch.cached(("prompt", sequence, scoring.window, scoring.chunk), mask)


def _decode_mask(batch: PagedBatch, num_keys: int, scoring: Scoring) -> torch.Tensor:
    """Return which keys each decoding row may see. Shape (1, num_decodes, 1, num_keys)."""

    def mask() -> torch.Tensor:
        keys = torch.arange(num_keys, device=batch.pool.device)
        queries = (batch.kv_lens[: batch.num_decodes].long() - 1).unsqueeze(1)
        # The mask has four dimensions, because torch does not use its fast kernel with three.
        return visible(queries, keys, scoring)[None, :, None]

    return batch.cached(("decode", scoring.window, scoring.chunk), mask)


def _past_end(batch: PagedBatch, num_keys: int) -> torch.Tensor:
    """Return which keys are beyond the end of each decoding row's sequence. Shape (num_decodes, num_keys, 1)."""

    def past_end() -> torch.Tensor:
        keys = torch.arange(num_keys, device=batch.pool.device)
        return (keys >= batch.kv_lens[: batch.num_decodes, None]).unsqueeze(-1)

    return batch.cached("past end", past_end)


def visible(queries: torch.Tensor, keys: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return which queries may see which keys. Arguments are positions and are broadcast."""
    seen = keys <= queries
    if scoring.window is not None:
        seen = seen & (keys > queries - scoring.window)
    if scoring.chunk is not None:
        seen = seen & (keys // scoring.chunk == queries // scoring.chunk)
    return seen


def _attend_latents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Compute attention of a prompt's rows over K and V that all heads share, without a copy per head."""
    num_rows, kv_len = mask.shape
    outs = []
    for part in torch.split(query, max(1, _MOST_SCORES // (num_rows * kv_len)), dim=1):
        num_heads = part.shape[1]
        rows = part.reshape(1, 1, num_heads * num_rows, -1)
        seen = mask.repeat(num_heads, 1)
        out = functional.scaled_dot_product_attention(
            rows, key, value, attn_mask=seen, scale=scoring.scale
        )
        outs.append(out.view(1, num_heads, num_rows, -1))
    return torch.cat(outs, dim=1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention over gathered keys. `sinks` must broadcast to the scores, with a last dimension of 1."""
    is_grouped = query.shape[1] != key.shape[1]
    if scoring.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=is_grouped
        )
    if is_grouped:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, float("-inf")).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1).to(query.dtype)
    return weights[..., : key.shape[-2]] @ value
