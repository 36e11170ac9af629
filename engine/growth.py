"""How much of what running requests may still ask for is kept free. Pure.

Most answers end long before `max_new_tokens`. Keeping pages for all of it wastes memory; keeping none
means that requests are retracted and computed twice. So the share kept falls while all goes well
and rises with each retraction.
"""

import numpy as np

from tandem.engine.slots import Rows

# SGLang's schedule starts near here and falls to a tenth over some hundred steps.
_START, _LEAST = 0.5, 0.1
_DECAY_PER_STEP = 0.998
# Two retractions in a row bring back nearly everything.
_RISE = 0.25


class ExpectedGrowth:
    """The share of the remaining tokens that pages are kept for."""

    def __init__(self) -> None:
        self.share = _START

    def stepped(self) -> None:
        """A step went by."""
        self.share = max(_LEAST, self.share * _DECAY_PER_STEP)

    def retracted(self) -> None:
        """Pages ran out."""
        self.share = min(1.0, self.share + _RISE)

    def num_pages(self, remaining_tokens: Rows, page_size: int) -> int:
        """Return how many pages to keep for requests that may each grow by so many tokens."""
        return int(np.ceil(self.share * remaining_tokens / page_size).sum())
