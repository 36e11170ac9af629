"""Pages in memory that nodes lend to each other, with a real master, and its failures."""

import re
import threading

import pytest
import tandem_mooncake_store
from tandem_mooncake_store import (
    TIMEOUT_S,
    TRANSFER_FAILED,
    MooncakeAddress,
    MooncakeTier,
    parse_url,
)

from tandem.kvtier.entry import HEADER_BYTES, header_of
from tandem.kvtier.tier import TierFailed
from tandem.wire.errors import ConfigInvalid
from tests.contrib.mooncake_master import MooncakeMaster, a_lender, a_master
from tests.kvtier.pool import PAGE_BYTES, SPACE, SmallPool, some_keys, some_pages
from tests.patience import Clock

LENDS = "?segment=64MiB"
ENTRY_BYTES = HEADER_BYTES + PAGE_BYTES


@pytest.fixture
def master():
    with a_master() as one:
        yield one


@pytest.fixture(scope="module")
def tier():
    """One that nothing fails about; its keys are under salts of their own. To leave a store takes seconds."""
    with a_master() as master:
        one = MooncakeTier("mooncake", parse_url(master.url + LENDS), SmallPool(), SPACE)
        yield one
        one.close()


@pytest.fixture
def tier_at():
    """Return a function that makes a tier, closed at the end."""
    made = []

    def make(url: str, clock: Clock | None = None) -> MooncakeTier:
        address = parse_url(url)
        made.append(MooncakeTier("mooncake", address, SmallPool(), SPACE, clock=clock or Clock()))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def got(tier, keys) -> list[bytes]:
    loan = tier.get(keys)
    pages = [bytes(page) for page in loan.pages]
    loan.release()
    return pages


def told(tier) -> set[int]:
    changes = tier.journal.since(-1)
    return set(changes.added) if changes else set()


def test_pages_of_another_process_can_be_read_until_it_dies(master, tier_at):
    tier, keys, pages = tier_at(master.url), some_keys(100), some_pages(100)
    with a_lender(master, 100) as lender:
        assert got(tier, keys) == pages
        assert told(tier) == {block for key in keys for block in key.blocks}
        assert tier.load().store == f"mooncake:127.0.0.1:{master.port}-{SPACE.name}"
        lender.kill()
        lender.wait()
        assert got(tier, keys) == []
        assert not told(tier) & set(keys[0].blocks)
        assert tier.load().num_corrupted == 0


def test_stored_pages_are_not_rewritten_and_a_missing_page_ends_the_run(tier):
    keys, pages = some_keys(300), some_pages(300)
    assert tier.put(keys[:4], pages[:4]) == 4
    assert tier.put(keys, pages) == 296
    assert got(tier, keys + some_keys(2, "other")) == pages
    assert got(tier, some_keys(2, "other")) == []


def test_corrupted_value_is_removed_and_not_returned(tier):
    keys, pages = some_keys(3, "wrong"), some_pages(3)
    tier.put([keys[0], keys[2]], [pages[0], pages[2]])
    wrong = [
        b"short",
        bytes(ENTRY_BYTES),
        header_of(keys[2], pages[2]) + pages[2],
        bytes(1 << 20),
    ]
    for num_wrong, value in enumerate(wrong, 1):
        with tier._call() as client:
            client.put(f"tandem:kv:1:{keys[1].digest.hex()}", value)
        assert got(tier, keys) == pages[:1]
        assert tier.load().num_corrupted == num_wrong
    assert tier.put(keys, pages) == 1
    assert got(tier, keys) == pages


def test_store_without_lenders_is_full(master, tier_at):
    clock = Clock()
    tier = tier_at(master.url, clock)
    keys, pages = some_keys(3), some_pages(3)
    assert tier.put(keys, pages) == 0
    assert tier.load().state == "full"
    clock.now_s += 60
    assert tier.load().state == "up"
    tier_at(master.url + LENDS).get(keys)
    assert tier.put(keys, pages) == 3


def test_calls_fail_immediately_without_a_master_and_work_when_it_returns(tier_at):
    master = MooncakeMaster()
    tier, keys = tier_at(master.url), some_keys(4)
    with pytest.raises(TierFailed, match=f"127.0.0.1:{master.port}.*refused"):
        tier.get(keys)
    master.start()
    try:
        with a_lender(master, 4):
            assert got(tier, keys) == some_pages(4)
            master.kill()
        for call in (tier.get, lambda keys: tier.put(keys, some_pages(4))):
            with pytest.raises(TierFailed, match="does not answer"):
                call(keys)
        assert told(tier) == set()
        master.start()
        assert got(tier, keys) == []
    finally:
        master.kill()


def test_while_a_call_hangs_no_other_is_made(master, tier_at):
    clock = Clock()
    tier, keys = tier_at(master.url, clock), some_keys(4)
    got(tier, keys)
    master.freeze()
    hangs = threading.Thread(target=tier.get, args=[keys])
    hangs.start()
    while not tier._began:
        pass
    clock.now_s += TIMEOUT_S * 2
    with pytest.raises(TierFailed, match="waiting for 4 s"):
        tier.get(keys)
    master.thaw()
    hangs.join()
    assert got(tier, keys) == []


