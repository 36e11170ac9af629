"""Hashes of prefixes: keys of pages, names of blocks, and the changes reported to routers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.pages.kv_cache import KVCache
from tandem.wire.prefixes import (
    BLOCK_TOKENS,
    KEY_BYTES,
    PageSpace,
    PrefixJournal,
    block_names,
    page_keys,
    shard_key,
)

SPACE = PageSpace("llama-2layers-abc", "bfloat16", 16)
TOKENS = st.lists(st.integers(0, 2**31), max_size=300)


@given(TOKENS, st.sampled_from([1, 16, 48, 256]))
def test_page_keys_list_every_block_that_ends_in_the_page(tokens, page_size):
    keys = list(page_keys(replace(SPACE, page_size=page_size), tokens, "salt"))
    assert len(keys) == len(tokens) // page_size
    names = [name for key in keys for name in key.blocks]
    assert names == block_names(tokens[: len(keys) * page_size], "salt")


@given(TOKENS, TOKENS)
def test_prefixes_share_keys_exactly_as_far_as_they_share_pages(one, other):
    ours, theirs = list(page_keys(SPACE, one)), list(page_keys(SPACE, other))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (one[: number * 16] == other[: number * 16])


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, fingerprint="llama-2layers-abd"),
        replace(SPACE, kv_dtype="float8_e4m3fn"),
        replace(SPACE, page_size=8),
        replace(SPACE, shard="0/2"),
        replace(SPACE, fingerprint="llama-2layers-abcb", kv_dtype="float16"),
    ],
)
def test_keys_differ_by_model_dtype_page_size_and_shard(other):
    tokens = list(range(16))
    assert next(page_keys(SPACE, tokens)).digest != next(page_keys(other, tokens)).digest


def test_tenants_share_no_keys():
    tokens = list(range(64))
    ours = {key.digest for key in page_keys(SPACE, tokens, "ours")}
    assert not ours & {key.digest for key in page_keys(SPACE, tokens, "theirs")}
    assert not ours & {key.digest for key in page_keys(SPACE, tokens)}


def test_shard_keys_differ_by_rank_and_number_of_ranks():
    tokens = range(64)
    names = [key.digest for key in page_keys(SPACE, tokens)]
    for size in (2, 4):
        own = [key.digest for key in page_keys(replace(SPACE, shard=f"0/{size}"), tokens)]
        names += own
        for rank in range(1, size):
            names += [shard_key(digest, f"{rank}/{size}") for digest in own]
    assert len(set(names)) == len(names) == 4 * (1 + 2 + 4)
    assert {len(name) for name in names} == {KEY_BYTES}


def reported(cache: KVCache) -> set[int]:
    """Return the blocks reported to a new router."""
    changes = cache.journal.since(0)
    return set(changes.added) if changes else set()


def put(cache: KVCache, tokens, salt="") -> None:
    match = cache.match(tokens, salt)
    own = cache.allocate(cache.num_pages_for(len(tokens)) - len(match.page_ids))
    pages = [*match.page_ids, *own]
    cache.insert(tokens, pages, salt)
    cache.release(pages)


@pytest.mark.parametrize("page_size", [1, 16, 48, 128, 200, 256])
def test_cache_reports_the_routers_block_names_for_every_page_size(page_size):
    cache = KVCache(4000, page_size)
    tokens = [i % 50 for i in range(7 * BLOCK_TOKENS + 5)]
    put(cache, tokens[: 3 * BLOCK_TOKENS + 70])
    put(cache, tokens, salt="tenant")
    put(cache, tokens)
    whole_pages = len(tokens) // page_size * page_size
    num_reported = whole_pages // BLOCK_TOKENS
    assert reported(cache) == {
        *block_names(tokens)[:num_reported],
        *block_names(tokens, "tenant")[:num_reported],
    }


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=12
    )
)
def test_reported_blocks_equal_what_match_finds(prompts):
    """The pool is too small for all prompts, so evictions are reported too."""
    page_size = BLOCK_TOKENS // 2
    cache = KVCache(18, page_size)
    sequences = [
        [0] * (num_shared * page_size) + [kind] * (length * BLOCK_TOKENS)
        for num_shared, kind, length in prompts
    ]
    for tokens in sequences:
        put(cache, tokens)
    for tokens in sequences:
        match = cache.match(tokens)
        names = block_names(tokens)
        num_reported = match.num_tokens // BLOCK_TOKENS
        assert [name in reported(cache) for name in names] == [
            number < num_reported for number in range(len(names))
        ]
        cache.release(match.page_ids)


def test_flushed_cache_reports_an_empty_full_set():
    cache = KVCache(40, 16)
    put(cache, [1] * 300)
    assert len(reported(cache)) == 2
    position = cache.journal.position
    cache.flush()
    changes = cache.journal.since(position)
    assert (changes.is_whole, changes.added) == (True, [])


def test_position_of_another_life_gets_the_full_set():
    journal = PrefixJournal()
    journal.add(5)
    changes = journal.since(99)
    assert (changes.is_whole, changes.added, changes.position) == (True, [5], 1)


def test_block_in_two_pages_stays_cached_until_both_are_evicted():
    journal = PrefixJournal()
    journal.add(5)
    journal.add(5)
    journal.remove(5)
    assert journal.since(0).added == [5]
    for other in range(3):
        journal.add(other)
    position = journal.position
    journal.remove(5)
    assert journal.since(position).removed == [5]


def test_blocks_beyond_the_limit_are_not_reported():
    journal = PrefixJournal(max_blocks=2)
    for name in range(4):
        journal.add(name)
    journal.remove(3)
    assert journal.since(0).added == [0, 1]
    journal.remove(0)
    journal.add(3)
    assert set(journal.since(-1).added) == {1, 3}
