"""Pages in a real server that nodes share, and the server's failures."""

import contextlib
import random
import re
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.kvtier.entry import HEADER_BYTES, header_of
from tandem.kvtier.redis import FULL_PAUSE_S, RedisTier, parse_url
from tandem.kvtier.tier import TierFailed
from tests.certificates import make_certificates
from tests.kvtier.pool import PAGE_BYTES, SPACE, SmallPool, some_keys, some_pages
from tests.kvtier.redis_server import RedisServer, Relay, a_folder, a_server
from tests.patience import PATIENCE_S, Clock, patiently

ENTRY_BYTES = HEADER_BYTES + PAGE_BYTES
# Timeout of calls that must time out. On a busy machine healthy calls may exceed it too: tests retry them.
SOON_S = 0.3


@pytest.fixture
def server():
    with a_server() as one:
        yield one


@pytest.fixture
def tier_at():
    """Return a function that makes tiers; they are closed after the test."""
    made = []

    def make(url: str, **options) -> RedisTier:
        options = {"timeout_s": PATIENCE_S, **options}
        made.append(make_redis(url, **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def make_redis(url, space=SPACE, **options) -> RedisTier:
    return RedisTier("redis", parse_url(url), SmallPool(), space, **options)


def entry_key(key) -> str:
    return f"tandem:kv:1:{key.digest.hex()}"


def got(tier, keys) -> list[bytes]:
    loan = tier.get(keys)
    pages = [bytes(page) for page in loan.pages]
    loan.release()
    return pages


def num_got(tier, keys) -> int:
    return len(got(tier, keys))


def answer_in_time(call):
    """Retry a call of a tier with a short timeout until it succeeds; return its result."""
    for _ in patiently():
        with contextlib.suppress(TierFailed):
            return call()
    raise AssertionError("never in time")


def num_gets_until(tier, keys, pages) -> int:
    """Return how many gets it took to get all pages; gets that timed out returned fewer."""
    for number, _ in enumerate(patiently(), 1):
        found = []
        with contextlib.suppress(TierFailed):
            found = got(tier, keys)
        assert found == pages[: len(found)]
        if len(found) == len(pages):
            return number
    raise AssertionError("they never came")


def told(tier) -> set[int]:
    changes = tier.journal.since(-1)
    return set(changes.added) if changes else set()


# Storing and finding pages.


def test_page_stored_by_one_node_is_read_by_another(server, tier_at):
    one, other = tier_at(server.url), tier_at(server.tcp_url)
    keys, pages = some_keys(100), some_pages(100)
    assert one.put(keys, pages) == 100
    assert got(other, keys) == pages
    assert told(one) == told(other) == {block for key in keys for block in key.blocks}
    assert one.load().num_pages == 100
    assert other.load().num_pages == 100


def test_pages_after_a_missing_one_are_not_lent(server, tier_at):
    tier = tier_at(server.url)
    keys, pages = some_keys(600), some_pages(600)
    tier.put(keys, pages)
    server.ask("DEL", entry_key(keys[530]))
    assert got(tier, keys) == pages[:530]
    assert got(tier, keys[530:]) == []
    assert not told(tier) & set(keys[530].blocks)


def test_stored_page_is_not_written_again(server, tier_at):
    keys, pages = some_keys(8), some_pages(8)
    assert tier_at(server.url).put(keys[:5], pages[:5]) == 5
    assert tier_at(server.url).put(keys, pages) == 3
    # One of them stored the store's identity.
    assert b"calls=9," in server.ask("INFO", "commandstats").partition(b"cmdstat_set:")[2]


def test_allocation_failure_during_get_loses_no_buffers(server, tier_at, monkeypatch):
    tier, keys, pages = tier_at(server.url), some_keys(4), some_pages(4)
    tier.put(keys, pages)
    left, take = [1, 1], tier._memory.take

    def scarce():
        if not left:
            raise RuntimeError("the device pins no more memory")
        left.pop()
        return take()

    monkeypatch.setattr(tier._memory, "take", scarce)
    with pytest.raises(RuntimeError):
        tier.get(keys)
    assert not tier._memory.num_lent
    monkeypatch.undo()
    assert got(tier, keys) == pages


def test_concurrent_calls_of_many_threads(server, tier_at):
    tier = tier_at(server.url)
    runs = [(some_keys(20, str(seed)), some_pages(20, seed)) for seed in range(8)]

    def put_and_get(run):
        keys, pages = run
        tier.put(keys, pages)
        return got(tier, keys) == pages

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(put_and_get, runs * 3))


def test_unused_entries_expire_after_their_ttl(server, tier_at):
    tier, keys = tier_at(f"{server.url}?ttl=1000"), some_keys(4)
    tier.put(keys, some_pages(4))

    def left_s(key):
        return int(server.ask("TTL", entry_key(key))[1:])

    assert 900 < left_s(keys[0]) <= 1000
    for use in (tier.get, lambda run: tier.put(run, some_pages(1))):
        server.ask("EXPIRE", entry_key(keys[0]), "300")
        use(keys[:1])
        assert left_s(keys[0]) > 900
    assert server.ask("TTL", "tandem:kv:store") == b":-1"


# The store's identity.


def test_nodes_with_different_page_spaces_have_different_store_ids(server, tier_at):
    other = type(SPACE)("another model", SPACE.kv_dtype, SPACE.page_size)
    tiers = [tier_at(server.url), tier_at(server.url, space=other)]
    for tier in tiers:
        num_got(tier, some_keys(1))
    assert len({tier.load().store for tier in tiers}) == 2


@pytest.mark.parametrize("how", ["restarted", "flushed"])
def test_emptied_store_gets_a_new_id_and_known_pages_are_forgotten(server, tier_at, how):
    tier, keys, pages = tier_at(server.url), some_keys(8), some_pages(8)
    tier.put(keys, pages)
    before = tier.load().store
    if how == "restarted":
        server.kill()
        server.start()
    else:
        server.ask("FLUSHALL")
    assert got(tier, keys) == []
    assert told(tier) == set()
    assert tier.load().store not in {"", before}
    assert tier.put(keys, pages) == 8
    assert got(tier, keys) == pages


# Corrupted values.


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry, _: entry[:-1] + bytes([entry[-1] ^ 1]),
        lambda entry, _: entry[:9] + b"\x07" + entry[10:],
        lambda entry, other: other,
        lambda entry, _: entry[:-1],
        lambda entry, _: entry + b"x",
        lambda entry, _: entry[:10],
        lambda entry, _: b"",
        lambda entry, _: entry * 3,
        lambda entry, _: None,
    ],
    ids=["bit", "header", "of another", "short", "long", "ten", "empty", "thrice", "a list"],
)
def test_corrupted_value_is_removed_and_not_lent(server, tier_at, spoil):
    tier, keys, pages = tier_at(server.url), some_keys(4), some_pages(4)
    tier.put(keys, pages)
    entries = [header_of(key, page) + page for key, page in zip(keys, pages, strict=True)]
    wrong = spoil(entries[1], entries[2])
    name = entry_key(keys[1])
    if wrong is None:
        server.ask("DEL", name)
        server.ask("LPUSH", name, "no string")
    else:
        server.ask("SET", name, wrong)
    assert got(tier, keys) == pages[:1]
    assert tier.load().num_corrupted == 1
    assert server.ask("EXISTS", name) == b":0"
    assert tier.put(keys, pages) == 1
    assert got(tier, keys) == pages


