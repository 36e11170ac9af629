"""A forward: its requests, their parameters by slot, and its input arrays.

The arrays (`ForwardInputs`) do not refer to requests, so they can be sent to other ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.engine.scheduling.request import ActiveRequest

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

OnLayerWritten = Callable[[int], None]
"""Called with a layer's number once its K and V are in the pool."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of a prompt, starting at `begin`.

    Attributes:
        is_last: Whether the request's next token is sampled after this chunk.
        logprob_positions: Prompt positions whose log-probabilities come from this chunk's logits. The logits at
            position p are for the token at p + 1.
    """

    request: ActiveRequest
    begin: int
    num_tokens: int
    is_last: bool
    logprob_positions: range

    @classmethod
    def next_of(cls, request: ActiveRequest, num_tokens: int, num_logprobs: int) -> "Chunk":
        """Return a chunk of the next uncomputed tokens: `num_tokens`, or fewer for at most `num_logprobs` positions."""
        begin, logprobs = request.num_computed, request.request.logprobs
        logprob_positions = range(0)
        if logprobs is not None and logprobs.prompt_start >= 0:
            first = max(begin + 1, logprobs.prompt_start, request.logprobs_until)
            if request.num_prompt > first + num_logprobs:
                num_tokens = min(num_tokens, first + num_logprobs - begin - 1)
            end = min(begin + num_tokens + 1, request.num_prompt)
            logprob_positions = range(first, max(first, end))
        return cls(
            request, begin, num_tokens, num_tokens == request.num_uncomputed, logprob_positions
        )

    @property
    def end(self) -> int:
        """Number of the request's tokens whose KV is computed after this chunk."""
        return self.begin + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of a forward.

    Attributes:
        decodes: Requests that decode one token each.
        rows: Slots of `decodes`. Shape (len(decodes),).
        chunks: Parts of prompts.
    """

    decodes: list[ActiveRequest]
    rows: Ints
    chunks: list[Chunk]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def participants(self) -> list[ActiveRequest]:
        """Return all requests of the batch."""
        return self.decodes + [chunk.request for chunk in self.chunks]

    def sampled(self) -> list[ActiveRequest]:
        """Return the requests whose next token the forward samples, in the order of its rows."""
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.is_last]

    def sampled_rows(self) -> Ints:
        """Return the slots of the requests in `sampled`."""
        last = [chunk.request.slot for chunk in self.chunks if chunk.is_last]
        return np.concatenate([self.rows, np.array(last, np.int64)]) if last else self.rows


class Slots:
    """Parameters of requests with pages, stored in columns so that a step takes only a few array operations.

    A slot is one row of all columns. State that changes with every token is here, not in `ActiveRequest`.

    Attributes:
        page_ids: Pages in order, padded with stale page ids. Shape (num_slots, max_pages).
        num_pages: Shape (num_slots,), as for all columns below.
        num_tokens: Known tokens plus sampled tokens that the host has not read yet.
        max_tokens: Length at which generation ends; 0 in a free slot.
        last_token: Valid if `num_pending` is 0.
        num_pending: Sampled tokens that the host has not read yet.
        source: Row in the newest forward's sampled ids; valid if `num_pending` is not 0.
        next_index: Index of the token that the next forward samples.
        stops_at_eos: Whether an end-of-sequence token ends the request.
        penalties: Repetition, frequency and presence penalty. Shape (3, num_slots).
        is_penalized: Whether any penalty has an effect.
        min_new_tokens: 0 for a request with a grammar, which itself determines where the text may end.
        penalty_row: Row in `Penalties`; -1 for a request that needs none.
        is_fresh: Whether no token was sampled for the request since it got the slot.
        has_grammar: Whether a grammar masks the logits, which requires the previous token on the host.
        awaits_mask: Whether the mask of the next token is not available, so that the request sits out.
        has_stop_tokens: Whether the request has stop token ids.
    """

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.page_ids = np.zeros((num_slots, max_pages), np.int32)
        self.num_pages = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.num_pending = np.zeros(num_slots, np.int64)
        self.source = np.zeros(num_slots, np.int64)
        self.next_index = np.zeros(num_slots, np.int64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.zeros(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float32)
        self.stops_at_eos = np.zeros(num_slots, np.bool_)
        self.penalties = np.zeros((3, num_slots))
        self.is_penalized = np.zeros(num_slots, np.bool_)
        self.min_new_tokens = np.zeros(num_slots, np.int64)
        self.penalty_row = np.full(num_slots, -1)
        self.is_fresh = np.zeros(num_slots, np.bool_)
        self.has_grammar = np.zeros(num_slots, np.bool_)
        self.awaits_mask = np.zeros(num_slots, np.bool_)
        self.has_stop_tokens = np.zeros(num_slots, np.bool_)
        self._free = list(range(num_slots - 1, -1, -1))
        # The row released last is reused first, which keeps the number of used rows low.
        self._free_penalty_rows = self._free.copy()

    @property
    def num_used(self) -> int:
        """Number of slots in use."""
        return len(self.num_pages) - len(self._free)

    @property
    def has_free(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def take(self, active: ActiveRequest) -> None:
        """Assign a slot to a request with pages, and fill its columns."""
        active.slot = slot = self._free.pop()
        sampling = active.request.sampling
        self.num_pages[slot] = 0
        self.add_pages(active, active.page_ids)
        self.num_tokens[slot] = len(active.token_ids)
        self.max_tokens[slot] = active.num_prompt if active.is_prompt_only else active.max_tokens
        self.last_token[slot] = active.token_ids[-1]
        self.num_pending[slot] = 0
        self.next_index[slot] = active.next_index
        self.seed[slot] = active.seed % 2**64
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k if sampling.top_k > 0 else np.iinfo(np.int64).max
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.stops_at_eos[slot] = not sampling.ignore_eos
        penalties = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        self.penalties[:, slot] = penalties
        self.is_penalized[slot] = penalties != (1.0, 0.0, 0.0)
        self.min_new_tokens[slot] = sampling.min_new_tokens if sampling.grammar is None else 0
        needs_row = bool(
            self.is_penalized[slot] or sampling.logit_bias or self.min_new_tokens[slot] > 0
        )
        self.penalty_row[slot] = self._free_penalty_rows.pop() if needs_row else -1
        self.is_fresh[slot] = True
        self.has_grammar[slot] = sampling.grammar is not None
        self.awaits_mask[slot] = active.grammar is not None and not active.grammar.has_mask
        self.has_stop_tokens[slot] = bool(sampling.stop_token_ids)

    def release(self, active: ActiveRequest) -> None:
        """Free a request's slot."""
        self.max_tokens[active.slot] = self.num_tokens[active.slot] = 0
        self._free.append(active.slot)
        if (row := int(self.penalty_row[active.slot])) >= 0:
            self._free_penalty_rows.append(row)
        active.slot = -1

    def add_pages(self, active: ActiveRequest, page_ids: list[int]) -> None:
        """Append pages to a request's row of `page_ids`."""
        slot, start = active.slot, int(self.num_pages[active.slot])
        self.page_ids[slot, start : start + len(page_ids)] = page_ids
        self.num_pages[slot] += len(page_ids)

    def record_launch(self, rows: Ints) -> None:
        """Record that a launched forward samples a token for each of these slots, in this order."""
        self.num_tokens[rows] += 1
        self.next_index[rows] += 1
        self.num_pending[rows] += 1
        self.source[rows] = np.arange(len(rows))
        self.is_fresh[rows] = False

    def record_first_token(self, active: ActiveRequest, first_token: int) -> None:
        """Record the first token and the seed that a different node chose."""
        slot = active.slot
        self.seed[slot] = active.seed % 2**64
        self.num_tokens[slot] += 1
        self.next_index[slot] += 1
        self.last_token[slot] = first_token


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The rows of a forward, grouped by sequence, in host memory.

    The first `num_decodes` sequences have one row each, so their row and sequence numbers are equal. The others
    are chunks of prompts.

    Attributes:
        token_ids: Shape (num_rows,). Ignored where `sources` is not -1.
        sources: Index of the row's token in the sampled ids of the previous forward, which the host may not have
            read yet; -1 where `token_ids` has the token. Shape (num_rows,).
        positions: Shape (num_rows,).
        query_starts: First row of each sequence, then the number of rows. Shape (num_seqs + 1,).
        kv_lens: Number of keys of each sequence, including those of this forward. Shape (num_seqs,).
        page_table: Pages of each sequence in order; entries beyond its length are arbitrary valid page ids. As wide
            as the longest sequence needs. Shape (num_seqs, max_pages).
        logit_rows: Rows whose logits are returned. Shape (num_logits,).
    """

    token_ids: Ints
    sources: Ints
    positions: Ints
    query_starts: Ints32
    kv_lens: Ints32
    page_table: Ints32
    num_decodes: int
    logit_rows: Ints

    @property
    def num_rows(self) -> int:
        """Number of tokens that the forward computes."""
        return len(self.token_ids)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has one row."""
        return self.num_decodes == len(self.kv_lens)

    def write_pages(self, page_size: int) -> Ints:
        """Return the page that each row's K and V are written to. Shape (num_rows,)."""
        lengths = np.diff(self.query_starts)
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        return self.page_table[sequences, self.positions // page_size].astype(np.int64)


def forward_inputs(batch: Batch, slots: Slots, page_size: int) -> ForwardInputs:
    """Return the inputs of a forward: first decoding requests, then chunks.

    `logit_rows` has the rows to sample from, in the order of `Batch.sampled`, followed by the rows for prompt
    log-probabilities, chunk by chunk.
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


def _with_chunks(
    decodes: ForwardInputs, chunks: list[Chunk], slots: Slots, page_size: int
) -> ForwardInputs:
    sizes = [chunk.num_tokens for chunk in chunks]
    ends = _ints([chunk.end for chunk in chunks])
    starts = decodes.num_rows + np.concatenate([[0], np.cumsum(sizes)])
    token_ids = [chunk.request.token_ids[chunk.begin : chunk.end] for chunk in chunks]
    last_rows = [
        start - 1 for start, chunk in zip(starts[1:], chunks, strict=True) if chunk.is_last
    ]
    logprob_rows = [
        np.arange(chunk.logprob_positions.start, chunk.logprob_positions.stop)
        - 1
        - chunk.begin
        + start
        for chunk, start in zip(chunks, starts, strict=False)
    ]
    width = max(_width(ends, page_size), decodes.page_table.shape[1])
    rows = np.array([chunk.request.slot for chunk in chunks])
    table = np.zeros((decodes.num_decodes, width), np.int32)
    table[:, : decodes.page_table.shape[1]] = decodes.page_table
    return ForwardInputs(
        token_ids=np.concatenate([decodes.token_ids, *map(_ints, token_ids)]),
        sources=np.concatenate([decodes.sources, np.full(sum(sizes), -1)]),
        positions=np.concatenate(
            [decodes.positions, *(np.arange(chunk.begin, chunk.end) for chunk in chunks)]
        ),
        query_starts=np.concatenate([decodes.query_starts[:-1], starts]).astype(np.int32),
        kv_lens=np.concatenate([decodes.kv_lens, ends]).astype(np.int32),
        page_table=np.concatenate([table, slots.page_ids[rows, :width]]),
        num_decodes=decodes.num_decodes,
        logit_rows=np.concatenate([decodes.logit_rows, _ints(last_rows), *logprob_rows]),
    )


def _width(lengths: Ints, page_size: int) -> int:
    return -(-int(lengths.max(initial=0)) // page_size)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)
