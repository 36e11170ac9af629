"""Host memory for pages in transit: reusable buffers, reference-counted loans, and a budget."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

# Size of an allocation. Pinning memory takes longer than filling it, so buffers are allocated together and kept.
SLAB_BYTES = 16 << 20


def copy_page(source: memoryview, into: memoryview) -> None:
    """Copy a page without the GIL, which an assignment between memoryviews would hold."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def views_of(memory: memoryview, page_bytes: int) -> list[memoryview]:
    """Divide memory into pages; a rest that is smaller than a page is unused."""
    end = len(memory) - page_bytes + 1
    return [memory[first : first + page_bytes] for first in range(0, end, page_bytes)]


class Loan:
    """Pages in host memory, readable until the last user releases them. Thread-safe.

    Args:
        pages: One view per leading key that was found.
        end: Called once, when the last user releases the loan.
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
    """A pool of buffers of one size, allocated by `make(num_bytes)`.

    It grows on demand; a `MemoryBudget` limits its use. Thread-safe.
    """

    def __init__(self, make: Callable[[int], memoryview], piece_bytes: int) -> None:
        self._make, self.piece_bytes = make, piece_bytes
        self._free: list[memoryview] = []
        self._num_all = 0
        self._lock = threading.Lock()

    @property
    def num_lent(self) -> int:
        """Number of buffers in use."""
        with self._lock:
            return self._num_all - len(self._free)

    def take(self) -> memoryview:
        """Return a buffer with undefined contents."""
        with self._lock:
            if self._free:
                return self._free.pop()
        # Allocate without the lock, so that other threads do not wait.
        num_pieces = max(1, SLAB_BYTES // self.piece_bytes)
        piece, *rest = views_of(self._make(num_pieces * self.piece_bytes), self.piece_bytes)
        with self._lock:
            self._num_all += num_pieces
            self._free += rest
        return piece

    def release(self, pieces: Sequence[memoryview]) -> None:
        """Return buffers that are no longer read or written."""
        with self._lock:
            self._free += pieces

    def lend(self, pieces: Sequence[memoryview], pages: Sequence[memoryview]) -> Loan:
        """Return a loan of pages that releases their buffers when it ends."""
        return Loan(pages, lambda: self.release(pieces))


class MemoryBudget:
    """A limit on the pages of host memory in use for one direction. Thread-safe."""

    def __init__(self, limit_pages: int) -> None:
        self.limit_pages = limit_pages
        self.num_used = 0
        self._lock = threading.Lock()

    def take(self, num_pages: int) -> bool:
        """Reserve memory; return False if too little is left."""
        with self._lock:
            if self.num_used + num_pages > self.limit_pages:
                return False
            self.num_used += num_pages
            return True

    def release(self, num_pages: int) -> None:
        """Release reserved memory."""
        with self._lock:
            self.num_used -= num_pages
            assert self.num_used >= 0