@pytest.mark.parametrize("wrong", [b"short", None])
def test_value_of_wrong_length_or_type_is_a_miss_and_is_rewritten(server, tier_at, wrong):
    tier, keys, pages = tier_at(server.url), some_keys(3), some_pages(3)
    if wrong is None:
        server.ask("LPUSH", entry_key(keys[0]), "no string")
    else:
        server.ask("SET", entry_key(keys[0]), wrong)
    assert num_got(tier, keys) == 0
    assert tier.load().num_corrupted == 1
    assert tier.put(keys, pages) == 3
    assert got(tier, keys) == pages


# A server that rejects writes.


def test_full_server_is_still_read_and_written_again_later(tier_at):
    clock = Clock()
    with a_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier = make_redis(server.url, timeout_s=PATIENCE_S, clock=clock)
        keys, pages = some_keys(200), some_pages(200)
        num_taken = tier.put(keys, pages)
        assert 0 < num_taken < 200
        assert tier.load().state == "full"
        assert got(tier, keys) == pages[:num_taken]
        server.ask("CONFIG", "SET", "maxmemory", "0")
        assert tier.put(keys, pages) == 0
        clock.now_s += FULL_PAUSE_S
        assert tier.load().state == "up"
        assert tier.put(keys, pages) == 200 - num_taken
        tier.close()


