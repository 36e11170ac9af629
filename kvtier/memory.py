"""Host memory that pages pass through, made once and used again; and copies of pages in it."""

import threading
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from tandem.kvtier.tier import PoolPages


def copy_page(source: memoryview, into: memoryview) -> None:
    """Copy a page. Other threads run meanwhile, which a memoryview's own assignment does not let them."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def views_of(memory: memoryview, page_bytes: int) -> list[memoryview]:
    """Return the whole pages that a piece of memory has room for."""
    end = len(memory) - page_bytes + 1
    return [memory[first : first + page_bytes] for first in range(0, end, page_bytes)]


class PageBuffers:
    """Room for pages on their way. Grows as it is asked for; the stack bounds what is out. Any thread."""

    def __init__(self, pages: PoolPages) -> None:
        self._pages = pages
        self._free: list[memoryview] = []
        self._num_all = 0
        self._lock = threading.Lock()

    @override
    def __repr__(self) -> str:
        return f"<PageBuffers {len(self._free)} of {self._num_all} free>"

    @property
    def num_out(self) -> int:
        """How many are lent now."""
        with self._lock:
            return self._num_all - len(self._free)

    def take(self, num_pages: int) -> "PageLoan":
        """Return room for so many pages; closing it gives it back."""
        with self._lock:
            missing = num_pages - len(self._free)
        grown: list[memoryview] = []
        if missing > 0:  # outside the lock: others go on meanwhile
            memory = self._pages.host_memory(missing * self._pages.page_bytes)
            grown = views_of(memory, self._pages.page_bytes)
        with self._lock:
            self._num_all += len(grown)
            self._free += grown
            if len(self._free) >= num_pages:
                taken = self._free[len(self._free) - num_pages :]
                del self._free[len(self._free) - num_pages :]
                return PageLoan(self, taken)
        return self.take(num_pages)  # another took what was there

    def give_back(self, views: Sequence[memoryview]) -> None:
        """Take them back."""
        with self._lock:
            self._free += views


class PageLoan:
    """Pages in buffers, until it is closed. Any thread may close it.

    Attributes:
        pages: Those that have bytes; the borrower may shorten it.
    """

    def __init__(self, buffers: PageBuffers, views: Sequence[memoryview]) -> None:
        self._buffers, self._views = buffers, views
        self.pages: Sequence[memoryview] = views
        self._lock = threading.Lock()

    def keep(self, num_pages: int) -> None:
        """Give all but the first pages back."""
        with self._lock:
            rest, self._views = self._views[num_pages:], self._views[:num_pages]
        self.pages = self._views
        self._buffers.give_back(rest)

    def close(self) -> None:
        """Give all back. Safe to call twice."""
        with self._lock:
            views, self._views = self._views, []
        self.pages = []
        self._buffers.give_back(views)
