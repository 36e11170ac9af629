"""The stack on real threads, with healthy and with faulty tiers."""

import random
import time
from collections import Counter

import pytest

from tandem.kvtier import guard, stack
from tandem.kvtier.disk import DiskTier
from tandem.kvtier.entry import HEADER_BYTES
from tandem.kvtier.host import HostTier
from tandem.kvtier.stack import Fetched, Placed, Saved
from tandem.kvtier.tier import NEVER_S, TierFailed
from tests.kvtier.fakes import (
    PAGE_BYTES,
    PAGE_SIZE,
    SPACE,
    FakePool,
    FakeTier,
    Hanging,
    Rig,
    content,
    failing,
    keys,
)
from tests.patience import PATIENCE_S, until

# Timeout of calls that must time out.
SOON_S = 0.2


def test_breaker_doubles_its_pause_after_each_failure_up_to_a_limit():
    breaker, now_s = guard.Breaker(), 1000.0
    for number in range(12):
        breaker.record_failure(now_s)
        breaker.record_failure(now_s)  # of a call that was already running: not counted again
        longest_s = min(guard.BREAKER_MAX_S, guard.BREAKER_FIRST_S * 2**number)
        assert longest_s / 2 <= breaker.until_s - now_s <= longest_s
        assert not breaker.allows(breaker.until_s - 0.001)
        now_s = breaker.until_s
        assert breaker.allows(now_s)
    breaker.is_up = True  # a failure long after is the first of its kind
    now_s += guard.BREAKER_MAX_S + 1
    breaker.record_failure(now_s)
    assert breaker.until_s - now_s <= guard.BREAKER_FIRST_S


def test_each_tier_is_searched_for_the_pages_that_faster_tiers_lack():
    fast, slow = FakeTier("fast"), FakeTier("slow")
    of = keys(5)
    fast.keep(of[:2])
    slow.keep(of[1:4])
    with Rig(fast, slow) as rig:
        assert rig.fetch(of) == Fetched(1, 4, {"fast": 2, "slow": 2})
        rig.stack.place(1, [7, 8, 9])
        assert rig.next() == Placed(1, True)
        assert [bytes(rig.pool.pages[i]) for i in (7, 8, 9)] == [content(key) for key in of[:3]]
        load, slow_load = rig.stack.loads()
        assert (load.hit_tokens, load.missed_tokens) == (2 * PAGE_SIZE, 3 * PAGE_SIZE)
        assert (slow_load.hit_tokens, slow_load.missed_tokens) == (PAGE_SIZE, PAGE_SIZE)
        assert slow_load.got_bytes == 2 * PAGE_BYTES
    assert not fast.num_open
    assert not slow.num_open


def test_all_pieces_of_a_long_prefix_count_for_their_tier(monkeypatch):
    monkeypatch.setattr(stack, "MAX_PUT_BYTES", 4 * PAGE_BYTES)
    tier = FakeTier("tier")
    of = keys(10)
    tier.keep(of)
    with Rig(tier) as rig:
        assert rig.fetch(of) == Fetched(1, 10, {"tier": 10})
        rig.stack.place(1, range(9))
        assert rig.next() == Placed(1, True)
        assert rig.stack.loads()[0].hit_tokens == 9 * PAGE_SIZE


def test_pages_from_a_slower_tier_are_put_into_faster_tiers():
    fast, middle, slow = FakeTier("fast"), FakeTier("middle"), FakeTier("slow")
    of = keys(3)
    slow.keep(of)
    with Rig(fast, middle, slow) as rig:
        rig.fetch(of)
        assert fast.was_put.wait(PATIENCE_S)
        assert middle.was_put.wait(PATIENCE_S)
        assert fast.store == middle.store == slow.store
        assert not slow.num_calls["put"]
        rig.stack.cancel(1)
        until(lambda: not slow.num_open)