class Library:
    """The library, in which each transfer takes so long and ends like this."""

    def __init__(self, clock, takes_s=50.0, code=TRANSFER_FAILED):
        self.clock, self.takes_s, self.code = clock, takes_s, code
        self.addresses = []
        self.num_registered, self.is_full = 0, False

    def register_buffer(self, address, num_bytes):
        self.num_registered += not self.is_full
        return -1 if self.is_full else 0

    def batch_is_exist(self, names):
        return [0] * len(names)

    def batch_get_into(self, names, addresses, lengths):
        self.clock.now_s += self.takes_s
        self.addresses.append(set(addresses))
        if isinstance(self.code, Exception):
            raise self.code
        return [self.code] * len(names)

    batch_put_from = batch_get_into

    def remove(self, name, is_forced):
        return 0

    def unregister_buffer(self, address):
        return 0

    def close(self):
        return 0


@pytest.fixture
def tier_of(tier_at):
    """Return a function that makes a tier with a scripted library."""

    def make(**script):
        clock = Clock()
        tier = tier_at("mooncake://nowhere", clock)
        tier._client = Library(clock, **script)
        return tier, tier._client

    return make


def got_nothing(tier):
    assert got(tier, some_keys(4)) == []


def put_nothing(tier):
    assert tier.put(some_keys(4), some_pages(4)) == 0


@pytest.mark.parametrize("code", [TRANSFER_FAILED, -1])
@pytest.mark.parametrize("call", [got_nothing, put_nothing])
def test_memory_that_the_library_may_still_access_is_not_reused(tier_of, call, code):
    tier, library = tier_of(code=code)
    for _ in range(2):
        call(tier)
    assert not library.addresses[0] & library.addresses[1]


@pytest.mark.parametrize("call", [got_nothing, put_nothing])
def test_memory_of_a_transfer_that_failed_in_time_is_reused(tier_of, call):
    tier, library = tier_of(takes_s=0.0)
    for _ in range(2):
        call(tier)
    assert library.addresses[0] == library.addresses[1]


@pytest.mark.parametrize("call", [got_nothing, put_nothing])
def test_memory_of_a_call_that_raised_may_still_be_accessed(tier_of, call):
    tier, library = tier_of(takes_s=0.0, code=RuntimeError("no such name"))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            call(tier)
    assert not library.addresses[0] & library.addresses[1]


def test_tier_with_too_much_memory_set_aside_fails_and_allocates_no_more(tier_of, monkeypatch):
    monkeypatch.setattr(tandem_mooncake_store, "MAX_ASIDE_BYTES", 8 * ENTRY_BYTES)
    tier, library = tier_of()
    for _ in range(2):
        put_nothing(tier)
    for call in (got_nothing, put_nothing):
        with pytest.raises(TierFailed, match="restart this node"):
            call(tier)
    assert len(library.addresses) == 2


def test_pieces_of_a_put_that_could_not_be_prepared_are_reused(tier_of):
    tier, library = tier_of(takes_s=0.0)
    for _ in range(2 * tier._num_at_once):
        with pytest.raises(ValueError, match="different structures"):
            tier.put(some_keys(1), [memoryview(b"no page")])
    assert library.num_registered == 1


def test_pieces_are_reused_if_there_is_no_memory_for_the_last_one(tier_of):
    tier, library = tier_of(takes_s=0.0)
    held = [tier._memory.take() for _ in range(2)]
    library.is_full = True
    with pytest.raises(TierFailed, match="could not be registered"):
        tier.put(some_keys(tier._num_at_once), some_pages(tier._num_at_once))
    tier._memory.release(held)
    put_nothing(tier)
    assert library.num_registered == 1


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mooncake://master", MooncakeAddress("master", 50051)),
        ("mooncake://[::1]:7000/?segment=512MiB", MooncakeAddress("::1", 7000, 512 << 20)),
        (
            "mooncake://m:1?segment=2GiB&host=me&metadata=http://a/b&protocol=rdma&devices=mlx5_0",
            MooncakeAddress("m", 1, 2 << 30, "me", "http://a/b", "rdma", "mlx5_0"),
        ),
    ],
)
def test_a_mooncake_url_names_a_store_and_what_is_lent(url, address):
    assert parse_url(url) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mooncake://", "name a master"),
        ("mooncake://m:x", "no valid host and port"),
        ("mooncake://m/1", "name a master"),
        ("mooncake://m?segment=much", "512MiB"),
        ("mooncake://m?size=1GiB", "unknown option 'size'"),
        ("mooncake://m?protocol=ucx", "tcp or rdma"),
    ],
)
def test_invalid_mooncake_url_is_refused_with_a_remedy(url, says):
    with pytest.raises(ConfigInvalid, match=re.escape(says)):
        parse_url(url)
