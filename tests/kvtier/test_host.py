import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kvtier.host import HostTier
from tandem.wire.errors import ConfigInvalid
from tests.kvtier.fakes import PAGE_BYTES, FakePool, content, keys, views
from tests.patience import PATIENCE_S


def tier_of(num_pages, spare_bytes=0):
    return HostTier(FakePool(), num_pages * PAGE_BYTES + spare_bytes)


def num_kept(tier, of):
    """Return the number of leading pages that are stored; this marks them as used."""
    loan = tier.get(of)
    loan.release()
    return len(loan.pages)


def kept(tier, of):
    return [num_kept(tier, [key]) == 1 for key in of]


def names(of):
    return {name for key in of for name in key.blocks}


def test_stored_page_is_lent_byte_for_byte():
    tier, of = tier_of(4), keys(3)
    assert tier.put(of, views(of)) == 3
    assert tier.put(of, views(of)) == 0
    loan = tier.get(keys(5))
    assert [bytes(page) for page in loan.pages] == [content(key) for key in of]


def test_memory_stays_within_the_limit():
    pool = FakePool()
    tier = HostTier(pool, 4 * PAGE_BYTES + PAGE_BYTES - 1)
    assert pool.num_host_bytes == 4 * PAGE_BYTES
    for number in range(9):
        of = keys(1, first_token=number)
        tier.put(of, views(of))
    assert tier.load().num_pages == 4
    assert tier.load().num_evicted == 5
    assert pool.num_host_bytes == 4 * PAGE_BYTES


def test_limit_below_one_page_is_rejected_at_start():
    with pytest.raises(ConfigInvalid, match=f"a KV page takes {PAGE_BYTES} bytes"):
        HostTier(FakePool(), PAGE_BYTES - 1)


def test_parents_outlive_their_children():
    tier, run, other = tier_of(4), keys(4), keys(2, first_token=7)
    tier.put(run, views(run))
    tier.put(other, views(other))
    assert kept(tier, run) == [True, True, False, False]


def test_least_recently_used_page_is_evicted_first():
    tier, old, young, new = tier_of(4), keys(2), keys(2, first_token=7), keys(2, first_token=9)
    tier.put(old, views(old))
    tier.put(young, views(young))
    tier.get(old).release()
    tier.put(new, views(new))
    assert kept(tier, old + young + new) == [True, True, False, False, True, True]


def test_lent_pages_are_neither_evicted_nor_overwritten():
    tier, run = tier_of(2), keys(2)
    tier.put(run, views(run))
    loan = tier.get(run)
    other = keys(2, first_token=7)
    assert tier.put(other, views(other)) == 0
    assert [bytes(page) for page in loan.pages] == [content(key) for key in run]
    loan.release()
    assert tier.put(other, views(other)) == 2


def test_journal_follows_puts_and_evictions():
    tier, run, other = tier_of(4), keys(4), keys(2, first_token=7)
    tier.put(run, views(run))
    assert set(tier.journal.since(0).added) == names(run)
    position = tier.journal.position
    tier.put(other, views(other))
    changes = tier.journal.since(position)
    assert set(changes.removed) == names(run[2:])
    assert set(changes.added) == names(other)


def test_partially_copied_page_is_a_miss(monkeypatch):
    tier, run = tier_of(4), keys(1)
    begun, go = threading.Event(), threading.Event()

    def copy(source, into):
        begun.set()
        assert go.wait(PATIENCE_S)
        into[:] = source

    monkeypatch.setattr("tandem.kvtier.host.copy_page", copy)
    putter = threading.Thread(target=tier.put, args=(run, views(run)))
    putter.start()
    assert begun.wait(PATIENCE_S)
    # No lock is held meanwhile.
    assert num_kept(tier, run) == 0
    assert tier.put(run, views(run)) == 0
    go.set()
    putter.join()
    assert num_kept(tier, run) == 1


def test_failed_put_frees_its_slots():
    tier, run = tier_of(2), keys(2)
    with pytest.raises(ValueError, match="broadcast"):
        tier.put(run, [views(run)[0], memoryview(bytes(PAGE_BYTES - 1))])
    assert num_kept(tier, run) == 1
    assert tier.put(run, views(run)) == 1


ACTIONS = st.tuples(st.sampled_from(["put", "get", "close"]), st.integers(0, 3), st.integers(0, 7))


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_lent_pages_do_not_change_and_no_slot_is_lost(actions):
    tier, loans = tier_of(5), []
    for action, which, num in actions:
        run = keys(num, first_token=which)
        if action == "put":
            tier.put(run, views(run))
        elif action == "get":
            loans.append((tier.get(run), run))
        elif loans:
            loans.pop(num % len(loans))[0].release()
        for loan, lent in loans:
            assert all(bytes(p) == content(k) for p, k in zip(loan.pages, lent, strict=False))
        assert len(tier._free) + len(tier._kept) == 5
    for loan, _ in loans:
        loan.release()
    last = keys(5, first_token=99)
    assert tier.put(last, views(last)) == 5
    assert set(tier.journal.since(-1).added) == names(last)
