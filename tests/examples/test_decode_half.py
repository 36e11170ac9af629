"""The second decode half, which follows docs/protocol.md alone, takes over prompts from Tandem's prefill."""

import ast
import hashlib
import sys
from pathlib import Path

import pytest
import xxhash

from tandem.kvtransfer import push_room
from tandem.kvtransfer.events import Granted, PushDone, Released
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.channel import Heartbeat
from tandem.wire.errors import EngineFailed, TransferRefused
from tandem.wire.keys import ChannelKey
from tests.calm import calm_sender
from tests.kvtransfer.rig import PROMPT_PAGES, ROOM, Cluster, layout, pages, push_all
from tests.patience import PATIENCE_S

pytest.importorskip("msgpack")
from examples import decode_half

# A slab of it is larger than the 240 bytes from which the example's sum begins.
SHAPE = layout(head_dim=16)
NUM_TOKENS = SHAPE.page_size * len(PROMPT_PAGES)
SIZES = (8, *range(241, 400), 1023, 1024, 1025, 1088, 1089, 5000)


class Recorded(TcpTransport):
    """TCP that keeps prefill's connection, for a test to write by."""

    def connect(self, offer, region):
        self.connection = super().connect(offer, region)
        return self.connection


@pytest.fixture
def cluster(stack):
    made = Cluster(stack)
    made.use(Recorded())
    return made


@pytest.fixture
def link(stack):
    def connect(prefill, **more):
        address = f"tcp://127.0.0.1:{prefill.agent.port}"
        half = decode_half.DecodeHalf(address, num_pages=8, **more)
        stack.callback(half.close)
        return half

    return connect


def outcome(half):
    (ended,) = half.poll(PATIENCE_S)
    return ended


def held(half, page_ids):
    size = half.pool.page_bytes
    return [bytes(half.pool.memory[page * size : (page + 1) * size]) for page in page_ids]


def of_prefill(prefill, page_ids=PROMPT_PAGES):
    return [page.tobytes() for page in pages(prefill, page_ids, SHAPE)]


def served(half, prefill, room=1):
    """Hand one more prompt over, from beginning to end."""
    granted = half.grant(room, NUM_TOKENS)
    prefill.agent.expect(room)
    push_all(prefill, room=room)
    assert outcome(half).kind == "landed"
    assert held(half, granted) == of_prefill(prefill)
    half.free += granted


def test_the_example_is_short_and_imports_nothing_of_ours():
    source = Path(decode_half.__file__).read_text()
    imported = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    foreign = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert foreign == {"msgpack", "zmq"}
    assert len(source.splitlines()) <= 500


def test_its_sum_is_xxh3():
    data = hashlib.shake_128(b"any").digest(max(SIZES))
    assert [decode_half.xxh3_64(data[:size]) for size in SIZES] == [
        xxhash.xxh3_64_intdigest(data[:size]) for size in SIZES
    ]


@pytest.mark.parametrize("verify", ["always", "sample", "off"])
@pytest.mark.parametrize("key", ["", "of this cluster"])
def test_a_prompt_lands_in_its_pages_and_nowhere_else(cluster, link, key, verify):
    secret = ChannelKey.from_secret(key) if key else None
    prefill = cluster.prefill(shape=SHAPE, key=secret, verify=verify)
    half = link(prefill, secret=key)
    granted = half.grant(ROOM, NUM_TOKENS)
    prefill.agent.expect(ROOM)
    push_all(prefill)
    landed = outcome(half)
    assert (landed.room, landed.kind, landed.word["first_token"]) == (ROOM, "landed", 9)
    assert held(half, granted) == of_prefill(prefill)
    assert not any(map(any, held(half, half.free)))
    assert prefill.next(Granted)
    assert prefill.next(PushDone)


