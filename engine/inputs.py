"""From the requests of a batch to the numbers of a forward."""

import numpy as np

from tandem.engine.batcher import Chunk
from tandem.engine.forward import ForwardInputs, Ints
from tandem.engine.scheduler import Batch
from tandem.engine.slots import Slots


def forward_inputs(batch: Batch, slots: Slots, page_size: int) -> ForwardInputs:
    """Return the inputs of a forward: decoding requests first, then chunks.

    The rows of logits are those whose token is sampled, in that order, then those that prompt
    log-probabilities are read from, chunk by chunk.
    """
    rows = batch.rows
    lengths = slots.num_tokens[rows]
    decodes = ForwardInputs(
        token_ids=slots.last_token[rows],
        sources=np.where(slots.num_pending[rows] > 0, slots.source[rows], -1),
        positions=lengths - 1,
        query_starts=np.arange(len(rows) + 1, dtype=np.int32),
        kv_lens=lengths.astype(np.int32),
        page_table=slots.page_ids[rows, : _width(lengths, page_size)],
        num_decodes=len(rows),
        logit_rows=np.arange(len(rows)),
    )
    return decodes if not batch.chunks else _with_chunks(decodes, batch.chunks, slots, page_size)


def prompt_rows(chunk: Chunk) -> range:
    """Return the prompt positions whose log-probabilities this chunk's logits give.

    The logits at position p are of the token at p + 1; `num_computed` is that before the chunk.
    """
    wanted, active = chunk.request.request.logprobs, chunk.request
    if wanted is None or wanted.prompt_start < 0:
        return range(0)
    begin = max(active.num_computed + 1, wanted.prompt_start, active.told_until, 1)
    end = min(active.num_computed + chunk.num_tokens + 1, active.num_prompt)
    return range(begin, max(begin, end))


def _with_chunks(
    decodes: ForwardInputs, chunks: list[Chunk], slots: Slots, page_size: int
) -> ForwardInputs:
    begins = [chunk.request.num_computed for chunk in chunks]
    sizes = [chunk.num_tokens for chunk in chunks]
    ends = _ints(begins) + sizes
    starts = decodes.num_rows + np.concatenate([[0], np.cumsum(sizes)])
    token_ids = [
        chunk.request.token_ids[begin : begin + size]
        for chunk, begin, size in zip(chunks, begins, sizes, strict=True)
    ]
    last_rows = [
        start - 1 for start, chunk in zip(starts[1:], chunks, strict=True) if chunk.is_last
    ]
    told_rows = [
        np.arange(positions.start, positions.stop) - 1 - begin + start
        for positions, begin, start in zip(map(prompt_rows, chunks), begins, starts, strict=False)
    ]
    width = max(_width(ends, page_size), decodes.page_table.shape[1])
    rows = np.array([chunk.request.slot for chunk in chunks])
    table = np.zeros((decodes.num_decodes, width), np.int32)
    table[:, : decodes.page_table.shape[1]] = decodes.page_table
    return ForwardInputs(
        token_ids=np.concatenate([decodes.token_ids, *map(_ints, token_ids)]),
        sources=np.concatenate([decodes.sources, np.full(sum(sizes), -1)]),
        positions=np.concatenate(
            [decodes.positions, *(np.arange(a, b) for a, b in zip(begins, ends, strict=True))]
        ),
        query_starts=np.concatenate([decodes.query_starts[:-1], starts]).astype(np.int32),
        kv_lens=np.concatenate([decodes.kv_lens, ends]).astype(np.int32),
        page_table=np.concatenate([table, slots.page_ids[rows, :width]]),
        num_decodes=decodes.num_decodes,
        logit_rows=np.concatenate([decodes.logit_rows, _ints(last_rows), *told_rows]),
    )


def _width(lengths: Ints, page_size: int) -> int:
    return -(-int(lengths.max(initial=0)) // page_size)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)