def test_saved_pages_are_read_once_and_put_into_every_tier():
    fast, slow = FakeTier("fast"), FakeTier("slow")
    of = keys(4)
    with Rig(fast, slow) as rig:
        reads = []
        rig.pool.before_read = lambda: reads.append(1)
        assert rig.stack.save(3, of, rig.pool.fill(of))
        assert rig.next() == Saved(3)
        assert fast.was_put.wait(PATIENCE_S)
        assert slow.was_put.wait(PATIENCE_S)
        assert fast.store == slow.store == {key.digest: content(key) for key in of}
        assert len(reads) == 1


@pytest.fixture
def is_not_probed(monkeypatch):
    """Disable probes of failed tiers, for tests that count calls and loans."""
    monkeypatch.setattr(guard, "BREAKER_FIRST_S", PATIENCE_S)


@pytest.mark.usefixtures("is_not_probed")
def test_hanging_tier_delays_fetch_until_timeout_and_earlier_pages_are_kept():
    fast, slow = FakeTier("fast"), FakeTier("slow")
    of = keys(3)
    fast.keep(of[:1])
    slow.keep(of)
    hanging = Hanging(slow, "get")
    with Rig(fast, slow, timeout_s=SOON_S) as rig:
        begin_s = time.monotonic()
        assert rig.fetch(of) == Fetched(1, 1, {"fast": 1})
        assert time.monotonic() - begin_s >= SOON_S
        rig.stack.place(1, [0])
        assert rig.next() == Placed(1, True)
        assert rig.stack.loads()[1].state == "backing_off"
        assert rig.stack.loads()[1].num_failures == 1
        # The late answer has no request, and its memory is freed only now.
        assert rig.stack._fetch_budget.num_used == 2
        hanging.end()
        until(lambda: not rig.stack._fetch_budget.num_used)
        assert not slow.num_open


