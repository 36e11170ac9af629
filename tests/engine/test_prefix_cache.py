from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.kv_cache import KVCache
from tandem.wire.prefix_blocks import BLOCK_TOKENS

PAGE = 4


def put(cache: KVCache, tokens, salt=""):
    pages = cache.allocate(cache.num_pages_for(len(tokens)))
    cache.remember(tokens, pages, salt)
    cache.release(pages)
    return pages


def test_a_match_covers_whole_pages_only():
    cache = KVCache(8, PAGE)
    pages = put(cache, list(range(10)))
    match = cache.match([*range(9), 99])
    assert (match.page_ids, match.num_tokens) == (pages[:2], 8)


def test_the_last_partial_page_goes_free_when_its_request_ends():
    cache = KVCache(8, PAGE)
    put(cache, list(range(10)))
    assert (cache.counts().cached, cache.counts().free) == (2, 6)


def test_another_salt_shares_nothing():
    cache = KVCache(8, PAGE)
    put(cache, list(range(8)), salt="tenant a")
    assert cache.match(list(range(8)), "tenant b").page_ids == []
    assert cache.match(list(range(8)), "tenant a").num_tokens == 8


def test_the_same_page_after_another_prefix_is_another_page():
    cache = KVCache(8, PAGE)
    put(cache, [1] * PAGE + [5] * PAGE)
    assert cache.match([2] * PAGE + [5] * PAGE).page_ids == []


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end():
    cache = KVCache(4, PAGE)
    put(cache, [1] * 8)
    put(cache, [2] * 8)
    cache.release(cache.match([1] * 8).page_ids)
    assert cache.allocate(1) is not None
    assert cache.match([1] * 8).num_tokens == 8
    assert cache.match([2] * 8).num_tokens == 4


def test_a_prefix_in_use_is_not_evicted():
    cache = KVCache(2, PAGE)
    put(cache, [1] * 8)
    cache.match([1] * 8)
    assert cache.allocate(1) is None


def test_flushing_frees_all_that_nobody_reads():
    cache = KVCache(4, PAGE)
    put(cache, [1] * 8)
    in_use = cache.match([1] * 4)
    put(cache, [2] * 8)
    assert cache.flush() == 3
    assert cache.counts().held == len(in_use.page_ids) == 1


def test_a_disabled_cache_remembers_nothing():
    cache = KVCache(4, PAGE, is_prefix_cache_enabled=False)
    put(cache, [1] * 8)
    assert cache.match([1] * 8).num_tokens == 0
    assert cache.counts().free == 4


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8))
def test_a_match_is_the_longest_prefix_in_pages_of_what_was_put_in(sequences):
    cache = KVCache(200, PAGE)
    for tokens in sequences[:-1]:
        put(cache, tokens)
    wanted = sequences[-1]
    longest = max(
        (
            n
            for tokens in sequences[:-1]
            for n in range(0, len(tokens) + 1, PAGE)
            if tokens[:n] == wanted[:n] and n <= len(wanted)
        ),
        default=0,
    )
    assert cache.match(wanted).num_tokens == longest


def test_a_page_cached_anew_behind_another_parent_is_told_of_once():
    cache = KVCache(3, BLOCK_TOKENS)
    put(cache, [1] * BLOCK_TOKENS)
    tokens = [1] * BLOCK_TOKENS + [2] * BLOCK_TOKENS
    own = cache.allocate(2)  # of a request that computes its own copy of the first page
    cache.remember(tokens, own)
    assert cache.allocate(1) is not None  # the cached copy is evicted while the request goes on
    cache.remember(tokens, own)
    cache.release(own)
    assert cache.flush() == 2
    told = cache.journal.since(-1)
    assert told is not None
    assert told.added == []
