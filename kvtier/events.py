"""What a stack tells the role's loop of what was asked of it, by the number it was asked under."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch is over: so many leading pages are in host memory, until they are placed or abandoned.

    Attributes:
        by_tier: How many of them came from which tier.
    """

    number: int
    num_pages: int
    by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """The pages given to `place` have their bytes; or, where `is_whole` is False, must not be read."""

    number: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """The pages given to `save` are read no more, whatever became of them."""

    number: int


TierEvent = Fetched | Placed | Saved
