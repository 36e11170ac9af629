"""Tracks the prefixes that vLLM has cached, by the names that routers use, from its KV events. Imports no vLLM.

vLLM identifies a block by its own hash, and reports its tokens and its parent. A router's name covers `BLOCK_TOKENS`
tokens and may end inside a vLLM block, so each block keeps the tokens after the last name in it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.wire.prefixes import BLOCK_TOKENS, PrefixJournal, next_name, root_name, scope_name


class StoredEvent(Protocol):
    """vLLM's `BlockStored`: consecutive blocks that were added to the cache or found in it.

    Attributes:
        parent_block_hash: Hash of the block before the first; None: the first block starts a prompt.
        token_ids: Tokens of all blocks, concatenated.
        extra_keys: By block, the other inputs of its KV, such as the adapter.
    """

    block_hashes: list[object]
    parent_block_hash: object | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None


class _Block(NamedTuple):
    """A cached block: the names that end in it, the last name at or before its end, and the tokens after that name."""

    names: tuple[int, ...]
    last: int
    rest: tuple[int, ...]


class CachedBlocks:
    """The blocks in vLLM's prefix cache.

    Attributes:
        journal: Changes of the cached prefixes, for routers.
    """

    def __init__(self) -> None:
        self.journal = PrefixJournal()
        self._blocks: dict[object, _Block] = {}

    def on_stored(self, event: StoredEvent) -> None:
        """Add blocks. Blocks after an unknown parent are skipped: routers then know less than is cached."""
        size, hashes = event.block_size, event.block_hashes
        if len(event.token_ids) != size * len(hashes):
            return  # blocks outside a sliding window have no hash
        before, keys = None, [_keys_without_adapter(each, event) for each in event.extra_keys or ()]
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

    def on_removed(self, block_hashes: Sequence[object]) -> None:
        """Remove evicted blocks."""
        for block_hash in block_hashes:
            if (block := self._blocks.pop(block_hash, None)) is not None:
                for name in block.names:
                    self.journal.remove(name)

    def on_cleared(self) -> None:
        """Remove all blocks."""
        self.on_removed(list(self._blocks))

    def _add(self, block_hash: object, before: _Block, tokens: Sequence[int]) -> _Block:
        names, last, rest = [], before.last, (*before.rest, *tokens)
        while len(rest) >= BLOCK_TOKENS:
            last, rest = next_name(last, rest[:BLOCK_TOKENS]), rest[BLOCK_TOKENS:]
            names.append(last)
            self.journal.add(last)
        block = self._blocks[block_hash] = _Block(tuple(names), last, rest)
        return block


def _keys_without_adapter(
    keys: tuple[object, ...] | None, event: StoredEvent
) -> tuple[object, ...]:
    """Return a block's extra keys without the adapter, which is always the first."""
    return (keys or ())[0 if event.lora_name is None else 1 :]


def _salt(keys: tuple[object, ...]) -> str | None:
    """Return the cache salt of a prefix; None if its KV depends on more than salt, adapter and tokens."""
    match keys:
        case ():
            return ""
        case (("cache_salt", str(salt)),) | (str(salt),):  # vLLM 0.31 has the second
            return salt
        case _:
            return None
