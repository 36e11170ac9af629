"""One forward: its requests, their parameters by slot, and the input arrays of a rank.

The arrays (`ForwardInputs`) do not refer to requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.engine.request import ActiveRequest

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

Wrote = Callable[[int], None]
"""Called with a layer's number once its K and V are in the pool."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt, starting at `begin`.

    Attributes:
        is_last: Whether the request's next token is sampled after this chunk.
        told: Prompt positions whose log-probabilities this chunk's logits give. The logits at position p
            are for the token at p + 1.
    """

    request: ActiveRequest
    begin: int
    num_tokens: int
    is_last: bool
    told: range

    @classmethod
    def next_of(cls, request: ActiveRequest, num_tokens: int) -> "Chunk":
        """Return a chunk of the next `num_tokens` uncomputed tokens."""
        begin, wanted, told = request.num_computed, request.request.logprobs, range(0)
        if wanted is not None and wanted.prompt_start >= 0:
            first = max(begin + 1, wanted.prompt_start, request.told_until)
            told = range(first, max(first, min(begin + num_tokens + 1, request.num_prompt)))
        return cls(request, begin, num_tokens, num_tokens == request.num_uncomputed, told)

    @property
    def end(self) -> int:
        """Number of the request's tokens whose KV is computed after this chunk."""
        return self.begin + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one forward.

    Attributes:
        decodes: Requests that compute one token each.
        rows: Slots of `decodes`. Shape (len(decodes),).
        chunks: Parts of prompts.
    """

    decodes: list[ActiveRequest]
    rows: Ints
    chunks: list[Chunk]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def participants(self) -> list[ActiveRequest]:
        """Return every request of the batch, once."""
        return self.decodes + [chunk.request for chunk in self.chunks]

    def sampled(self) -> list[ActiveRequest]:
        """Return the requests whose next token the forward samples, in order."""
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.is_last]

    def sampled_rows(self) -> Ints:
        """Return the slots of the requests in `sampled`."""
        last = [chunk.request.slot for chunk in self.chunks if chunk.is_last]
        return np.concatenate([self.rows, np.array(last, np.int64)]) if last else self.rows


class Slots:
    """Parameters of requests with pages, in columns, so that a step is a few array operations.

    A slot is one row of every column. State that changes with each token is here, not in `ActiveRequest`.

    Attributes:
        page_ids: Pages in order, padded with stale page ids. Shape (num_slots, max_pages).
        num_pages: Shape (num_slots,), like all columns below.
        num_tokens: Known tokens, plus those sampled but not yet read.
        max_tokens: Length at which generation ends; 0 in a free slot.
        last_token: Valid if `num_pending` is 0.
        num_pending: Sampled tokens not yet read.
        source: Row in the newest forward's sampled ids; valid if `num_pending` is not 0.
        next_index: Index of the token that the next forward samples.
        stops_at_eos: Whether an end-of-sequence token ends the request.
        penalties: Of repetition, frequency and presence. Shape (3, num_slots).
        is_penalized: Whether any of the penalties has an effect.
        min_new_tokens: 0 for a request with a grammar, which decides by itself where the text ends.
        penalty_row: Row in `Penalties`; -1 for a request that has no use for one.
        is_fresh: Whether no forward has sampled a token for the request since it took the slot.
        has_grammar: Whether a grammar masks its logits, which needs the previous token on the host.
        ends_specially: Whether the request has stop token ids.
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
        self.ends_specially = np.zeros(num_slots, np.bool_)
        self._free = list(range(num_slots - 1, -1, -1))
        # The row given back last is taken first, so that few are ever used.
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
        self.ends_specially[slot] = bool(sampling.stop_token_ids)

    def give_back(self, active: ActiveRequest) -> None:
        """Free the slot of a request."""
        self.max_tokens[active.slot] = self.num_tokens[active.slot] = 0
        self._free.append(active.slot)
        if (row := int(self.penalty_row[active.slot])) >= 0:
            self._free_penalty_rows.append(row)
        active.slot = -1

    def add_pages(self, active: ActiveRequest, page_ids: list[int]) -> None:
        """Append pages to the request's row in `page_ids`."""
        slot, start = active.slot, int(self.num_pages[active.slot])
        self.page_ids[slot, start : start + len(page_ids)] = page_ids
        self.num_pages[slot] += len(page_ids)

    def launched(self, rows: Ints) -> None:
        """Record that a forward samples a token for each of these slots, in this order."""
        self.num_tokens[rows] += 1
        self.next_index[rows] += 1
        self.num_pending[rows] += 1
        self.source[rows] = np.arange(len(rows))
        self.is_fresh[rows] = False

    def landed(self, active: ActiveRequest, first_token: int) -> None:
        """Record the first token and the seed that another node chose."""
        slot = active.slot
        self.seed[slot] = active.seed % 2**64
        self.num_tokens[slot] += 1
        self.next_index[slot] += 1
        self.last_token[slot] = first_token


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The rows of one forward, grouped by sequence, in host memory.

    The first `num_decodes` sequences have one row each, so their rows and sequences coincide. The
    others are chunks of prompts.

    Attributes:
        token_ids: Shape (num_rows,). Ignored where `sources` is not -1.
        sources: Row in the sampled ids of the previous forward, which the host may not have read
            yet; -1 where `token_ids` holds the token. Shape (num_rows,).
        positions: Shape (num_rows,).
        query_starts: First row of each sequence, then the number of rows. Shape (num_seqs + 1,).
        kv_lens: Number of keys of each sequence, including this forward's. Shape (num_seqs,).
        page_table: Pages of each sequence in order; entries beyond its length are arbitrary valid page
            ids. Wide enough for the longest sequence. Shape (num_seqs, max_pages).
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
        """Number of tokens computed."""
        return len(self.token_ids)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has one row."""
        return self.num_decodes == len(self.kv_lens)

    def write_pages(self, page_size: int) -> Ints:
        """Return the page into which each row's K and V are written. Shape (num_rows,)."""
        lengths = np.diff(self.query_starts)
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        return self.page_table[sequences, self.positions // page_size].astype(np.int64)


def forward_inputs(batch: Batch, slots: Slots, page_size: int) -> ForwardInputs:
    """Return the inputs of a forward: decoding requests first, then chunks.

    `logit_rows` lists the rows to sample from, in the order of `Batch.sampled`, then the rows for prompt
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
    told_rows = [
        np.arange(chunk.told.start, chunk.told.stop) - 1 - chunk.begin + start
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
        logit_rows=np.concatenate([decodes.logit_rows, _ints(last_rows), *told_rows]),
    )


def _width(lengths: Ints, page_size: int) -> int:
    return -(-int(lengths.max(initial=0)) // page_size)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)
