"""Which prefixes vLLM has cached, in the names that routers know: from its KV events, without vLLM.

vLLM names a block by a hash of its own and tells the tokens behind the block before it. Our names are of runs of
`BLOCK_TOKENS` tokens, so each block remembers what came before the next name.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.wire.prefixes import BLOCK_TOKENS, PrefixJournal, next_name, root_name, scope_name


class Stored(Protocol):
    """vLLM's `BlockStored`: blocks that are cached now, or were found in the cache.

    Attributes:
        parent_block_hash: Of the block before the first; None: a prefix begins.
        token_ids: Of all blocks, one after the other.
        extra_keys: For each block what else its KV follows from.
    """

    block_hashes: list[object]
    parent_block_hash: object | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None


class _Block(NamedTuple):
    """A cached block: the names that end in it, the last name up to its end, and the tokens after that."""

    names: tuple[int, ...]
    last: int
    rest: tuple[int, ...]


class CachedBlocks:
    """vLLM's cached blocks.

    Attributes:
        journal: Their changes, for routers.
    """

    def __init__(self) -> None:
        self.journal = PrefixJournal()
        self._blocks: dict[object, _Block] = {}

    def stored(self, event: Stored) -> None:
        """Take note of blocks. Those behind a block that is not known stay unknown: a request may go elsewhere for it."""
        size, hashes = event.block_size, event.block_hashes
        if len(event.token_ids) != size * len(hashes):
            return  # blocks outside a sliding window have no hash
        before, keys = None, [_beside_adapter(each, event) for each in event.extra_keys or ()]
        if event.parent_block_hash is not None:
            before = None if any(keys) else self._blocks.get(event.parent_block_hash)
        elif not any(keys[1:]):
            salt = _salt(keys[0] if keys else ())
            if salt is not None:
                before = _Block((), root_name(scope_name(salt, event.lora_name or "")), ())
        for start, block_hash in zip(range(0, len(event.token_ids), size), hashes, strict=True):
            if before is None:
                return
            tokens = event.token_ids[start : start + size]
            before = self._blocks.get(block_hash) or self._add(block_hash, before, tokens)

    def removed(self, block_hashes: Sequence[object]) -> None:
        """Take note of blocks that are not cached any more."""
        for block_hash in block_hashes:
            if (block := self._blocks.pop(block_hash, None)) is not None:
                for name in block.names:
                    self.journal.remove(name)

    def cleared(self) -> None:
        """Take note that nothing is cached any more."""
        self.removed(list(self._blocks))

    def _add(self, block_hash: object, before: _Block, tokens: Sequence[int]) -> _Block:
        names, last, rest = [], before.last, (*before.rest, *tokens)
        while len(rest) >= BLOCK_TOKENS:
            last, rest = next_name(last, rest[:BLOCK_TOKENS]), rest[BLOCK_TOKENS:]
            names.append(last)
            self.journal.add(last)
        block = self._blocks[block_hash] = _Block(tuple(names), last, rest)
        return block


def _beside_adapter(keys: tuple[object, ...] | None, event: Stored) -> tuple[object, ...]:
    """Return a block's keys without the first, which stands for the adapter in every block."""
    return (keys or ())[0 if event.lora_name is None else 1 :]


def _salt(keys: tuple[object, ...]) -> str | None:
    """Return the cache salt of a prefix; None if its KV follows from more than that, the adapter and its tokens."""
    match keys:
        case ():
            return ""
        case (("cache_salt", str(salt)),) | (str(salt),):  # vLLM 0.31 has the second
            return salt
        case _:
            return None
