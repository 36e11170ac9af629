"""A line in which the highest priority goes first, and among equals whoever came first."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from typing_extensions import override

T = TypeVar("T")
Rank = tuple[int, int]


class Line(Generic[T]):
    """Items in order of their rank.

    Args:
        rank: (-priority, arrival) of an item: unique, and the same as long as it stands in line.
    """

    def __init__(self, rank: Callable[[T], Rank]) -> None:
        self._rank = rank
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: T) -> bool:
        place = bisect_left(self._items, self._rank(item), key=self._rank)
        return place < len(self._items) and self._items[place] is item

    def add(self, item: T) -> None:
        """Put an item where its rank says."""
        insort(self._items, item, key=self._rank)

    def remove(self, item: T) -> None:
        """Take an item out, wherever it stands."""
        place = bisect_left(self._items, self._rank(item), key=self._rank)
        assert self._items[place] is item
        del self._items[place]

    @override
    def __repr__(self) -> str:
        return f"Line({len(self)} waiting)"
