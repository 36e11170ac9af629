"""Penalties, logit biases and `min_new_tokens`, with their state on the device of the logits.

Each running request that uses any of them owns a row (`Slots.penalty_row`). A token is counted on the device
as soon as it is sampled, so that the next forward does not wait for the host to read it.

A row has a mark for each token of the vocabulary, and a list of the ids whose mark or bias is not 0. Only listed
logits are changed. The list may contain duplicate or stale ids: the new logit depends only on the old logit, the
mark and the bias, so writing it twice is harmless, and a token without mark and bias keeps its logit.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.engine.device import to_device
from tandem.engine.sampling.sampler import NEG_INF
from tandem.engine.scheduling.forward import Ints, Slots
from tandem.engine.scheduling.request import ActiveRequest

# A mark has a bit for tokens banned before `min_new_tokens`, a bit for tokens of the prompt, and above them the
# number of occurrences in the answer.
_SHIFT = 2
_BANNED, _IN_PROMPT, _ONCE = 1, 2, 1 << _SHIFT


class Penalties:
    """The rows of all requests.

    A row takes four bytes per token of the vocabulary (eight once any request had a bias), plus four per id of the
    longest list. Rows are reused: their number is at most twice the largest number of requests that owned one at
    the same time.

    Args:
        eos_token_ids: Banned before `min_new_tokens`, in addition to the stop ids of the request.
        device: The device of all logits.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        # Tables on the device, by row. `_biases` is empty until a request has a bias.
        self._marks = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._biases = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._ids = torch.zeros((0, 0), dtype=torch.int32, device=device)
        # Length of each row's list, on the host.
        self._num_ids = np.zeros(0, np.int64)

    @torch.inference_mode()
    def apply(
        self, logits: torch.Tensor, slots: Slots, rows: Ints, requests: Sequence[ActiveRequest]
    ) -> Callable[[torch.Tensor], None]:
        """Change the logits of the requests that own a row, in place.

        The repetition penalty scales all tokens that occur in prompt or answer, as in Keskar et al. 2019. Frequency
        and presence penalties consider only the answer. Then biases are added, and finally banned tokens masked.

        Args:
            logits: Shape (n, vocab_size), float32.
            rows: Slot of each request. Shape (n,).
            requests: For a fresh slot, `token_ids` must be complete.

        Returns:
            A function that counts the ids sampled from these logits. Call it before the next `apply`.
        """
        lines = np.flatnonzero(slots.penalty_row[rows] >= 0)
        if not len(lines):
            return _count_nothing
        own_slots = rows[lines]
        own_rows = slots.penalty_row[own_slots]
        for i in np.flatnonzero(slots.is_fresh[own_slots]).tolist():
            self._fill(int(own_rows[i]), requests[lines[i]])
        is_penalized = slots.is_penalized[own_slots]
        is_early = slots.next_index[own_slots] < slots.min_new_tokens[own_slots]
        ends = self._num_ids[own_rows]
        width = int(ends.max())
        self._num_ids[own_rows] += is_penalized
        self._ids = _resized(self._ids, 0, width + 1)

        # Offsets of the lines in `logits` and in the tables, which are indexed flat.
        starts, own_starts = lines * self._vocab_size, own_rows * self._vocab_size
        numbers = np.array((starts, own_starts, lines, own_rows, ends, is_early))
        columns = to_device(numbers, self._device).unsqueeze(2)  # (6, len(lines), 1)
        start, own_start, line, row, end, early = columns.unbind()
        ids = self._ids[row.squeeze(1), :width]  # (len(lines), width), like all tensors below
        cells, own_cells = start + ids, own_start + ids
        scores, marks = _gather(logits, cells), _gather(self._marks, own_cells)
        if is_penalized.any():
            penalties = slots.penalties[:, own_slots]
            repetition, frequency, presence = (
                to_device(penalties, self._device).unsqueeze(2).unbind()
            )
            if (penalties[0] != 1.0).any():
                factors = repetition.float()
                scaled = torch.where(scores > 0, scores / factors, scores * factors)
                scores = torch.where(marks >= _IN_PROMPT, scaled, scores)
            if penalties[1:].any():
                lower = (-frequency * (marks >> _SHIFT) - presence).float()
                scores += lower.masked_fill(marks < _ONCE, 0.0)
        if len(self._biases):
            scores += _gather(self._biases, own_cells)
        if is_early.any():
            scores.masked_fill_((marks & early & _BANNED).bool(), NEG_INF)
        logits.view(-1).scatter_(0, cells.view(-1), scores.view(-1))

        @torch.inference_mode()
        def count(sampled: torch.Tensor) -> None:
            tokens = sampled[line]
            self._marks[row, tokens] += _ONCE
            self._ids[row, end] = tokens.int()

        return count if is_penalized.any() else _count_nothing

    def _fill(self, row: int, active: ActiveRequest) -> None:
        """Fill a row, which may hold the state of an earlier request, for a new request."""
        p = active.request.sampling
        num_prompt = active.num_prompt - active.request.num_prior_tokens
        answer = np.array(active.token_ids[num_prompt:], np.int64)
        marks = np.bincount(answer, minlength=self._vocab_size).astype(np.int32) * _ONCE
        if p.repetition_penalty != 1.0:
            marks[active.token_ids[:num_prompt]] |= _IN_PROMPT
        if p.min_new_tokens:
            ends = self._eos_token_ids | set(p.stop_token_ids)
            marks[[token for token in ends if 0 <= token < self._vocab_size]] |= _BANNED
        is_listed = marks > 0
        self._marks = _resized(self._marks, row + 1, 0)
        if p.logit_bias or len(self._biases):
            biases = np.zeros(self._vocab_size, np.float32)
            biases[[*p.logit_bias]] = [*p.logit_bias.values()]
            is_listed |= biases != 0
            self._biases = _resized(self._biases, len(self._marks), 0)
            self._biases[row] = to_device(biases, self._device)
        ids = np.flatnonzero(is_listed).astype(np.int32)
        self._ids = _resized(self._ids, len(self._marks), len(ids))
        self._num_ids = np.resize(self._num_ids, len(self._marks))
        self._ids[row, : len(ids)] = to_device(ids, self._device)
        self._marks[row] = to_device(marks, self._device)
        self._num_ids[row] = len(ids)


def _count_nothing(_sampled: torch.Tensor) -> None:
    pass


def _gather(table: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Return the values at flat indexes into a table, in the shape of the indexes."""
    # On a CPU, a two-dimensional index takes several times as long.
    return table.view(-1).index_select(0, cells.view(-1)).view(cells.shape)


def _resized(tensor: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return the tensor, with each dimension that was too small at least doubled and filled with zeros."""
    shape = tuple(
        size if needed <= size else max(needed, 2 * size)
        for size, needed in zip(tensor.shape, (num_rows, num_columns), strict=True)
    )
    if shape == tensor.shape:
        return tensor
    grown = tensor.new_zeros(shape)
    grown[: len(tensor), : tensor.shape[1]] = tensor
    return grown
