"""The independent decode half takes over prompts from Tandem's prefill. `tests/conformance` has its faults."""

import ast
import sys
from pathlib import Path

import pytest

from tandem.kvtransfer.events import PushDone, RoomGranted
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.keys import ChannelKey
from tests.kvtransfer.rig import PROMPT_PAGES, ROOM, Cluster, layout, pages, push_all
from tests.patience import PATIENCE_S

pytest.importorskip("msgpack")
from examples import decode_half

SHAPE = layout()
NUM_TOKENS = SHAPE.page_size * len(PROMPT_PAGES)


@pytest.fixture
def cluster(stack):
    made = Cluster(stack)
    made.use(TcpTransport())
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
    assert foreign == {"msgpack", "xxhash", "zmq"}
    assert len(source.splitlines()) <= 460


@pytest.mark.parametrize("verify", ["always", "off"])
@pytest.mark.parametrize("key", ["", "of this cluster"])
def test_a_prompt_lands_in_its_pages_and_nowhere_else(cluster, link, key, verify):
    secret = ChannelKey.from_secret(key) if key else None
    prefill = cluster.prefill(shape=SHAPE, key=secret, verify=verify)
    half = link(prefill, secret=key)
    granted = half.grant(ROOM, NUM_TOKENS)
    prefill.agent.expect(ROOM)
    push_all(prefill)
    landed = outcome(half)
    assert (landed.room, landed.kind, landed.message["first_token"]) == (ROOM, "landed", 9)
    assert held(half, granted) == of_prefill(prefill)
    assert not any(map(any, held(half, half.free)))
    assert prefill.next(RoomGranted)
    assert prefill.next(PushDone)


def test_tokens_that_decode_already_holds_are_not_pushed(cluster, link):
    prefill = cluster.prefill(shape=SHAPE, verify="always")
    half = link(prefill)
    granted = half.grant(ROOM, NUM_TOKENS, have_tokens=8)
    prefill.agent.expect(ROOM)
    push_all(prefill)
    assert outcome(half).kind == "landed"
    assert held(half, granted) == of_prefill(prefill, PROMPT_PAGES[2:])


def test_pages_of_a_withdrawn_grant_return(cluster, link):
    prefill = cluster.prefill(shape=SHAPE)
    half = link(prefill)
    half.grant(ROOM, NUM_TOKENS)
    half.withdraw(ROOM)
    assert len(half.free) == 4
    assert outcome(half).kind == "withdrawn"
    assert len(half.free) == 8
    served(half, prefill)


def test_another_model_is_refused(cluster, link):
    prefill = cluster.prefill(shape=SHAPE)
    shape = {"num_layers": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 8, "itemsize": 4}
    with pytest.raises(decode_half.LinkLost, match="llama") as lost:
        link(prefill, fingerprint="another", layout={**shape, "dtype": "float32"})
    assert lost.value.answer["error"]["code"] == "layout_mismatch"


def test_a_link_without_the_secret_does_not_come_up(cluster, link, monkeypatch):
    monkeypatch.setattr(decode_half, "CONNECT_S", 0.2)
    prefill = cluster.prefill(shape=SHAPE, key=ChannelKey.from_secret("of this cluster"))
    with pytest.raises(decode_half.LinkLost, match="key"):
        link(prefill)