def test_evicting_server_is_never_full(tier_at):
    with a_server("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier, keys, pages = tier_at(server.url), some_keys(300), some_pages(300)
        for first in range(0, 300, 20):
            assert tier.put(keys[first : first + 20], pages[first : first + 20]) == 20
        assert got(tier, keys[-5:]) == pages[-5:]
        assert tier.load().state == "up"
        assert tier.load().num_pages < 300


def test_replica_has_the_same_store_id_and_is_only_read(server, tier_at):
    primary, keys, pages = tier_at(server.url), some_keys(4), some_pages(4)
    primary.put(keys, pages)
    server.ask("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with a_folder() as folder:
        replica = RedisServer(folder)
        try:
            replica.start("--replicaof", f"127.0.0.1 {server.port}", until="sync: Finished")
            tier = tier_at(f"{replica.url}?ttl=100")
            assert got(tier, keys) == pages
            assert tier.put(some_keys(4, "new"), pages) == 0
            assert tier.load().state == "full"
            assert tier.load().store == primary.load().store
        finally:
            replica.kill()


# A server that is unreachable.


def test_dead_server_fails_and_restarted_server_works(server, tier_at):
    tier, keys, pages = tier_at(server.url), some_keys(4), some_pages(4)
    tier.put(keys, pages)
    server.kill()
    for call in (tier.get, lambda keys: tier.put(keys, pages)):
        with pytest.raises(TierFailed, match=re.escape(str(server.socket))):
            call(keys)
    server.start()
    assert tier.put(keys, pages) == 4


def test_hanging_server_times_out_and_its_late_reply_is_discarded(server, tier_at):
    tier = tier_at(server.tcp_url, timeout_s=SOON_S)
    keys, pages = some_keys(8), some_pages(8)
    tier_at(server.tcp_url).put(keys, pages)
    assert answer_in_time(lambda: num_got(tier, keys)) == 8
    server.freeze()
    for call in (tier.get, lambda keys: tier.put(keys, pages)):
        with pytest.raises(TierFailed):
            call(keys)
    server.thaw()
    num_gets_until(tier, keys[4:], pages[4:])
    assert answer_in_time(lambda: num_got(tier, keys)) == 8
    assert tier.load().num_corrupted == 0


@pytest.mark.parametrize("how", ["cut_after", "stops_after"])
def test_complete_pages_are_lent_when_the_rest_does_not_arrive(server, tier_at, how):
    keys, pages = some_keys(8), some_pages(8)
    tier_at(server.url).put(keys, pages)
    with Relay(server) as relay:
        # A closed connection is detected at once.
        timeout_s = {"cut_after": PATIENCE_S, "stops_after": SOON_S}[how]
        tier = tier_at(f"redis://127.0.0.1:{relay.port}", timeout_s=timeout_s)
        setattr(relay, how, 3 * ENTRY_BYTES + ENTRY_BYTES // 2)
        num_gets = num_gets_until(tier, keys, pages[:3])
        assert num_gets == 1 or how == "stops_after"
        setattr(relay, how, ENTRY_BYTES // 2)
        with pytest.raises(TierFailed):
            got(tier, keys)
        setattr(relay, how, None)
        num_gets = num_gets_until(tier, keys, pages)
        assert num_gets == 1 or how == "stops_after"
        assert tier.load().num_corrupted == 0


def test_interrupted_write_stores_no_partial_page(server, tier_at):
    keys, pages = some_keys(200), some_pages(200)
    with Relay(server) as relay:
        tier = tier_at(f"redis://127.0.0.1:{relay.port}")
        num_got(tier, keys[:1])
        relay.cut_after = 1024
        with pytest.raises(TierFailed):
            tier.put(keys, pages)
    tier = tier_at(server.url)
    found = got(tier, keys)
    assert len(found) < 200
    assert found == pages[: len(found)]
    assert tier.load().num_corrupted == 0


def test_server_fails_while_it_loads_its_data(server, tier_at):
    keys, draw = some_keys(1), random.Random(0)
    before = tier_at(server.url)
    # Enough values for a slow start; each is so large that the server serves clients after it.
    for number in range(600):
        server.ask("SET", f"value {number}", draw.randbytes(2048))
    server.ask("SAVE")
    server.kill()
    slowly = ("--key-load-delay", "100000", "--loading-process-events-interval-bytes", "1024")
    server.start(*slowly, until="Server initialized")
    with pytest.raises(TierFailed, match=r"(?i)loading"):
        num_got(before, keys)
    server.ask("CONFIG", "SET", "key-load-delay", "0")


# Authentication, and what logs show.


@pytest.mark.parametrize(
    ("login", "is_right"),
    [
        (":let-me%40in", True),
        ("default:let-me%40in", True),
        (":other-secret", False),
        ("nobody:other-secret", False),
        ("", False),
    ],
)
def test_password_is_required_and_never_shown(tier_at, login, is_right, capfd):
    with a_server("--requirepass", "let-me@in") as server:
        tier = tier_at(f"redis://{login}@127.0.0.1:{server.port}/0")
        keys = some_keys(1)
        said = ""
        if is_right:
            assert tier.put(keys, some_pages(1)) == 1
        else:
            with pytest.raises(TierFailed, match=r"(?i)auth|pass") as failure:
                tier.put(keys, some_pages(1))
            said = f"{failure.value!r} {failure.value}"
        said += f"{tier!r} {tier.load()}" + "".join(capfd.readouterr())
        assert f"127.0.0.1:{server.port}" in said
        assert not re.search("let-me|secret", said)


def test_account_with_the_documented_rights_suffices(server, tier_at):
    rights = "~tandem:kv:* +get +set +strlen +del +expire +select +dbsize"
    server.ask("ACL", "SETUSER", "tandem", "on", ">pw", *rights.split())
    tier = tier_at(f"redis://tandem:pw@127.0.0.1:{server.port}/2?ttl=60")
    keys, pages = some_keys(4), some_pages(4)
    assert tier.put(keys, pages) == 4
    assert got(tier, keys) == pages


def test_read_only_account_can_read(server, tier_at):
    keys, pages = some_keys(4), some_pages(4)
    tier_at(server.url).put(keys, pages)
    rights = "~tandem:kv:* +get +strlen +dbsize"
    server.ask("ACL", "SETUSER", "reader", "on", ">pw", *rights.split())
    tier = tier_at(f"redis://reader:pw@127.0.0.1:{server.port}")
    assert got(tier, keys) == pages
    assert tier.put(some_keys(4, "new"), pages) == 0
    assert tier.load().state == "full"


def test_tls_verifies_the_server_certificate(server, tier_at, tmp_path):
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    keys, pages = some_keys(70), some_pages(70)
    with Relay(server, context) as relay:
        tier = tier_at(f"rediss://127.0.0.1:{relay.port}/0?ca={made.ca}")
        assert tier.put(keys, pages) == 70
        assert got(tier, keys) == pages
        with pytest.raises(TierFailed, match=r"(?i)certificate"):
            tier_at(f"rediss://127.0.0.1:{relay.port}/0").get(keys)
        with pytest.raises(TierFailed):
            tier_at(f"rediss://localhost:{relay.port}/0?ca={made.ca}").get(keys)
