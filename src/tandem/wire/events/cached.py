"""Tracks the prefixes that an engine has cached, by the names that routers use, from its KV events. Imports no vLLM.

An engine identifies a block by its own hash, and reports its tokens and its parent. A router's name covers
`BLOCK_TOKENS` tokens and may begin and end inside a block, so each block keeps the tokens after the last name in it.

```
 blocks of 48 tokens   |  1  |  2  |  3  |  4  |  5  |  6  |  7  |
 names                 |     128       |     128       |
                                   └ block 3 ends name 1 and keeps 16 tokens for name 2
```

The engine may cache several copies of a block, and evict a block before the blocks after it. A block is held while a
copy of it and of every block before it is cached, because a request finds no block behind a missing one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.wire.prefixes import (
    BLOCK_TOKENS,
    PrefixJournal,
    TokenArray,
    names_between,
    root_name,
    scope_name,
    token_array,
)

# Limit of tracked blocks of one engine, which take 600 bytes each. 4 million tokens with 16 a block.
MAX_TRACKED = 1 << 18
# Kinds of layers that keep only some blocks of a prompt.
_PARTIAL_KINDS = frozenset(
    {"sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention"}
)


class StoredEvent(Protocol):
    """`BlockStored`: a copy of each of some consecutive blocks was added to the cache.

    Attributes:
        parent_block_hash: Hash of the block before the first; None: the first block starts a prompt.
        token_ids: Tokens of all blocks, concatenated.
        extra_keys: By block, the other inputs of its KV, such as the adapter.
        group_idx: Group of layers that the blocks belong to; None if there is only one.
        kv_cache_spec_kind: Kind of these layers.
    """

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_name: str | None
    extra_keys: list[Any] | None
    group_idx: int | None
    kv_cache_spec_kind: str | None


@dataclass(slots=True, eq=False, repr=False)
class _Block:
    """One block of a prefix.

    Attributes:
        parent: The block before it; None: this is no block but the start of a prompt.
        names: Names that end in the block.
        last: Last name at or before its end.
        num_rest: Number of tokens after that name.
        tail: Those of them that are in the block.
        num_copies: Cached copies. A block without a copy is kept while blocks after it are cached.
        is_held: Whether a copy of this block and of every block before it is cached.
    """

    key: object
    parent: "_Block | None"
    names: list[int]
    last: int
    num_rest: int = 0
    tail: TokenArray = field(default_factory=lambda: token_array(()))
    num_copies: int = 0
    is_held: bool = False
    children: "list[_Block]" = field(default_factory=list)

    def rest(self) -> TokenArray:
        """Return the tokens after the last name."""
        rest, block = self.tail, self
        while not block.names and block.parent is not None:
            block = block.parent
            rest = block.tail + rest
        return rest


class CachedBlocks:
    """The blocks in one engine's prefix cache.

    Layers that keep only some blocks of a prompt are ignored if the model also has layers that keep all: a name then
    stands for the KV of the latter.

    Args:
        max_tracked: Limit of tracked blocks. Blocks beyond it have no names.

    Attributes:
        journal: Changes of the held prefixes, for routers.
    """

    def __init__(self, max_tracked: int = MAX_TRACKED) -> None:
        self.journal = PrefixJournal()
        self._blocks: dict[object, _Block] = {}
        self._max_tracked = max_tracked
        # Group whose blocks are tracked, and whether its layers keep all blocks; None before the first event.
        self._group: tuple[int | None, bool] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def on_stored(self, event: StoredEvent) -> None:
        """Add blocks. Blocks after an unknown parent are skipped: routers then know less than is cached."""
        size, hashes = event.block_size, event.block_hashes
        if not self._is_tracked(event) or len(event.token_ids) != size * len(hashes):
            return  # blocks outside a sliding window have no hash
        keys = [_keys_without_adapter(each, event) for each in event.extra_keys or ()]
        before: _Block | None = None
        if event.parent_block_hash is not None:
            before = self._blocks.get(event.parent_block_hash)
        elif (salt := _salt(keys[0] if keys else ())) is not None:
            name = root_name(scope_name(salt, event.lora_name or ""))
            before, keys[:1] = _Block(None, None, [], name, is_held=True), [()]
        tokens = token_array(event.token_ids)
        for number, block_hash in enumerate(hashes):
            if before is None or any(keys[number : number + 1]):
                return  # its KV depends on more than salt, adapter and tokens
            before = self._add(block_hash, before, tokens[number * size : (number + 1) * size])

    def on_removed(self, block_hashes: Sequence[object], group: int | None = None) -> None:
        """Remove a copy of each block. A block of another group than the tracked one is ignored."""
        if self._group is not None and group in (None, self._group[0]):
            for block_hash in block_hashes:
                self._remove(block_hash)

    def on_cleared(self) -> None:
        """Remove all blocks."""
        for block in self._blocks.values():
            if block.is_held:
                self._set_held(block, is_held=False)
        self._blocks.clear()
        self._group = None

    def _is_tracked(self, event: StoredEvent) -> bool:
        """Return whether the event is of the tracked group. Layers that keep all blocks replace those that do not."""
        keeps_all = event.kv_cache_spec_kind not in _PARTIAL_KINDS
        if self._group is None or (keeps_all and not self._group[1]):
            self.on_cleared()
            self._group = (event.group_idx, keeps_all)
        return event.group_idx == self._group[0]

    def _add(self, key: object, before: _Block, tokens: TokenArray) -> _Block | None:
        """Add a copy of a block. Return it, or None if it is not tracked."""
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= self._max_tracked:
                return None
            block = self._blocks[key] = _next_block(key, before, tokens)
            before.children.append(block)
        block.num_copies += 1
        if block.num_copies == 1 and block.parent is not None and block.parent.is_held:
            self._set_held(block, is_held=True)
        return block

    def _remove(self, key: object) -> None:
        block = self._blocks.get(key)
        if block is None or not block.num_copies:
            return
        block.num_copies -= 1
        if block.num_copies:
            return
        if block.is_held:
            self._set_held(block, is_held=False)
        while block.parent is not None and not block.num_copies and not block.children:
            del self._blocks[block.key]
            block.parent.children.remove(block)
            block = block.parent

    def _set_held(self, top: _Block, *, is_held: bool) -> None:
        """Record that a block and the blocks after it are held, or that they are not."""
        blocks = [top]
        while blocks:
            block = blocks.pop()
            block.is_held = is_held
            for name in block.names:
                if is_held:
                    self.journal.add(name)
                else:
                    self.journal.remove(name)
            blocks += [
                child for child in block.children if child.num_copies and child.is_held != is_held
            ]


def _next_block(key: object, before: _Block, tokens: TokenArray) -> _Block:
    num_rest = before.num_rest + len(tokens)
    if num_rest < BLOCK_TOKENS:
        return _Block(key, before, [], before.last, num_rest, tokens)
    rest = before.rest() + tokens
    names = names_between(before.last, rest, 0, num_rest)
    tail = rest[len(names) * BLOCK_TOKENS :]
    return _Block(key, before, names, names[-1], len(tail), tail)


def _keys_without_adapter(keys: Sequence[object] | None, event: StoredEvent) -> Sequence[object]:
    """Return a block's extra keys without the adapter, which is always the first."""
    return (keys or ())[0 if event.lora_name is None else 1 :]


def _salt(keys: Sequence[object]) -> str | None:
    """Return the cache salt of a prefix; None if its KV depends on more than salt, adapter and tokens."""
    match keys:
        case ():
            return ""
        case (("cache_salt", str(salt)),) | (str(salt),):  # vLLM 0.31 has the second
            return salt
        case _:
            return None
