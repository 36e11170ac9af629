import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.kv_cache import KVCache
from tandem.engine.pages import PagePool, PageState, PageStateError

NUM_PAGES = 12
PAGE_SIZE = 2


def test_a_granted_page_cannot_be_released_as_if_it_were_held():
    pool = PagePool(4)
    pages = pool.grant(2)
    with pytest.raises(PageStateError, match="is granted, must be held"):
        pool.release(pages, lambda _page: False)


def test_a_quarantined_page_is_not_handed_out_until_its_writer_is_cut_off():
    pool = PagePool(2)
    pages = pool.grant(2)
    pool.quarantine(pages)
    assert pool.allocate(1) is None
    pool.reclaim(pages)
    assert sorted(pool.allocate(2)) == [0, 1]


def test_a_landed_page_cannot_be_landed_twice():
    pool = PagePool(1)
    pages = pool.grant(1)
    pool.land(pages)
    with pytest.raises(PageStateError):
        pool.land(pages)


def test_a_page_with_two_readers_is_free_after_the_second_lets_go():
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.hold(pages)
    pool.release(pages, lambda _page: False)
    assert pool.state(0) is PageState.HELD
    pool.release(pages, lambda _page: False)
    assert pool.state(0) is PageState.FREE


def test_too_few_pages_take_none():
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.counts().free == 3


def test_integrity_names_a_page_whose_state_and_readers_disagree():
    pool = PagePool(2)
    pool.allocate(1)
    pool._readers[0] = 0
    with pytest.raises(PageStateError, match="page 0 is held with 0 readers"):
        pool.check_integrity()


class OwnersOfPages(RuleBasedStateMachine):
    """Requests come, match, grow, get grants, land, are withdrawn and end, in any order."""

    def __init__(self):
        super().__init__()
        self.cache = KVCache(NUM_PAGES, PAGE_SIZE)
        self.held: list[tuple[list[int], list[int]]] = []
        self.granted: list[tuple[list[int], bool]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def admit(self, tokens):
        match = self.cache.match(tokens)
        own = self.cache.allocate(self.cache.num_pages_for(len(tokens)) - len(match.page_ids))
        if own is None:
            self.cache.release(match.page_ids)
        else:
            self.held.append((tokens, match.page_ids + own))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_remembered=st.booleans())
    def end(self, data, is_remembered):
        tokens, pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if is_remembered:
            self.cache.remember(tokens, pages)
        self.cache.release(pages)

    @rule(num_pages=st.integers(1, 4))
    def grant(self, num_pages):
        pages = self.cache.grant(num_pages)
        if pages is not None:
            self.granted.append((pages, False))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=8, max_size=8))
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
            self.held.append((tokens[: len(pages) * PAGE_SIZE], pages))

    @rule()
    def flush(self):
        self.cache.flush()

    @invariant()
    def every_page_has_one_owner(self):
        self.cache.check_integrity()
        counts = self.cache.counts()
        granted = [page for pages, _ in self.granted for page in pages]
        held = {page for _, pages in self.held for page in pages}
        assert len(granted) == len(set(granted)) == counts.granted + counts.quarantined
        assert counts.held == len(held)
        assert not held & set(granted)


TestOwnersOfPages = OwnersOfPages.TestCase
TestOwnersOfPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
