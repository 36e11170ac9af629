"""What counts against saying again what a request has said."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.engine.seen import Seen

NEG_INF = float("-inf")


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
