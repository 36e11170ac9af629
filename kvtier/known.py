"""What one node knows to be in a store that others write to, and evict from, as well."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from tandem.kvtier.journal import SharedJournal
from tandem.wire.page_keys import PageKey
from tandem.wire.prefix_blocks import MAX_BLOCKS


class KnownPages:
    """Pages that this node put into a store or found there, as far as routers are told of them.

    Only pages that a block ends in are remembered, and of those no more than routers take: the ones that were
    met longest ago are forgotten first. Any thread may call it.

    Attributes:
        journal: Follows.
    """

    def __init__(self, max_pages: int = MAX_BLOCKS) -> None:
        self.journal = SharedJournal()
        self._max_pages = max_pages
        self._blocks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def met(self, keys: Iterable[PageKey]) -> None:
        """Note that these are there."""
        with self._lock:
            for key in keys:
                if not key.blocks:
                    continue
                if key.digest in self._blocks:
                    self._blocks.move_to_end(key.digest)
                    continue
                self._blocks[key.digest] = key.blocks
                for block in key.blocks:
                    self.journal.add(block)
                if len(self._blocks) > self._max_pages:
                    self._tell_gone(self._blocks.popitem(last=False)[1])

    def missed(self, key: PageKey) -> bool:
        """Note that this one is not there; return whether it was known to be."""
        with self._lock:
            blocks = self._blocks.pop(key.digest, ())
            self._tell_gone(blocks)
        return bool(blocks)

    def forget_all(self) -> None:
        """Note that the store is another, or was emptied."""
        with self._lock:
            for blocks in self._blocks.values():
                self._tell_gone(blocks)
            self._blocks.clear()

    def _tell_gone(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.journal.remove(block)
