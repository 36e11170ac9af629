"""What a tier's answers take, as measured, for a model of what the next will take. Pure."""

from dataclasses import dataclass

# Of the last answer, in the mean: old ones are forgotten within some ten.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class TierCost:
    """What a tier's answers took lately.

    Attributes:
        latency_s: Until it is known how much is there.
        page_s: To bring one page of it into the pool.
        num_pages: How many pages that was measured on; 0: nothing is known.
    """

    latency_s: float = 0.0
    page_s: float = 0.0
    num_pages: int = 0

    def seconds(self, num_pages: int) -> float:
        """Return how long that many pages are expected to take."""
        return self.latency_s + self.page_s * num_pages


class Mean:
    """The mean of what was measured lately; None before the first."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Take a measurement."""
        self.value = sample if self.value is None else self.value + _WEIGHT * (sample - self.value)


class CostMeter:
    """Measures one tier."""

    def __init__(self) -> None:
        self._latency, self._page = Mean(), Mean()
        self._num_pages = 0

    @property
    def page_s(self) -> float | None:
        """Seconds a page lately; None: none was got yet."""
        return self._page.value

    def looked(self, duration_s: float) -> None:
        """Note how long a question for what is there took."""
        self._latency.add(duration_s)

    def got(self, num_pages: int, duration_s: float) -> None:
        """Note how long so many pages took."""
        if num_pages:
            self._num_pages += num_pages
            self._page.add(duration_s / num_pages)

    def cost(self, place_page_s: float) -> TierCost:
        """Return what is known.

        Args:
            place_page_s: To copy a page into the pool, wherever it came from.
        """
        if self._page.value is None:
            return TierCost(self._latency.value or 0.0)
        return TierCost(
            self._latency.value or 0.0, self._page.value + place_page_s, self._num_pages
        )
