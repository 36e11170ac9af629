"""What a request has said so far, and what of it counts against saying it again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from wire.generation import GenerateRequest

NEG_INF = float("-inf")


class Seen:
    """The distinct tokens of one request, kept as they come.

    Attributes:
        ids: Distinct tokens of prompt and answer.
        counts: How often each of `ids` stands in the answer.
    """

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self.counts: list[int] = []
        self._places: dict[int, int] = {}
        for token in prompt_ids:
            self._place(token)
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        self.counts[self._place(token)] += 1

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            self._places[token] = place = len(self.ids)
            self.ids.append(token)
            self.counts.append(0)
        return place


def seen_by(request: GenerateRequest) -> Seen | None:
    """Return what a request has seen before its first step here; None when no penalty asks."""
    p = request.sampling
    if p.repetition_penalty == 1.0 and not p.frequency_penalty and not p.presence_penalty:
        return None
    start = len(request.prompt_ids) - request.num_prior_tokens
    return Seen(request.prompt_ids[:start], request.prompt_ids[start:])


@dataclass(slots=True)
class Cells:
    """Entries of a matrix of logits with a number for each."""

    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, ids: Sequence[int], values: Sequence[float]) -> None:
        """Add entries of one row."""
        self.rows += [row] * len(ids)
        self.ids += ids
        self.values += values

    def within(self, vocab_size: int) -> "Cells":
        """Return those whose id is in the vocabulary."""
        kept = [i for i, token in enumerate(self.ids) if 0 <= token < vocab_size]
        rows, ids, values = self.rows, self.ids, self.values
        return Cells([rows[i] for i in kept], [ids[i] for i in kept], [values[i] for i in kept])

    def on(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, ids and values as tensors beside `logits`. Shape (num_cells,) each."""
        device = logits.device
        rows = torch.tensor(self.rows, device=device, dtype=torch.long)
        ids = torch.tensor(self.ids, device=device, dtype=torch.long)
        return rows, ids, torch.tensor(self.values, device=device, dtype=logits.dtype)


@dataclass(slots=True)
class Adjustments:
    """What is done to a batch of logits before a token is chosen, as few operations for all rows.

    Attributes:
        scales: Repetition penalties, over prompt and answer, as in Keskar et al. 2019.
        offsets: Frequency and presence penalties and biases, summed.
        bans: Tokens that cannot be chosen.
    """

    scales: Cells = field(default_factory=Cells)
    offsets: Cells = field(default_factory=Cells)
    bans: Cells = field(default_factory=Cells)

    def penalize(self, row: int, seen: Seen, repetition: float) -> None:
        """Penalize by a factor what was seen at all."""
        self.scales.add(row, seen.ids, [repetition] * len(seen.ids))

    def lower(self, row: int, seen: Seen, frequency: float, presence: float) -> None:
        """Lower what was said, by how often it was said."""
        counts = np.asarray(seen.counts)
        said = np.flatnonzero(counts)
        ids = np.asarray(seen.ids)[said]
        self.offsets.add(row, ids.tolist(), (-frequency * counts[said] - presence).tolist())

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` in place. Shape (num_rows, vocab_size), float32."""
        if self.scales.rows:
            rows, ids, factors = self.scales.on(logits)
            scores = logits[rows, ids]
            logits[rows, ids] = torch.where(scores > 0, scores / factors, scores * factors)
        if self.offsets.rows:
            rows, ids, values = self.offsets.on(logits)
            logits.index_put_((rows, ids), values, accumulate=True)
        if self.bans.rows:
            rows, ids, values = self.bans.within(logits.shape[1]).on(logits)
            logits[rows, ids] = values