def test_tokens_that_it_holds_already_are_not_pushed(cluster, link):
    prefill = cluster.prefill(shape=SHAPE, verify="always")
    half = link(prefill)
    granted = half.grant(ROOM, NUM_TOKENS, have_tokens=8)
    prefill.agent.expect(ROOM)
    push_all(prefill)
    assert outcome(half).kind == "landed"
    assert held(half, granted) == of_prefill(prefill, PROMPT_PAGES[2:])


def test_a_page_of_other_bytes_is_noticed_and_costs_the_room_only(cluster, link, monkeypatch):
    prefill = cluster.prefill(shape=SHAPE)
    half = link(prefill)
    half.grant(ROOM, NUM_TOKENS)
    with monkeypatch.context() as lie:
        lie.setattr(push_room, "page_sums", lambda *_args, **_kinds: [1, 2, 3, 4])
        prefill.agent.expect(ROOM)
        push_all(prefill)
        assert outcome(half).kind == "corrupted"
    assert len(half.free) == 8
    served(half, prefill)


def test_a_grant_that_is_withdrawn_comes_back(cluster, link):
    prefill = cluster.prefill(shape=SHAPE)
    half = link(prefill)
    half.grant(ROOM, NUM_TOKENS)
    half.withdraw(ROOM)
    assert len(half.free) == 4
    assert outcome(half).kind == "withdrawn"
    assert len(half.free) == 8
    served(half, prefill)


def test_a_request_that_prefill_gives_up_is_released_with_the_reason(cluster, link):
    prefill = cluster.prefill(shape=SHAPE)
    half = link(prefill)
    prefill.agent.expect(ROOM)
    half.grant(ROOM, NUM_TOKENS)
    prefill.next(Granted)
    prefill.agent.abort(ROOM, EngineFailed("it broke"))
    ended = outcome(half)
    assert (ended.kind, ended.word["error"]["code"]) == ("released", "engine_failed")
    assert prefill.next(Released)
    served(half, prefill)


@pytest.mark.parametrize("room", [ROOM, ROOM + 1])
def test_a_write_after_the_last_message_is_refused(cluster, link, room):
    prefill = cluster.prefill(shape=SHAPE)
    half = link(prefill)
    granted = half.grant(ROOM, NUM_TOKENS)
    prefill.agent.expect(ROOM)
    push_all(prefill)
    assert outcome(half).kind == "landed"
    before = held(half, range(8))
    whole = range(SHAPE.page_size)
    late = plan_copies(PagedTokens(SHAPE, [0]), PagedTokens(SHAPE, granted[:1]), whole)
    with pytest.raises(TransferRefused):
        cluster.transport.connection.write(room, late)
    assert held(half, range(8)) == before
    assert half.receiver.num_violations == 1


def test_a_prefill_that_falls_silent_is_cut_off_and_the_pages_are_free(cluster, link, monkeypatch):
    monkeypatch.setattr(decode_half, "BEAT_S", 0.05)
    prefill = cluster.prefill(shape=SHAPE, timeouts=calm_sender(heartbeat=Heartbeat(0.05)))
    half = link(prefill)
    half.grant(ROOM, NUM_TOKENS)
    prefill.agent.close()
    with pytest.raises(decode_half.LinkLost):
        half.poll(PATIENCE_S)
    assert sorted(half.free) == list(range(8))


def test_another_model_is_refused(cluster, link):
    prefill = cluster.prefill(shape=SHAPE)
    shape = {"num_layers": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 16, "itemsize": 4}
    with pytest.raises(decode_half.LinkLost, match="llama") as lost:
        link(prefill, fingerprint="another", layout={**shape, "dtype": "float32"})
    assert lost.value.answer["error"]["code"] == "layout_mismatch"


def test_a_link_without_the_secret_does_not_come_up(cluster, link, monkeypatch):
    monkeypatch.setattr(decode_half, "CONNECT_S", 0.2)
    prefill = cluster.prefill(shape=SHAPE, key=ChannelKey.from_secret("of this cluster"))
    with pytest.raises(decode_half.LinkLost, match="key"):
        link(prefill)