@pytest.mark.parametrize("call", ["get", "put"])
def test_hanging_tier_in_a_long_fetch_leaves_memory_for_other_tiers(monkeypatch, call):
    monkeypatch.setattr(stack, "MAX_PUT_BYTES", 16 * PAGE_BYTES)
    fast, slow = FakeTier("fast"), FakeTier("slow")
    of = keys(64)
    slow.keep(of)
    hanging = Hanging(fast, call)
    with Rig(fast, slow, timeout_s=5 * SOON_S, max_pages=64) as rig:
        assert rig.fetch(of).num_pages == (64 if call == "put" else 0)
        rig.stack.cancel(1)
        until(lambda: rig.stack._fetch_budget.num_used <= 64 // 3)
        rig.stack.fetch(2, of[:32])
        assert rig.next().num_pages >= 16
        rig.stack.cancel(2)
        hanging.end()
        until(lambda: not rig.stack._fetch_budget.num_used)


class SlowTier(FakeTier):
    """A tier that has read one page when the timeout expires."""

    def get(self, of, deadline_s=NEVER_S):
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        return super().get(of[:1])


def test_pages_read_before_the_timeout_are_kept():
    tier = SlowTier("tier")
    of = keys(3)
    tier.keep(of)
    with Rig(tier, timeout_s=8 * SOON_S) as rig:
        assert rig.fetch(of) == Fetched(1, 1, {"tier": 1})
        rig.stack.cancel(1)
        load = rig.stack.loads()[0]
        assert (load.late_tokens, load.missed_tokens, load.state) == (2 * PAGE_SIZE, 0, "up")


@pytest.mark.usefixtures("is_not_probed")
def test_tier_with_all_threads_hanging_delays_one_more_request(monkeypatch):
    monkeypatch.setattr(guard, "NUM_READERS", 2)
    fast, tier = FakeTier("fast"), FakeTier("tier")
    hanging = Hanging(tier, "get")
    # The remaining time of these requests is too short to detect that the tier hangs.
    fast.before = lambda call: time.sleep(0.7 * SOON_S)
    with Rig(fast, tier, timeout_s=SOON_S) as rig:
        for number in range(guard.NUM_READERS):
            rig.fetch(keys(1), number)
        fast.before = lambda call: None
        rig.fetch(keys(1), 8)
        assert rig.stack.loads()[1].state == "backing_off"
        # The stack does not wait for the tier again, so there is no second failure.
        assert rig.fetch(keys(1), 9) == Fetched(9, 0, {})
        assert rig.stack.loads()[1].num_failures == 1
        hanging.end()


@pytest.mark.usefixtures("is_not_probed")
@pytest.mark.parametrize("error", [TierFailed("away"), KeyError(1), SystemExit(3), OSError(5)])
def test_next_tier_is_searched_after_any_exception(error):
    bad, good = FakeTier("bad"), FakeTier("good")
    of = keys(2)
    good.keep(of)
    failing(bad, error)
    with Rig(bad, good) as rig:
        assert rig.fetch(of) == Fetched(1, 2, {"good": 2})
        assert rig.fetch(of, 2) == Fetched(2, 2, {"good": 2})
        assert bad.num_calls["get"] == 1  # no further call until its pause is over


def test_recovered_tier_is_detected_by_probes():
    tier = FakeTier("tier")
    of = keys(2)
    tier.keep(of)
    failing(tier)
    with Rig(tier) as rig:
        assert rig.fetch(of) == Fetched(1, 0, {})
        tier.before = lambda call: None
        until(lambda: rig.stack.loads()[0].state == "up")
        assert rig.fetch(of, 2) == Fetched(2, 2, {"tier": 2})


@pytest.mark.usefixtures("is_not_probed")
def test_page_of_wrong_length_is_not_lent():
    bad, good = FakeTier("bad", page_bytes=PAGE_BYTES - 1), FakeTier("good")
    of = keys(2)
    bad.keep(of)
    good.keep(of)
    with Rig(bad, good) as rig:
        assert rig.fetch(of) == Fetched(1, 2, {"good": 2})
        assert rig.stack.loads()[0].state == "backing_off"
    assert not bad.num_open


@pytest.mark.usefixtures("is_not_probed")
def test_tier_that_rejects_writes_is_still_read():
    tier = FakeTier("tier")
    of = keys(2)
    tier.keep(of)

    def refuse(call):
        if call == "put":
            raise TierFailed("full")

    tier.before = refuse
    with Rig(tier) as rig:
        others = keys(1, first_token=7)
        assert rig.stack.save(1, others, rig.pool.fill(others))
        assert rig.next() == Saved(1)
        until(lambda: rig.stack.loads()[0].state == "full")
        assert not rig.stack.save(2, others, [0])
        assert rig.fetch(of) == Fetched(1, 2, {"tier": 2})


def test_hanging_put_leaves_memory_for_other_tiers(monkeypatch):
    monkeypatch.setattr(guard, "PUT_LIMIT_S", SOON_S)
    slow, good = FakeTier("slow"), FakeTier("good")
    hanging = Hanging(slow, "put")
    with Rig(slow, good, max_pages=9) as rig:
        for number in range(6):
            of = keys(2, first_token=number)
            until(lambda: rig.stack._save_budget.num_used <= 7)
            assert rig.stack.save(number, of, rig.pool.fill(of))
            assert rig.next() == Saved(number)
            until(lambda of=of: of[1].digest in good.store)
        until(lambda: rig.stack.loads()[0].state == "full")
        assert rig.stack._memory.num_lent <= 3 + 2
        hanging.end()
        until(lambda: not rig.stack._save_budget.num_used)
        assert rig.stack.loads()[0].state == "up"


def test_saves_wait_in_stack_or_caller_for_a_slow_tier():
    slow = FakeTier("slow")
    hanging = Hanging(slow, "put")
    with Rig(slow, max_pages=8) as rig:
        assert rig.stack.save(1, keys(8), range(8))
        assert rig.next() == Saved(1)
        assert not rig.stack.save(2, keys(1), [0])
        in_vain, patient = keys(1, first_token=5), keys(1, first_token=7)
        assert rig.stack.save(2, in_vain, rig.pool.fill(in_vain), wait_s=0.01)
        assert rig.next() == Saved(2)
        assert rig.stack.save(3, patient, rig.pool.fill(patient), wait_s=PATIENCE_S)
        assert not rig.has_more()
        hanging.end()
        assert rig.next() == Saved(3)
        until(lambda: not rig.stack._save_budget.num_used)
    assert slow.store.keys() == {key.digest for key in keys(8) + patient}


def test_failed_copy_into_the_pool_is_reported_and_frees_its_memory():
    tier = FakeTier("tier")
    of = keys(2)
    tier.keep(of)
    with Rig(tier) as rig:

        def fail():
            raise RuntimeError("device lost")

        rig.pool.before_write = fail
        rig.fetch(of)
        rig.stack.place(1, [1, 2])
        assert rig.next() == Placed(1, False)
        until(lambda: not tier.num_open)
        assert not rig.stack.loads()[0].hit_tokens


def test_cancelled_fetch_frees_its_memory_even_after_fetched():
    tier = FakeTier("tier")
    of = keys(2)
    tier.keep(of)
    with Rig(tier) as rig:
        rig.stack.fetch(1, of)
        until(rig.has_more)
        rig.stack.cancel(1)
        until(lambda: not tier.num_open)


def test_fetches_without_memory_wait_in_order():
    tier = FakeTier("tier")
    of = keys(8)
    tier.keep(of)
    with Rig(tier, max_pages=8) as rig:
        assert rig.fetch(of, 1).num_pages == 8
        rig.stack.fetch(2, of[:5])
        rig.stack.fetch(3, of[:1])
        time.sleep(0.05)  # long enough for a get, if there were memory
        assert not rig.has_more()
        rig.stack.cancel(1)
        assert rig.next() == Fetched(2, 5, {"tier": 5})
        assert rig.next() == Fetched(3, 1, {"tier": 1})


def test_fetch_larger_than_memory_returns_the_pages_that_fit():
    tier = FakeTier("tier")
    tier.keep(keys(8))
    with Rig(tier, max_pages=5) as rig:
        assert rig.fetch(keys(8)) == Fetched(1, 5, {"tier": 5})


def test_close_does_not_wait_for_a_hanging_tier(monkeypatch):
    monkeypatch.setattr("tandem.kvtier.stack.CLOSE_S", 0.05)
    tier, good = FakeTier("tier"), FakeTier("good")
    tier.keep(keys(2))
    hanging = Hanging(tier, "get", "put")
    rig = Rig(good, tier)
    with rig:
        rig.stack.fetch(1, keys(2))
        assert hanging.begun.wait(PATIENCE_S)
        of = keys(1, first_token=5)
        rig.stack.save(2, of, rig.pool.fill(of))
    until(lambda: tier.is_closed and good.is_closed)  # each on its own thread
    before = [bytes(page) for page in rig.pool.pages]
    hanging.end()
    assert not rig.events()
    assert [bytes(page) for page in rig.pool.pages] == before


def test_evicted_pages_return_from_memory_and_after_restart_from_disk(tmp_path):
    of, pool = keys(6), FakePool()
    file_bytes = HEADER_BYTES + PAGE_BYTES

    def tiers():
        return (
            HostTier(pool, 4 * PAGE_BYTES),
            DiskTier(tmp_path, 99 * file_bytes, pool, SPACE),
        )

    with Rig(*tiers()) as rig:
        assert rig.stack.save(1, of, rig.pool.fill(of))
        assert rig.next() == Saved(1)
        until(lambda: not rig.stack._save_budget.num_used)
        assert rig.fetch(of, 2) == Fetched(2, 6, {"host": 4, "disk": 2})
        rig.stack.place(2, range(10, 16))
        assert rig.next() == Placed(2, True)
        assert rig.pool.pages[10:16] == [bytearray(content(key)) for key in of]
    with Rig(*tiers()) as rig:
        assert rig.fetch(of, 1) == Fetched(1, 6, {"disk": 6})
        rig.stack.place(1, range(6))
        assert rig.next() == Placed(1, True)
        assert rig.pool.pages[:6] == [bytearray(content(key)) for key in of]
        host, disk = rig.stack.loads()
        assert (host.hit_tokens, disk.hit_tokens) == (0, 6 * PAGE_SIZE)
        until(lambda: rig.stack.loads()[0].num_pages == 4)
        names = {name for key in of for name in key.blocks}
        assert set(rig.stack.journals()["disk"].since(0).added) == names


class FaultyTier(FakeTier):
    """A tier that raises, hangs or lends pages of a wrong length, as drawn at random."""

    def __init__(self, name, seed):
        super().__init__(name)
        self._draw = random.Random(seed)
        self.before = self._maybe_fail

    def _maybe_fail(self, call):
        match self._draw.randrange(12):
            case 0:
                raise TierFailed("away")
            case 1:
                raise SystemExit
            case 2:
                time.sleep(0.1)

    def get(self, of, deadline_s=NEVER_S):
        loan = super().get(of)
        if loan.pages and self._draw.randrange(6) == 0:
            loan.pages = [*loan.pages[:-1], loan.pages[-1][1:]]
        return loan


@pytest.mark.parametrize("seed", range(6))
def test_each_call_is_reported_once_and_all_memory_is_freed_with_random_tiers(seed, monkeypatch):
    monkeypatch.setattr(guard, "BREAKER_FIRST_S", 0.01)
    draw = random.Random(seed)
    tiers = [FaultyTier(name, seed + i) for i, name in enumerate(["fast", "middle", "slow"])]
    of = keys(12)
    for tier in tiers:
        tier.keep(of[: draw.randrange(13)])
    told, awaited = Counter(), Counter()
    cancelled, found = set(), []

    def look(rig):
        for event in rig.events():
            if isinstance(event, Fetched) and event.number in cancelled:
                continue
            told[type(event), event.number] += 1
            if isinstance(event, Fetched):
                found.append(event)

    with Rig(*tiers, timeout_s=0.05, max_pages=16) as rig:
        for number in range(120):
            if draw.random() < 0.3:
                if rig.stack.save(number, of, rig.pool.fill(of)):
                    awaited[Saved, number] = 1
            else:
                rig.stack.fetch(number, of[: draw.randrange(1, 13)])
                awaited[Fetched, number] = 1
                if draw.random() < 0.2:
                    rig.stack.cancel(number)
                    cancelled.add(number)
            look(rig)
            while found:
                event = found.pop()
                if draw.random() < 0.3:
                    rig.stack.cancel(event.number)
                else:
                    pages = range(20, 20 + event.num_pages)
                    rig.stack.place(event.number, pages)
                    awaited[Placed, event.number] = 1
            time.sleep(0.003)
        for number in cancelled:
            del awaited[Fetched, number]

        def is_over():
            look(rig)
            while found:
                rig.stack.cancel(found.pop().number)
            return told == awaited

        until(is_over)
        until(lambda: not rig.stack._fetch_budget.num_used)
        until(lambda: not rig.stack._save_budget.num_used)
        assert not rig.stack._memory.num_lent
        # A failed tier is probed periodically, independently of requests, until it answers.
        until(lambda: not any(tier.num_open for tier in tiers))
        # The pool contains only content that was stored under its key.
        assert all(
            bytes(rig.pool.pages[20 + i]) in {content(of[i]), bytes(PAGE_BYTES)} for i in range(12)
        )
