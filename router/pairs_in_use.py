"""Which prefill feeds which decode now, and how much of it: counted as attempts begin and end."""

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from tandem.router.policy import Pair


class PairUse:
    """What one edge worker has given to one pair.

    Attributes:
        num_running: Attempts now.
        num_started: Attempts ever.
        num_tokens: Of the prompts of all of them.
    """

    __slots__ = ("num_running", "num_started", "num_tokens")

    def __init__(self) -> None:
        self.num_running = self.num_started = self.num_tokens = 0

    @override
    def __repr__(self) -> str:
        return f"PairUse({self.num_running} of {self.num_started} running)"


class PairsInUse:
    """The pairs that were given attempts."""

    def __init__(self) -> None:
        self.uses: dict[Pair, PairUse] = {}

    @override
    def __repr__(self) -> str:
        return f"<PairsInUse {len(self.uses)} pairs>"

    @contextmanager
    def attempt(self, pair: Pair, num_tokens: int) -> Iterator[None]:
        """Count an attempt with a prompt of so many tokens as running inside the block."""
        use = self.uses.get(pair)
        if use is None:
            use = self.uses[pair] = PairUse()
        use.num_running += 1
        use.num_started += 1
        use.num_tokens += num_tokens
        try:
            yield
        finally:
            use.num_running -= 1

    def forget(self, urls: set[str]) -> None:
        """Forget idle pairs with a node that is none of `urls`."""
        for pair, use in tuple(self.uses.items()):
            if not use.num_running and not urls.issuperset(pair.urls):
                del self.uses[pair]
