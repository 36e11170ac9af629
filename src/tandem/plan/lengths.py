"""How long prompts and answers are: as people say it, and as numbers that are drawn. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tandem.wire.errors import ConfigInvalid

# Of the standard normal distribution: where 99 % lie below.
_Z99 = 2.3263478740408408
EXAMPLES = "4000, uniform:500:4000, or lognormal:1200:8000 (its median and 99th percentile)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 on.

    Attributes:
        low: The number itself, the least, or the median.
        high: The most, or the 99th percentile.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` of them."""
        drawn: list[int]
        match self.kind:
            case "fixed":
                return [self.low] * count
            case "uniform":
                drawn = rng.integers(self.low, self.high + 1, count).tolist()
            case "lognormal":
                sigma = math.log(self.high / self.low) / _Z99
                found = rng.lognormal(math.log(self.low), sigma, count)
                drawn = np.maximum(np.rint(found), 1).astype(np.int64).tolist()
        return drawn


def read_lengths(text: str, flag: str) -> Lengths:
    """Return what a flag says.

    Raises:
        ConfigInvalid: It says nothing of the kind.
    """
    kind, _, rest = text.rpartition(":") if text.count(":") < 2 else text.partition(":")
    numbers = rest.split(":") if kind else [text]
    if all(number.isdecimal() and int(number) for number in numbers):
        values = [int(number) for number in numbers]
        if not kind and len(values) == 1:
            return Lengths("fixed", values[0], values[0])
        if len(values) == 2 and values[0] <= values[1]:
            if kind == "uniform":
                return Lengths("uniform", *values)
            if kind == "lognormal":
                return Lengths("lognormal", *values)
    raise ConfigInvalid(f"{flag} {text}: give tokens such as {EXAMPLES}", topic="plan#the-load")
