"""Host memory that pages pass through: pieces that are used again, runs of them with their users, a budget."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from tandem.wire.prefixes import PageKey
from typing_extensions import override

from tandem.kvtier.tier import Loan

# One allocation. Pinning memory takes longer than filling it, so pieces are made together and kept.
SLAB_BYTES = 16 << 20


def copy_page(source: memoryview, into: memoryview) -> None:
    """Copy a page without the interpreter's lock, which an assignment between memoryviews keeps."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def views_of(memory: memoryview, page_bytes: int) -> list[memoryview]:
    """Return the whole pages that a piece of memory has room for."""
    end = len(memory) - page_bytes + 1
    return [memory[first : first + page_bytes] for first in range(0, end, page_bytes)]


class PageMemory:
    """Pieces of one size. Grows on demand; the stack's budget bounds what is lent. Any thread may call it.

    Args:
        make: Allocates so many bytes.
        piece_bytes: Size of each piece.
    """

    def __init__(self, make: Callable[[int], memoryview], piece_bytes: int) -> None:
        self._make, self.piece_bytes = make, piece_bytes
        self._free: list[memoryview] = []
        self._num_all = 0
        self._lock = threading.Lock()

    @override
    def __repr__(self) -> str:
        return f"<PageMemory {len(self._free)} of {self._num_all} free>"

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


class MemoryLoan:
    """Pages in such memory, until `close`.

    Args:
        pieces: What is given back.
        pages: The pages inside the pieces.
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


class PageRun:
    """Consecutive pages in host memory, shared by a fetch and several puts; the last user closes the loan.

    Args:
        end: Called after the loan was closed.
    """

    def __init__(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        loan: Loan,
        end: Callable[[], None],
    ) -> None:
        self.keys, self.pages = keys, pages
        self._loan, self._end = loan, end
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
            try:
                self._loan.close()
            finally:
                self._end()
