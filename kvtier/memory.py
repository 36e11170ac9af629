"""Host memory that pages pass through: pieces that are used again, loans of pages, and a budget."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

# One allocation. Pinning memory takes longer than filling it, so pieces are made together and kept.
SLAB_BYTES = 16 << 20


def copy_page(source: memoryview, into: memoryview) -> None:
    """Copy a page without the interpreter's lock, which an assignment between memoryviews keeps."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def views_of(memory: memoryview, page_bytes: int) -> list[memoryview]:
    """Return the whole pages that a piece of memory has room for."""
    end = len(memory) - page_bytes + 1
    return [memory[first : first + page_bytes] for first in range(0, end, page_bytes)]


class Loan:
    """Pages in host memory, readable until the last user releases them. Any thread may call it.

    Args:
        pages: One for each leading key that was found.
        end: Called once, by the last user's `release`.
    """

    def __init__(self, pages: Sequence[memoryview], end: Callable[[], object]) -> None:
        self.pages, self._end = pages, end
        self._num_users = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Add a user."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """Remove a user."""
        with self._lock:
            self._num_users -= 1
            num_users = self._num_users
        assert num_users >= 0
        if not num_users:
            self._end()


class PageMemory:
    """Pieces of one size, from `make(num_bytes)`.

    Grows on demand; a budget bounds what is lent. Any thread may call it.
    """

    def __init__(self, make: Callable[[int], memoryview], piece_bytes: int) -> None:
        self._make, self.piece_bytes = make, piece_bytes
        self._free: list[memoryview] = []
        self._num_all = 0
        self._lock = threading.Lock()

    @property
    def num_lent(self) -> int:
        """Pieces that were taken and not given back."""
        with self._lock:
            return self._num_all - len(self._free)

    def take(self) -> memoryview:
        """Return a piece, with whatever bytes are in it."""
        with self._lock:
            if self._free:
                return self._free.pop()
        # Without the lock: other threads give back and take meanwhile.
        num_pieces = max(1, SLAB_BYTES // self.piece_bytes)
        piece, *rest = views_of(self._make(num_pieces * self.piece_bytes), self.piece_bytes)
        with self._lock:
            self._num_all += num_pieces
            self._free += rest
        return piece

    def give_back(self, pieces: Sequence[memoryview]) -> None:
        """Take back pieces that nobody reads or writes any more."""
        with self._lock:
            self._free += pieces

    def lend(self, pieces: Sequence[memoryview], pages: Sequence[memoryview]) -> Loan:
        """Return a loan of the pages in some pieces, which come back at its end."""
        return Loan(pages, lambda: self.give_back(pieces))


class MemoryBudget:
    """How many pages of host memory may be in use in one direction. Any thread may call it."""

    def __init__(self, limit_pages: int) -> None:
        self.limit_pages = limit_pages
        self.num_used = 0
        self._lock = threading.Lock()

    def take(self, num_pages: int) -> bool:
        """Set memory aside; return False when there is too little."""
        with self._lock:
            if self.num_used + num_pages > self.limit_pages:
                return False
            self.num_used += num_pages
            return True

    def give_back(self, num_pages: int) -> None:
        """Return memory."""
        with self._lock:
            self.num_used -= num_pages
            assert self.num_used >= 0
