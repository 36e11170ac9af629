"""Page ownership, the prefix cache, and pages saved to tiers and adopted from them."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.pages.kv_cache import KVCache, PageStateError
from tandem.wire.prefixes import BLOCK_TOKENS, PageSpace, block_names, page_keys

PAGE = 4
SPACE = PageSpace("toy", "float32", PAGE)


def tiered(num_pages: int, page_size: int = PAGE) -> KVCache:
    """Return a cache with tiers."""
    return KVCache(num_pages, page_size, space=PageSpace("toy", "float32", page_size))


def put(cache: KVCache, tokens, salt=""):
    pages = cache.allocate(cache.num_pages_for(len(tokens)))
    cache.insert(tokens, pages, salt)
    cache.release(pages)
    return pages


# ── states of pages ──────────────────────────────────────────────────────────────────────────────


def test_granted_page_cannot_be_released():
    pool = KVCache(4, PAGE)
    pages = pool.grant(2)
    with pytest.raises(PageStateError, match="is granted: it must be held"):
        pool.release(pages)


def test_quarantined_page_is_not_allocated_until_reclaimed():
    pool = KVCache(2, PAGE)
    pages = pool.grant(2)
    pool.quarantine(pages)
    assert pool.allocate(1) is None
    pool.reclaim(pages)
    assert sorted(pool.allocate(2)) == [0, 1]


# ── the prefix cache ─────────────────────────────────────────────────────────────────────────────


def test_different_salts_do_not_share_prefixes():
    cache = KVCache(8, PAGE)
    put(cache, list(range(8)), salt="tenant a")
    assert cache.match(list(range(8)), "tenant b").page_ids == []
    assert cache.match(list(range(8)), "tenant a").num_tokens == 8


def test_least_recently_used_prefix_is_evicted_first_from_its_end():
    cache = KVCache(4, PAGE)
    put(cache, [1] * 8)
    put(cache, [2] * 8)
    cache.release(cache.match([1] * 8).page_ids)
    assert cache.allocate(1) is not None
    assert cache.match([1] * 8).num_tokens == 8
    assert cache.match([2] * 8).num_tokens == 4


def test_flush_frees_all_pages_without_readers():
    cache = KVCache(4, PAGE)
    put(cache, [1] * 8)
    in_use = cache.match([1] * 4)
    put(cache, [2] * 8)
    assert cache.flush() == 3
    assert cache.counts().held == len(in_use.page_ids) == 1


def test_disabled_prefix_cache_stores_nothing():
    cache = KVCache(4, PAGE, is_prefix_cache_enabled=False)
    put(cache, [1] * 8)
    assert cache.match([1] * 8).num_tokens == 0
    assert cache.counts().free == 4


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8))
def test_match_is_the_longest_inserted_prefix_in_whole_pages(sequences):
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


def test_page_reinserted_under_a_new_parent_is_reported_once():
    cache = KVCache(3, BLOCK_TOKENS)
    put(cache, [1] * BLOCK_TOKENS)
    tokens = [1] * BLOCK_TOKENS + [2] * BLOCK_TOKENS
    own = cache.allocate(2)  # a request that computes its own copy of the first page
    cache.insert(tokens, own)
    assert cache.allocate(1) is not None  # the cached copy is evicted while the request runs
    cache.insert(tokens, own)
    cache.release(own)
    assert cache.flush() == 2
    told = cache.journal.since(-1)
    assert told is not None
    assert told.added == []


@pytest.mark.parametrize("longer", [[], [3] * 4], ids=["extended", "split"])
def test_evicting_a_cached_copy_does_not_evict_what_a_request_holds_below_it(longer):
    cache = KVCache(8, PAGE)
    first, tokens = put(cache, [1] * 8 + longer), [1] * 8 + [2] * 4
    own = cache.allocate(3)  # the request computed its own copy of the first pages
    cache.insert(tokens, own)
    assert cache.match(tokens).page_ids == [*first[:2], own[2]]
    cache.release([*first[:2], own[2]])
    assert sorted(cache.allocate(5)) == sorted({*range(8)} - {*own})
    assert cache.match(tokens).page_ids == []
    cache.insert(tokens, own)
    cache.release(own)
    assert cache.match(tokens).page_ids == own


def test_unused_page_between_a_cached_copy_and_a_held_page_is_evicted_too():
    cache = KVCache(11, PAGE)
    put(cache, [1] * 8 + [3] * 4)
    # Two requests with their own copies of the first pages: the second continues what the first has left.
    first, second = [1] * 8 + [2] * 4, [1] * 8 + [2] * 8
    own, longer = cache.allocate(3), cache.allocate(4)
    cache.insert(first, own)
    cache.release(own)
    cache.insert(second, longer)
    assert cache.counts().cached == 4
    assert cache.flush() == 4
    assert (cache.counts().cached, cache.counts().held) == (0, 4)
    cache.release(longer)
    assert cache.counts().free == 11


@pytest.mark.parametrize("num_shared", [4, 8, 12])
def test_prompts_that_share_pages_of_a_run_keep_the_ids_of_both(num_shared):
    cache = KVCache(9, PAGE)
    long = list(range(16))
    pages = put(cache, long)
    other = [*long[:num_shared], *range(50, 54)]
    match = cache.match(other)
    assert match.page_ids == pages[: num_shared // PAGE]
    own = [*match.page_ids, *cache.allocate(1)]
    cache.insert(other, own)
    cache.release(own)
    for tokens, expected in ((long, pages), (other, own)):
        assert cache.match(tokens).page_ids == expected
        cache.release(expected)
    assert cache.flush() == 5


def test_continued_prompt_stays_one_run():
    cache = KVCache(64, PAGE)
    for length in range(PAGE, 33 * PAGE, PAGE):
        match = cache.match([7] * length)
        own = [*match.page_ids, *cache.allocate(1)]
        cache.insert([7] * length, own)
        cache.release(own)
    assert len(cache._prefixes._runs) == 1
    assert cache.flush() == 32


# ── tiers behind it ──────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 1), max_size=20), st.integers(0, 20), st.sampled_from(["", "a"]))
def test_missing_pages_have_the_same_keys_on_all_nodes(tokens, num_cached, salt):
    cache = tiered(8)
    put(cache, tokens[:num_cached], salt)
    expected = list(page_keys(SPACE, tokens, salt))
    first = min(num_cached, len(tokens)) // PAGE
    missing = cache.missing(tokens, salt)
    if missing is None:
        assert first == len(expected)
    else:
        assert missing.hash_slice()
        assert (missing.first_page, missing.num_pages) == (first, len(expected) - first)
        assert missing.keys == expected[first:]


@pytest.mark.parametrize("num_cached", [0, 3, 1023, 1024, 1025, 2048])
def test_keys_of_a_long_prompt_are_hashed_in_slices(num_cached):
    cache, tokens = tiered(2100), list(range(2049 * PAGE))
    put(cache, tokens[: num_cached * PAGE])
    missing = cache.missing(tokens)
    assert [missing.hash_slice() for _ in range(3)] == [False, False, True]
    assert missing.keys == list(page_keys(SPACE, tokens))[num_cached:]


def test_pages_to_save_have_content_keys_parents_first():
    cache = tiered(8)
    pages = put(cache, list(range(12)))
    taken = cache.begin_save(8, only_unused=True)
    assert list(taken) == pages
    assert list(taken.values()) == list(page_keys(SPACE, list(range(12))))


def test_block_names_are_the_same_with_and_without_tiers():
    size = 48  # does not divide a block's 128 tokens
    tokens = list(range(400))
    for space in (None, PageSpace("toy", "float32", size)):
        cache = KVCache(9, size, space=space)
        put(cache, tokens)
        assert cache.journal.since(0).added == block_names(tokens[: 8 * size])


def test_least_recently_used_prefix_is_saved_first_from_its_start():
    cache = tiered(8)
    older, newer = put(cache, [1] * 16), put(cache, [2] * 16)
    for only_unused in (True, False):
        assert list(cache.begin_save(2, only_unused=only_unused)) == older[:2]
        older = older[2:]
    assert list(cache.begin_save(8, only_unused=True)) == newer


def test_pages_with_readers_are_skipped_when_saving_before_eviction():
    cache = tiered(8)
    put(cache, [1] * 8)
    other = put(cache, [2] * 8)
    cache.match([1] * 8)
    assert list(cache.begin_save(8, only_unused=True)) == other


def test_only_pages_that_failed_to_save_are_returned_again():
    cache = tiered(8)
    pages = put(cache, [1] * 12)
    taken = list(cache.begin_save(2, only_unused=False))
    assert not set(cache.begin_save(8, only_unused=False)) & set(taken)
    cache.end_save(taken[:1])
    cache.end_save(taken[1:], is_saved=False)
    assert list(cache.begin_save(8, only_unused=False)) == taken[1:]
    assert set(taken) < set(pages)


def test_saving_does_not_change_the_eviction_order():
    cache = tiered(4)
    oldest = put(cache, [1] * 8)
    put(cache, [2] * 8)
    taken = cache.begin_save(2, only_unused=True)
    assert list(taken) == oldest
    assert cache.allocate(1) is not None  # skips the pages that are being saved
    cache.end_save(list(taken))
    assert cache.allocate(2) is not None
    assert cache.match([1] * 8).num_tokens == 0
    assert cache.match([2] * 8).num_tokens == 4


# ── all of it ────────────────────────────────────────────────────────────────────────────────────


SPACE_OF_TWO = PageSpace("toy", "float32", 2)


def prompts(min_size: int) -> st.SearchStrategy[list[int]]:
    """Return prompts that begin alike and part at any page, so that runs are split and extended."""
    whole = st.sampled_from(["0000000000", "0000000011", "0000001111", "0000110000", "0011111111"])
    length = st.integers(min_size, 10)
    return st.builds(lambda text, length: [int(char) for char in text[:length]], whole, length)


class OwnersOfPages(RuleBasedStateMachine):
    """Requests arrive, match, get grants, land, are withdrawn and end, and pages are saved and adopted, in any order."""

    def __init__(self):
        super().__init__()
        self.cache = tiered(12, 2)
        self.held: list[tuple[list[int], list[int]]] = []
        self.granted: list[tuple[list[int], bool]] = []
        self.saving: list[list[int]] = []
        self.placing: list[tuple[list[int], list[int], list[int]]] = []
        # The tokens whose KV was written last into each page, with all tokens before them.
        self.written: dict[int, list[int]] = {}

    def write(self, tokens, pages):
        for index, page in enumerate(pages):
            self.written[page] = tokens[: 2 * (index + 1)]

    def assert_written(self, tokens, pages):
        for index, page in enumerate(pages):
            assert self.written[page] == tokens[: 2 * (index + 1)]

    @rule(tokens=prompts(1))
    def admit(self, tokens):
        match = self.cache.match(tokens)
        self.assert_written(tokens, match.page_ids)
        own = self.cache.allocate(self.cache.num_pages_for(len(tokens)) - len(match.page_ids))
        if own is None:
            self.cache.release(match.page_ids)
        else:
            self.held.append((tokens, match.page_ids + own))
            self.write(tokens, match.page_ids + own)

    @rule(tokens=prompts(1))
    def compute_own_copy(self, tokens):
        """Requests that run together compute the same prefix, and cache what follows below one of the copies."""
        own = self.cache.allocate(self.cache.num_pages_for(len(tokens)))
        if own is not None:
            self.held.append((tokens, own))
            self.write(tokens, own)

    @rule(num_left=st.integers(0, 8))
    def take_available(self, num_left):
        num_pages = self.cache.num_available - num_left
        if num_pages > 0:
            pages = self.cache.allocate(num_pages)
            assert len(pages) == num_pages
            self.cache.check_integrity()
            self.cache.release(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        """A request whose prompt is computed shares it before it ends."""
        self.cache.insert(*data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_remembered=st.booleans())
    def end(self, data, is_remembered):
        tokens, pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if is_remembered:
            self.cache.insert(tokens, pages)
        self.cache.release(pages)

    @rule(num_pages=st.integers(1, 4))
    def grant(self, num_pages):
        pages = self.cache.grant(num_pages)
        if pages is not None:
            self.granted.append((pages, False))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), tokens=prompts(8))
    def land_or_withdraw(self, data, tokens):
        index = data.draw(st.integers(0, len(self.granted) - 1))
        pages, is_withdrawn = self.granted.pop(index)
        if is_withdrawn or data.draw(st.booleans()):
            self.cache.reclaim(pages)
        elif data.draw(st.booleans()):
            self.cache.quarantine(pages)
            self.granted.append((pages, True))
        else:
            self.cache.land(pages)
            self.held.append((tokens[: len(pages) * 2], pages))
            self.write(tokens, pages)

    @rule(num_pages=st.integers(1, 6), only_unused=st.booleans())
    def save(self, num_pages, only_unused):
        taken = self.cache.begin_save(num_pages, only_unused=only_unused)
        assert len(taken) <= num_pages
        for page, key in taken.items():
            assert key == list(page_keys(SPACE_OF_TWO, self.written[page]))[-1]
        if taken:
            self.saving.append(list(taken))

    @precondition(lambda self: self.saving)
    @rule(data=st.data(), is_saved=st.booleans())
    def saved(self, data, is_saved):
        pages = self.saving.pop(data.draw(st.integers(0, len(self.saving) - 1)))
        self.cache.end_save(pages, is_saved=is_saved)

    @rule(tokens=prompts(4))
    def place(self, tokens):
        missing = self.cache.missing(tokens)
        if missing is None:
            return
        matched = self.cache.match(tokens).page_ids
        assert len(matched) == missing.first_page
        placed = self.cache.allocate(missing.num_pages)
        if placed is None:
            self.cache.release(matched)
        else:
            self.placing.append((tokens, matched, placed))

    @precondition(lambda self: self.placing)
    @rule(data=st.data(), is_whole=st.booleans(), is_saved=st.booleans())
    def adopt(self, data, is_whole, is_saved):
        tokens, matched, placed = self.placing.pop(data.draw(st.integers(0, len(self.placing) - 1)))
        if not is_whole:
            self.cache.release([*matched, *placed])
            return
        self.write(tokens, [*matched, *placed])
        self.cache.adopt(tokens, matched, placed, is_saved=is_saved)
        match = self.cache.match(tokens)
        assert len(match.page_ids) == len(tokens) // 2
        self.assert_written(tokens, match.page_ids)
        self.cache.release(match.page_ids)

    @rule()
    def flush(self):
        self.cache.flush()
        assert self.cache.counts().cached == 0

    @invariant()
    def every_page_has_one_owner(self):
        self.cache.check_integrity()
        held = [pages for _, pages in self.held] + self.saving
        held += [[*matched, *placed] for _, matched, placed in self.placing]
        held = {page for pages in held for page in pages}
        granted = [page for pages, _ in self.granted for page in pages]
        counts = self.cache.counts()
        assert msgspec.json.encode(counts)  # sent to routers
        assert counts.held == len(held)
        assert len(granted) == len(set(granted)) == counts.granted + counts.quarantined
        assert not held & set(granted)
        being_saved = [page for pages in self.saving for page in pages]
        assert len(being_saved) == len(set(being_saved))

    def teardown(self):
        for _, pages in self.held:
            self.cache.release(pages)
        for pages in self.saving:
            self.cache.end_save(pages)
        for _, matched, placed in self.placing:
            self.cache.release([*matched, *placed])
        for pages, _ in self.granted:
            self.cache.reclaim(pages)
        self.cache.flush()
        self.cache.check_integrity()
        assert self.cache.counts().free == 12
        assert not self.cache._prefixes._roots
        assert self.cache.num_unsaved == 0


TestOwnersOfPages = OwnersOfPages.TestCase
TestOwnersOfPages.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
