"""Requests with pages as columns of numbers, so that a step is a few array operations.

A slot is one row of every column. What changes with each token is here and not in `ActiveRequest`;
a forward's inputs are taken from here by indexing with the slots of its requests.
"""

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tandem.engine.request import ActiveRequest
from tandem.wire.generation import SamplingParams

Rows = npt.NDArray[np.int64]


class Slots:
    """Columns for `num_slots` requests of at most `max_pages` pages each.

    Attributes:
        page_ids: Pages in order, padded with whatever was there. Shape (num_slots, max_pages).
        num_pages: Shape (num_slots,), as are all that follow.
        num_tokens: Tokens that are known or sampled and not yet read.
        max_tokens: Length at which generation ends; 0 in a free slot.
        last_token: Valid where `num_pending` is 0.
        num_pending: Sampled tokens not yet read.
        source: Row of the newest forward's sampled ids, where `num_pending` is not 0.
        next_index: Index of the token that the next forward samples.
        stops_at_eos: Whether an end-of-sequence token ends it.
        is_special: Whether choosing its next token takes more than the columns below: the token
            before must be known on the host.
        ends_specially: Whether it has stop ids of its own.
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
        self.is_special = np.zeros(num_slots, np.bool_)
        self.ends_specially = np.zeros(num_slots, np.bool_)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        """Requests that have a slot."""
        return len(self.num_pages) - len(self._free)

    @property
    def has_free(self) -> bool:
        """Whether one more request fits."""
        return bool(self._free)

    def take(self, active: ActiveRequest) -> None:
        """Give a request with pages a slot, and fill its columns."""
        active.slot = slot = self._free.pop()
        sampling = active.request.sampling
        self.num_pages[slot] = 0
        self.add_pages(active, active.page_ids)
        self.num_tokens[slot] = len(active.token_ids)
        self.max_tokens[slot] = active.num_prompt if active.is_prompt_only else active.max_tokens
        self.last_token[slot] = active.token_ids[-1]
        self.num_pending[slot] = 0
        self.next_index[slot] = active.next_index
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k if sampling.top_k > 0 else np.iinfo(np.int64).max
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.stops_at_eos[slot] = not sampling.ignore_eos
        self.is_special[slot] = is_special(sampling)
        self.ends_specially[slot] = bool(sampling.stop_token_ids)
        self.set_seed(active)

    def give_back(self, active: ActiveRequest) -> None:
        """Free the slot of a request."""
        self.max_tokens[active.slot] = self.num_tokens[active.slot] = 0
        self._free.append(active.slot)
        active.slot = -1

    def set_seed(self, active: ActiveRequest) -> None:
        """Take over a seed that another node chose."""
        self.seed[active.slot] = active.seed % 2**64

    def add_pages(self, active: ActiveRequest, page_ids: list[int]) -> None:
        """Append pages to the request's row of the page table."""
        slot, start = active.slot, int(self.num_pages[active.slot])
        self.page_ids[slot, start : start + len(page_ids)] = page_ids
        self.num_pages[slot] += len(page_ids)

    def remaining_tokens(self) -> Rows:
        """Return how many tokens each slot may still grow by; 0 in free ones."""
        remaining: Rows = np.maximum(self.max_tokens - self.num_tokens, 0)
        return remaining

    @override
    def __repr__(self) -> str:
        return f"Slots({self.num_used} of {len(self.num_pages)} used)"


def is_special(sampling: SamplingParams) -> bool:
    """Tell whether the logits of a request are changed before a token is chosen."""
    return bool(
        sampling.logit_bias
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.min_new_tokens
        or sampling.grammar is not None
    )
