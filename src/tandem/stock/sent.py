"""The prefixes that an engine probably holds, for engines that publish no KV events: those of the prompts sent to it."""

from collections import OrderedDict

from tandem.wire.generation import GenerateRequest
from tandem.wire.prefixes import PrefixJournal, block_names


class SentPrefixes:
    """The latest prompts of one engine, within the size of its cache.

    Args:
        max_blocks: Blocks of `BLOCK_TOKENS` tokens that the engine's cache can hold.

    Attributes:
        journal: Changes of the set, for routers.
    """

    def __init__(self, max_blocks: int) -> None:
        self.journal, self._max_blocks = PrefixJournal(), max_blocks
        self._names: OrderedDict[int, None] = OrderedDict()

    def note(self, request: GenerateRequest) -> None:
        """Add a prompt's blocks as the latest; forget the oldest beyond the limit."""
        # In reverse: a prompt's last blocks are forgotten before those on which they build.
        for name in reversed(block_names(request.prompt_ids, request.cache_salt)):
            if name not in self._names:
                self.journal.add(name)
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._max_blocks:
            self.journal.remove(self._names.popitem(last=False)[0])
