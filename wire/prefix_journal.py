"""Which blocks of tokens a prefix cache has, and the last changes to that, for routers to follow.

```
 add, remove ──▶ position + 1 each
 since(p) ──▶ what changed behind p, or, when p is too far behind or of another life, all there is
```

A router asks with the position it has; nothing of it is kept here, so any number may follow, and one that
missed something, fell behind or is new needs no care.
"""

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from typing_extensions import override

from tandem.wire.prefix_blocks import MAX_BLOCKS

# Behind more, all there is is the shorter answer for most pools. At 100,000 prompt tokens a second this is
# 10 s of changes; a router asks every 0.5 s.
MAX_CHANGES = 1 << 14


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What a router that was at one position has to do to be at `position`.

    Attributes:
        is_whole: Forget what was known before; `added` is all there is.
    """

    position: int
    is_whole: bool
    added: list[int]
    removed: list[int]


class PrefixJournal:
    """The blocks of one prefix cache or tier. Any thread may call it.

    Args:
        max_blocks: More are not told of: bounds what every router holds of this node.
        max_changes: How many of the last changes are kept.

    Attributes:
        position: Number of changes so far.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_changes: int = MAX_CHANGES) -> None:
        self.position = 0
        self._max_blocks = max_blocks
        # Pages with this block: an orphan and the page that took its place have the same one.
        self._num_pages: dict[int, int] = {}
        # Name of the block, and whether it came.
        self._changes: deque[tuple[int, bool]] = deque(maxlen=max_changes)
        # Tiers write on threads of their own while the node's loop reads.
        self._lock = threading.Lock()

    @override
    def __repr__(self) -> str:
        return f"<PrefixJournal {len(self._num_pages)} blocks at {self.position}>"

    def add(self, name: int) -> None:
        """Note that a page with the end of this block is cached."""
        with self._lock:
            count = self._num_pages.get(name, 0)
            if not count and len(self._num_pages) >= self._max_blocks:
                return
            self._num_pages[name] = count + 1
            if not count:
                self._note(name, has_come=True)

    def remove(self, name: int) -> None:
        """Note that such a page is not cached any more; one that was never told of is no error."""
        with self._lock:
            count = self._num_pages.get(name)
            if count is None:
                return
            if count > 1:
                self._num_pages[name] = count - 1
                return
            del self._num_pages[name]
            self._note(name, has_come=False)

    def since(self, position: int) -> PrefixChanges | None:
        """Return what changed since `position`; None when nothing did.

        The answer has at most as many blocks as there are or as changes are kept, whichever is more.
        """
        with self._lock:
            if position == self.position:
                return None
            num_new = self.position - position
            if not 0 < num_new <= len(self._changes) or num_new > len(self._num_pages):
                return PrefixChanges(self.position, True, list(self._num_pages), [])
            # Of several changes to one block the last counts.
            last = dict(islice(self._changes, len(self._changes) - num_new, None))
            added = [name for name, has_come in last.items() if has_come]
            removed = [name for name, has_come in last.items() if not has_come]
            return PrefixChanges(self.position, False, added, removed)

    def _note(self, name: int, *, has_come: bool) -> None:
        self.position += 1
        self._changes.append((name, has_come))
