"""Names of the prefixes that an engine has cached, from its KV events."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tandem.wire.events.cached import CachedBlocks
from tandem.wire.prefixes import block_names, scope_name

PROMPT = list(range(500))


@dataclass
class Stored:
    block_hashes: list
    parent_block_hash: object
    token_ids: list
    block_size: int
    lora_name: str | None = None
    extra_keys: list | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


@dataclass
class Pool:
    """Hashes each block with all tokens before it, as vLLM does."""

    size: int
    cached: CachedBlocks = field(default_factory=CachedBlocks)

    def hash_at(self, end):
        return hash(tuple(PROMPT[:end])) if end else None

    def store(self, first, last, **more):
        ends = range(first, last + 1, self.size)
        hashes = [self.hash_at(end) for _, end in pairwise(ends)]
        event = Stored(hashes, self.hash_at(first), PROMPT[first:last], self.size, **more)
        self.cached.on_stored(event)
        return hashes

    @property
    def names(self):
        changes = self.cached.journal.since(0)
        return set() if changes is None else set(changes.added)


@pytest.mark.parametrize("size", [16, 32, 48, 128, 240])
def test_block_names_equal_the_router_names_of_the_prompt(size):
    pool = Pool(size)
    half, whole = 240 // size * size, 480 // size * size
    pool.store(0, half)
    pool.store(half, whole)
    assert pool.names == set(block_names(PROMPT[:whole]))


def test_block_is_held_until_its_last_copy_is_removed():
    pool = Pool(32)
    hashes = pool.store(0, 256)
    assert pool.store(128, 256) == hashes[4:]
    pool.cached.on_removed(hashes[4:])
    assert pool.names == set(block_names(PROMPT[:256]))
    pool.cached.on_removed(hashes[-1:])
    assert pool.names == set(block_names(PROMPT[:128]))


def test_blocks_behind_a_missing_one_are_held_again_with_it():
    pool = Pool(48)
    hashes = pool.store(0, 480)
    pool.cached.on_removed([hashes[3]])
    assert pool.names == set(block_names(PROMPT[:144]))
    pool.cached.on_removed([hashes[9]])
    pool.store(144, 192)
    assert pool.names == set(block_names(PROMPT[:432]))
    pool.cached.on_removed(hashes)
    assert len(pool.cached) == 0


def test_layers_that_keep_all_blocks_decide():
    pool = Pool(32)
    hashes = pool.store(0, 256, group_idx=0, kv_cache_spec_kind="sliding_window")
    pool.store(0, 256, group_idx=1, kv_cache_spec_kind="full_attention")
    pool.store(256, 384, group_idx=0, kv_cache_spec_kind="sliding_window")
    pool.cached.on_removed(hashes, 0)
    assert pool.names == set(block_names(PROMPT[:256]))
    pool.cached.on_removed(hashes[4:], 1)
    assert pool.names == set(block_names(PROMPT[:128]))


def test_blocks_beyond_the_limit_are_not_tracked():
    pool = Pool(32, CachedBlocks(max_tracked=6))
    hashes = pool.store(0, 256)
    assert pool.names == set(block_names(PROMPT[:192]))
    pool.cached.on_removed(hashes)
    assert len(pool.cached) == 0


def test_cleared_cache_has_no_names():
    pool = Pool(32)
    pool.store(0, 256)
    pool.cached.on_cleared()
    assert pool.names == set()


ADAPTER = ("lora", "sql", "/adapters/sql")


@pytest.mark.parametrize(
    ("key", "adapter"), [("tenant", "sql"), (("cache_salt", "tenant"), ADAPTER)]
)
def test_names_depend_on_salt_and_adapter(key, adapter):
    salted = Pool(32)
    salted.store(0, 128, extra_keys=[(key,), None, None, None])
    assert salted.names == set(block_names(PROMPT[:128], "tenant"))
    adapted = Pool(32)
    adapted.store(0, 96, extra_keys=[(adapter,)] * 3, lora_name="sql")
    adapted.store(96, 128, extra_keys=[(adapter,)], lora_name="sql")
    assert adapted.names == set(block_names(PROMPT[:128], scope_name("", "sql")))
    both = Pool(32)
    both.store(0, 128, extra_keys=[(adapter, key), *[(adapter,)] * 3], lora_name="sql")
    assert both.names == set(block_names(PROMPT[:128], scope_name("tenant", "sql")))
    assert not (salted.names & adapted.names)


@pytest.mark.parametrize(
    "more",
    [
        {"extra_keys": [None, None, (("image", 0),), None]},
        {"extra_keys": [(("image", 0), ("cache_salt", "tenant")), None, None, None]},
    ],
)
def test_blocks_with_other_extra_keys_are_not_named(more):
    pool = Pool(32)
    pool.store(0, 128, **more)
    assert pool.names == set()


def test_blocks_before_other_extra_keys_are_named():
    pool = Pool(32)
    pool.store(0, 256, extra_keys=[None] * 5 + [(("image", 0),)] + [None] * 2)
    assert pool.names == set(block_names(PROMPT[:128]))


def test_blocks_after_an_unknown_parent_are_not_named():
    pool = Pool(32)
    pool.store(128, 256)
    assert pool.names == set()
