"""One forward as numbers: all that a rank needs to compute it, and nothing of requests."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

Wrote = Callable[[int], None]
"""Called with a layer's number once its K and V are in the pool."""


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The rows of one forward, sequence after sequence; host memory.

    The first `num_decodes` sequences have one row each, so rows and sequences coincide there; the
    others are chunks of prompts.

    Attributes:
        token_ids: Shape (num_rows,). Where `sources` names another place, the value is not used.
        sources: Row of the sampled ids of the forward before, whose host copy need not be known
            yet; -1 where `token_ids` holds the token. Shape (num_rows,).
        positions: Shape (num_rows,).
        query_starts: First row of each sequence, and the number of rows. Shape (num_seqs + 1,).
        kv_lens: Keys of each sequence, those of this forward included. Shape (num_seqs,).
        page_table: Pages of each sequence in order, padded with page 0; at least as wide as the
            longest `kv_lens` needs. Shape (num_seqs, max_pages).
        logit_rows: Rows whose logits are wanted. Shape (num_logits,).
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
        """Tokens computed."""
        return len(self.token_ids)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has one row."""
        return self.num_decodes == len(self.kv_lens)

    def write_pages(self, page_size: int) -> Ints:
        """Return the page that each row's K and V go to. Shape (num_rows,)."""
        lengths = np.diff(self.query_starts)
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        return self.page_table[sequences, self.positions // page_size].astype(np.int64)
