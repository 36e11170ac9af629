"""Host memory that pages come into from a store, and the loans of it."""

import threading
from collections.abc import Callable, Sequence

# Pinning memory takes longer than filling it, and fresh memory is filled at half the speed. As much as a
# prompt of 8,000 tokens of a 7B model has.
KEPT_BYTES = 256 << 20


class PageMemory:
    """Pieces of one size, made when needed and kept for the next time. Any thread may call it.

    Args:
        make: Makes one of so many bytes.
        piece_bytes: Of each.
        kept_bytes: More is let go of when it is given back; None: nothing is.
    """

    def __init__(
        self,
        make: Callable[[int], memoryview],
        piece_bytes: int,
        kept_bytes: int | None = KEPT_BYTES,
    ) -> None:
        self._make, self.piece_bytes = make, piece_bytes
        self._max_kept = None if kept_bytes is None else max(1, kept_bytes // piece_bytes)
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        """Return a piece, with whatever is in it."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._make(self.piece_bytes)

    def give_back(self, pieces: Sequence[memoryview]) -> None:
        """Take pieces back that nobody reads any more."""
        with self._lock:
            self._free.extend(pieces)
            if self._max_kept is not None:
                del self._free[self._max_kept :]

    def clear(self) -> None:
        """Let go of what is kept."""
        with self._lock:
            self._free.clear()


class MemoryLoan:
    """Pages in such memory, until they are given back.

    Args:
        pieces: What the memory is given back in.
        pages: Where in the pieces the pages are.
    """

    def __init__(
        self, memory: PageMemory, pieces: Sequence[memoryview], pages: Sequence[memoryview]
    ) -> None:
        self._memory, self._pieces = memory, pieces
        self.pages = pages

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        pieces, self._pieces, self.pages = self._pieces, (), ()
        self._memory.give_back(pieces)
