"""From logits to tokens: penalties, bias, temperature, top-k, top-p, min-p, seeded draws.

All rows of a batch go through the same few operations, queued on the device: nothing here waits
for it. Reading the chosen ids is the caller's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.grammar import leaves_only
from tandem.engine.noise import noisiest
from tandem.engine.penalties import NEG_INF, Adjustments
from tandem.engine.request import ActiveRequest
from tandem.engine.slots import Rows, Slots

# Hotter than this every token is as likely as any other; noise multiplied by it is still finite.
_HOTTEST = np.float32(1e30)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How the token of each row is chosen. Shape (n,) each.

    Attributes:
        indexes: Of the tokens to be chosen, among the generated tokens of all attempts.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    indexes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, slots: Slots, rows: Rows) -> "SamplingColumns":
        """Return the columns of these slots."""
        return cls(
            temperature=slots.temperature[rows],
            top_k=slots.top_k[rows],
            top_p=slots.top_p[rows],
            min_p=slots.min_p[rows],
            seeds=slots.seed[rows],
            indexes=slots.next_index[rows],
        )

    def take(self, rows: Rows) -> "SamplingColumns":
        """Return some of the rows."""
        return SamplingColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.indexes[rows],
        )


@torch.inference_mode()
def sample(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Choose a token for each row.

    Args:
        logits: Shape (n, vocab_size).

    Returns:
        Token ids on the device of `logits`. Shape (n,).
    """
    drawn = np.flatnonzero(columns.temperature > 0)
    if not len(drawn):
        return _largest(logits)
    if len(drawn) == len(logits):
        return _draw(logits, columns)
    tokens = _largest(logits)
    rows = torch.from_numpy(drawn).to(logits.device, non_blocking=True)
    tokens[rows] = _draw(logits[rows], columns.take(drawn))
    return tokens


def _largest(logits: torch.Tensor) -> torch.Tensor:
    if logits.is_cuda:
        return logits.argmax(dim=-1)
    # Of 32 rows of 49k bfloat16, torch takes 5.5 ms on one core and numpy 0.3.
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def adjustments(
    rows: Sequence[int],
    requests: Sequence[ActiveRequest],
    eos_token_ids: frozenset[int],
    masks: torch.Tensor | None = None,
) -> Adjustments:
    """Return what the parameters of some requests do to their rows of logits.

    Args:
        rows: Of the requests, in the logits.
        eos_token_ids: Not chosen before `min_new_tokens`, unless a grammar leaves nothing else.
        masks: Of grammars, as of `GrammarMasks`; by row of the logits.
    """
    found = Adjustments()
    for row, request in zip(rows, requests, strict=True):
        p = request.request.sampling
        if request.seen is not None:
            if p.repetition_penalty != 1.0:
                found.penalize(row, request.seen, p.repetition_penalty)
            if p.frequency_penalty or p.presence_penalty:
                found.lower(row, request.seen, p.frequency_penalty, p.presence_penalty)
        if p.logit_bias:
            found.offsets.add(row, list(p.logit_bias), list(p.logit_bias.values()))
        if request.next_index < p.min_new_tokens:
            banned = sorted(eos_token_ids | set(p.stop_token_ids))
            if masks is None or request.grammar is None or not leaves_only(masks, row, banned):
                found.bans.add(row, banned, [NEG_INF] * len(banned))
    return found


def _draw(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Draw one token for each row. Logits: shape (n, vocab_size); tokens: shape (n,)."""
    logits = logits.float()
    vocab_size = logits.shape[1]
    has_top = (columns.top_k < vocab_size).any() or (columns.top_p < 1).any()
    if has_top or (columns.min_p > 0).any():
        logits = logits.masked_fill(_cut_off(logits, columns, has_top=bool(has_top)), NEG_INF)
    temperatures = np.minimum(columns.temperature, _HOTTEST)
    return noisiest(logits, temperatures, columns.seeds, columns.indexes)


def _cut_off(logits: torch.Tensor, columns: SamplingColumns, *, has_top: bool) -> torch.Tensor:
    """Tell which tokens top-k, top-p and min-p leave out. Shape (n, vocab_size), boolean."""

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device, non_blocking=True).unsqueeze(1)

    # Of the largest it is 0 at any temperature, where quotients of the logits themselves would overflow.
    coldest = np.finfo(np.float32).tiny
    temperature = column(np.maximum(columns.temperature, coldest))
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    cut = scaled < column(columns.min_p).log()
    if has_top:
        top_k = column(np.minimum(columns.top_k, logits.shape[1]))
        cut |= scaled < _least_kept(scaled, top_k, column(columns.top_p))
    return cut


def _least_kept(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the least of the `top_k` largest logits within a mass of `top_p`. Columns (n, 1).

    What reaches it is kept, so that equal logits are kept or cut off together, whatever order the device
    finds them in.
    """
    vocab_size = logits.shape[1]
    probs = logits.softmax(dim=-1)
    has_top_k = top_k < vocab_size
    top = logits.topk(_num_candidates(probs, top_k, top_p), dim=-1)
    rank = torch.arange(top.values.shape[1], device=logits.device)
    mass = probs.gather(1, top.indices).double().masked_fill(rank >= top_k, 0.0)
    # Of a distribution cut to its `top_k`, the mass is counted anew.
    whole = torch.where(has_top_k, mass.sum(dim=-1, keepdim=True), 1.0)
    mass_before = mass.cumsum(dim=-1) - mass
    is_kept = (mass_before < top_p * whole) & (rank < top_k) | (rank == 0)
    return top.values.gather(1, is_kept.sum(dim=-1, keepdim=True) - 1)


def _num_candidates(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> int:
    """Return how many of the largest can be kept, at most: sorting all takes most of a CPU's step."""
    vocab_size = probs.shape[1]
    if probs.is_cuda:
        return vocab_size  # to count would be to wait for the device
    # Tokens below this weigh less than 1 - top_p all together, so the nucleus is among the others.
    floor = (1 - top_p) / vocab_size
    in_nucleus = (probs >= floor).sum(dim=-1, keepdim=True)
    return int(torch.where(top_k < vocab_size, top_k, in_nucleus).max().clamp(min=1))
