"""Nodes of different tensor-parallel sizes, all ranks in one process: every head of every page."""

import numpy as np
import pytest
from msgspec.structs import replace

from tandem.engine.pages.kv_cache import KVCache
from tandem.kvtransfer.agents.group import DecodeGroup, PrefillGroup
from tandem.kvtransfer.events import (
    PushDone,
    RoomFailed,
    RoomGranted,
    RoomLanded,
    RoomLost,
    RoomReleased,
    RoomSafe,
)
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import Shard, held_heads
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.channel import Waker, wait
from tandem.wire.errors import Aborted, LayoutMismatch, PeerLost, TandemError
from tandem.wire.generation import Room
from tandem.wire.hand_off import Landed, RankAddress, Released, Welcome
from tests.agents import decode_agent, prefill_agent
from tests.calm import calm_receiver
from tests.kvtransfer.rig import Node, fake_decode
from tests.loopback import Fault, LoopbackTransport
from tests.patience import PATIENCE_S, eventually

ROOM = Room(42)
NUM_PAGES = 16
LAYERS, PAGE, TOKEN_BYTES = 2, 4, 32
SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4), (2, 2)]


class Half(Node):
    """One node: its ranks, what each holds of `kv`, and the pages as its role counts them.

    Attributes:
        kv: Memory of each rank, (pages, layers, k v, heads of the rank, bytes).
    """

    def __init__(self, stack, size, num_heads, is_split, page_size, make_region):
        self.size, self.waker = size, Waker()
        stack.callback(self.waker.close)
        own = num_heads
        if is_split:
            own = -(-num_heads // size)
        self.held = held_heads(Shard(0, size, num_heads), own)
        self.shards = [Shard(rank, size, num_heads) for rank in range(size)]
        self.layouts = [
            KVLayout(NUM_PAGES, page_size, LAYERS, len(heads), TOKEN_BYTES // 4, "float32", 4)
            for heads in self.held
        ]
        self.regions = [make_region(layout.pool_bytes) for layout in self.layouts]
        for region in self.regions:
            stack.callback(region.close)
        self.kv = [
            region.array().reshape(NUM_PAGES, LAYERS, 2, len(heads), page_size * TOKEN_BYTES)
            for region, heads in zip(self.regions, self.held, strict=True)
        ]
        self.cache = KVCache(NUM_PAGES, page_size)
        self.pages, self._seen = [], []

    @property
    def agent(self):
        """What the role asks: the agents of all ranks as one."""
        return self.group

    def wait_until(self, is_so):
        is_true = eventually(
            lambda: all(is_so(agent.statistics()) for agent in self.agents),
            lambda: wait([], 0.01, self.waker),
        )
        assert is_true, [agent.statistics() for agent in self.agents]

    def check_all_back(self):
        self.cache.check_integrity()
        assert self.cache.counts().free == NUM_PAGES


class Prefill(Half):
    def __init__(self, stack, size, num_heads, transports, *, is_split=True, page_size=PAGE):
        super().__init__(stack, size, num_heads, is_split, page_size, MemoryRegion.private)
        # The whole model's KV, of which each rank has its heads.
        rng = np.random.default_rng(size)
        self.truth = rng.integers(
            0, 256, (NUM_PAGES, LAYERS, 2, num_heads, page_size * TOKEN_BYTES), np.uint8
        )
        for kv, heads in zip(self.kv, self.held, strict=True):
            kv[:] = self.truth[:, :, :, heads.start : heads.stop]
        self.agents = []
        for rank in reversed(range(size)):  # rank 0 last: it is told the ports of the others
            ports = [0, *(agent.port for agent in self.agents)] if rank == 0 else []
            agent = prefill_agent(
                self.layouts[rank],
                self.regions[rank],
                [transports[rank]],
                ranks=[RankAddress(port) for port in ports],
                shard=self.shards[rank],
                waker=self.waker,
            )
            stack.callback(agent.close)
            self.agents.insert(0, agent)
        self.group = PrefillGroup(self.agents[0], self.agents[1:]) if size > 1 else self.agents[0]

    def take_pages(self, count):
        self.pages = self.cache.allocate(count)[::-1]  # so that no two are neighbours

    def push_all(self, room=ROOM):
        self.group.push(room, self.pages, 0)
        self.group.finish(room, 9, 77, 0)

    def hear_end(self):
        """Return the last event of the room; its pages go back."""
        while not isinstance(event := self.next(), PushDone | RoomReleased):
            assert isinstance(event, RoomGranted)
        self.cache.release(self.pages)
        return event

    def is_idle(self):
        self.wait_until(lambda now: not (now.num_waiting or now.num_pushing))


class Decode(Half):
    def __init__(
        self, stack, size, num_heads, transports, *, is_split=True, page_size=PAGE, **more
    ):
        super().__init__(stack, size, num_heads, is_split, page_size, MemoryRegion.shared)
        self.agents = [
            decode_agent(layout, region, transports, waker=self.waker, shard=shard, **more)
            for layout, region, shard in zip(self.layouts, self.regions, self.shards, strict=True)
        ]
        for agent in self.agents:
            stack.callback(agent.close)
        self.group = DecodeGroup(self.agents[0], self.agents[1:]) if size > 1 else self.agents[0]

    def request(self, port, count, have_tokens=0, room=ROOM):
        self.pages = self.cache.grant(count)
        self.group.request(room, "127.0.0.1", port, self.pages, have_tokens)

    def withdraw(self):
        self.cache.quarantine(self.pages)
        self.group.withdraw(ROOM)

    def hear_end(self):
        """Return all events of the room, the last being its end; the pages go back."""
        events = [self.next()]
        if isinstance(events[0], RoomLost):
            self.cache.quarantine(self.pages)
            events.append(self.next())
        if isinstance(events[-1], RoomLanded):
            self.cache.land(self.pages)
            self.cache.release(self.pages)
        else:
            assert isinstance(events[-1], RoomFailed | RoomSafe)
            self.cache.reclaim(self.pages)
        return events


def check_hand_off(prefill, decode):
    """Hand a prompt of three pages off, and look at every head."""
    prefill.take_pages(3)
    decode.request(prefill.agents[0].port, 3)
    prefill.group.expect(ROOM)
    prefill.push_all()
    assert decode.hear_end() == [RoomLanded(ROOM, 9, 77, 0)]
    assert isinstance(prefill.hear_end(), PushDone)
    check_heads(prefill, decode)


def check_heads(prefill, decode, first_page=0):
    """Every head of every page on every rank is that of the model; nothing else was written."""
    for kv, heads in zip(decode.kv, decode.held, strict=True):
        expected = np.zeros_like(kv)
        expected[decode.pages] = prefill.truth[prefill.pages[first_page:]][
            :, :, :, heads.start : heads.stop
        ]
        assert (kv == expected).all()


def pair(stack, sizes, num_heads=4, *, faults=None, make=LoopbackTransport, **decode):
    """Return two nodes, ranks of prefill with transports of their own; `faults` by rank."""
    transports = [
        LoopbackTransport((faults or {}).get(rank, ())) if make is LoopbackTransport else make()
        for rank in range(sizes[0])
    ]
    listen = _Merged(transports) if make is LoopbackTransport else make()
    prefill = Prefill(stack, sizes[0], num_heads, transports)
    return prefill, Decode(stack, sizes[1], num_heads, [listen], **decode), transports


class _Merged:
    """Loopback transports as one to listen on: each rank of prefill has faults of its own."""

    name = "loopback"

    def __init__(self, transports):
        self._first, *self._others = transports

    def listen(self, pool):
        listener = self._first.listen(pool)
        for other in self._others:
            other._listeners = self._first._listeners
        return listener


@pytest.mark.parametrize("make", [LoopbackTransport, ShmTransport, TcpTransport])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_request_first", [True, False])
def test_every_head_of_every_page_lands_on_every_rank(stack, sizes, make, is_request_first):
    prefill, decode, _ = pair(stack, sizes, make=make)
    prefill.take_pages(5)
    if is_request_first:
        prefill.group.expect(ROOM)
        prefill.push_all()
        decode.request(prefill.agents[0].port, 5)
    else:
        decode.request(prefill.agents[0].port, 5)
        prefill.wait_until(lambda now: now.num_early_grants)
        prefill.group.expect(ROOM)
        assert prefill.next() == RoomGranted(ROOM, 0)
        prefill.push_all()
    done = prefill.hear_end()
    assert done == PushDone(ROOM, 5 * sum(layout.page_bytes for layout in decode.layouts))
    assert decode.hear_end() == [RoomLanded(ROOM, 9, 77, 0)]
    check_heads(prefill, decode)
    prefill.check_all_back()
    decode.check_all_back()


@pytest.mark.parametrize(
    ("sizes", "num_heads"), [((2, 1), 3), ((1, 2), 3), ((3, 2), 8), ((2, 4), 2), ((4, 2), 2)]
)
def test_heads_that_do_not_divide_evenly_or_are_on_several_ranks(stack, sizes, num_heads):
    prefill, decode, _ = pair(stack, sizes, num_heads)
    check_hand_off(prefill, decode)


class _Foreign(LoopbackTransport):
    """A transport that prefill does not have."""

    name = "foreign"


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4)])
def test_every_rank_makes_its_next_offer_after_a_refused_one(stack, sizes):
    transport = LoopbackTransport()
    prefill = Prefill(stack, sizes[0], 4, [transport] * sizes[0])
    check_hand_off(prefill, Decode(stack, sizes[1], 4, [_Foreign(), transport]))


@pytest.mark.parametrize("is_prefill_split", [True, False])
def test_a_node_that_splits_no_heads_and_one_that_does(stack, is_prefill_split):
    """And ranks that no head is wanted of hear the end of the room all the same."""
    transport = LoopbackTransport()
    prefill = Prefill(stack, 4, 2, [transport] * 4, is_split=is_prefill_split)
    decode = Decode(stack, 1, 2, [transport])
    check_hand_off(prefill, decode)


@pytest.mark.parametrize("sizes", [(1, 2), (4, 1)])
def test_only_what_decode_does_not_have_is_pushed(stack, sizes):
    prefill, decode, _ = pair(stack, sizes)
    prefill.take_pages(5)
    decode.request(prefill.agents[0].port, 3, have_tokens=2 * PAGE)
    prefill.group.expect(ROOM)
    prefill.push_all()
    assert prefill.next() == RoomGranted(ROOM, 2 * PAGE)
    assert isinstance(prefill.hear_end(), PushDone)
    decode.hear_end()
    check_heads(prefill, decode, first_page=2)


def test_pages_of_another_size_at_another_tp(stack):
    transport = LoopbackTransport()
    prefill = Prefill(stack, 2, 4, [transport] * 2)
    decode = Decode(stack, 1, 4, [transport], page_size=PAGE // 2)
    prefill.take_pages(2)
    decode.request(prefill.agents[0].port, 4)
    prefill.group.expect(ROOM)
    prefill.push_all()
    decode.hear_end()
    sent = prefill.truth[prefill.pages].reshape(2, LAYERS, 2, 4, 2, -1)
    landed = decode.kv[0][decode.pages].reshape(2, 2, LAYERS, 2, 4, -1)
    assert (landed == sent.transpose(0, 4, 1, 2, 3, 5)).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_the_next_request_reuses_the_links(stack, sizes):
    prefill, decode, _ = pair(stack, sizes)
    for _ in range(3):
        prefill.take_pages(2)
        decode.request(prefill.agents[0].port, 2)
        prefill.group.expect(ROOM)  # the same room again, as a driver of its own numbers may
        prefill.push_all()
        assert isinstance(prefill.hear_end(), PushDone)
        assert isinstance(decode.hear_end()[-1], RoomLanded)
    num_links = sum(agent.statistics().num_links for agent in decode.agents)
    assert num_links == sum(agent.statistics().num_links for agent in prefill.agents)
    assert num_links == max(sizes)


# ── one of several fails, or gives up ────────────────────────────────────────────────────────────


def start(prefill, decode, room=ROOM):
    """Grant and push."""
    prefill.take_pages(4)
    prefill.group.expect(room)
    decode.request(prefill.agents[0].port, 4, room=room)
    prefill.push_all(room)


@pytest.mark.parametrize("sizes", [(2, 1), (4, 2), (4, 1)])
def test_source_killed_in_a_write_fails_the_room_and_loses_no_page(stack, sizes):
    last = sizes[0] - 1
    prefill, decode, transports = pair(stack, sizes, faults={last: [Fault("hang")]})
    start(prefill, decode)
    assert transports[last].hanging.wait(PATIENCE_S)
    prefill.agents[last].close()
    lost, safe = decode.hear_end()
    assert isinstance(lost.error, PeerLost)
    assert safe == RoomSafe(ROOM)
    decode.check_all_back()
    before = [kv.copy() for kv in decode.kv]
    for transport in transports:
        transport.release()
    assert all((kv == was).all() for kv, was in zip(decode.kv, before, strict=True))
    decode.wait_until(lambda now: not (now.num_granted or now.num_withdrawn or now.num_fencing))
    # Those that live have let go of it; of the node as a whole nothing is left with its rank.
    prefill.agents = prefill.agents[:last]
    prefill.is_idle()


@pytest.mark.parametrize("sizes", [(2, 1), (4, 2), (1, 2), (2, 4)])
def test_source_fenced_in_a_write_returns_the_pages_of_both_nodes(stack, sizes):
    prefill, decode, transports = pair(
        stack, sizes, faults={0: [Fault("hang")]}, timeouts=calm_receiver(released_s=0.05)
    )
    start(prefill, decode)
    assert transports[0].hanging.wait(PATIENCE_S)
    decode.withdraw()
    assert decode.hear_end() == [RoomSafe(ROOM)]
    assert isinstance(prefill.hear_end(), RoomReleased)
    prefill.check_all_back()
    decode.check_all_back()
    prefill.is_idle()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_pages_are_safe_only_when_the_last_source_has_stopped(stack, sizes):
    last = sizes[0] - 1
    prefill, decode, transports = pair(stack, sizes, faults={last: [Fault("hang")]})
    start(prefill, decode)
    assert transports[last].hanging.wait(PATIENCE_S)
    # A part that decode withdraws before its link is up is never granted: prefill waits for it in vain.
    decode.wait_until(lambda now: now.num_granted or now.num_landed)
    decode.withdraw()
    decode.wait_until(lambda now: not now.num_granted)
    assert list(decode.group.events()) == []
    transports[last].release()
    assert decode.hear_end() == [RoomSafe(ROOM)]
    # Or the withdrawal crossed with the last write.
    assert isinstance(prefill.hear_end(), RoomReleased | PushDone)
    prefill.check_all_back()
    decode.check_all_back()


@pytest.mark.parametrize("sizes", SIZES)
def test_failed_write_on_one_link_ends_the_room_on_all_links(stack, sizes):
    prefill, decode, _ = pair(stack, sizes, faults={sizes[0] - 1: [Fault("fail")]})
    start(prefill, decode)
    events = decode.hear_end()
    assert isinstance(events[0].error, PeerLost)
    assert isinstance(prefill.hear_end(), RoomReleased)
    assert prefill.group.statistics().pushed_bytes == 0, "other links may have landed"
    prefill.check_all_back()
    decode.check_all_back()
    prefill.is_idle()
    for kv in decode.kv:
        kv[:] = 0
    start(prefill, decode, Room(43))
    assert isinstance(decode.hear_end()[-1], RoomLanded)
    assert isinstance(prefill.hear_end(), PushDone)
    check_heads(prefill, decode)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_granted", [False, True])
def test_an_abort_before_or_after_the_grant_answers_every_rank(stack, sizes, is_granted):
    prefill, decode, _ = pair(stack, sizes)
    prefill.take_pages(4)
    prefill.group.expect(ROOM)
    if is_granted:
        decode.request(prefill.agents[0].port, 4)
        assert isinstance(prefill.next(), RoomGranted)
    prefill.group.abort(ROOM, TandemError("the forward raised"))
    assert prefill.hear_end() == RoomReleased(ROOM)
    if not is_granted:
        decode.request(prefill.agents[0].port, 4)
    assert decode.hear_end()[0].error.message == "the forward raised"
    prefill.check_all_back()
    decode.check_all_back()
    if is_granted:
        prefill.is_idle()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)])
def test_a_rank_of_decode_that_is_killed_releases_prefills_pages(stack, sizes):
    prefill, decode, _ = pair(stack, sizes)
    prefill.take_pages(4)
    prefill.group.expect(ROOM)
    decode.request(prefill.agents[0].port, 4)
    assert isinstance(prefill.next(), RoomGranted)
    decode.agents[-1].close()
    assert isinstance(prefill.hear_end().error, PeerLost)
    prefill.check_all_back()


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────


def refusal(stack, prefill, decode):
    decode.request(prefill.agents[0].port, 1)
    return decode.hear_end()[0].error


def test_model_with_different_heads_is_refused_with_both_descriptions(stack):
    transport = LoopbackTransport()
    prefill, decode = (
        Prefill(stack, 2, 4, [transport] * 2),
        Decode(stack, 1, 3, [transport]),
    )
    error = refusal(stack, prefill, decode)
    assert isinstance(error, LayoutMismatch)
    assert "rank 0 of 2, 4 KV heads in all" in error.message
    assert "3 KV heads" in error.message


def test_rank_with_a_wrong_share_of_heads_is_refused(stack):
    transport = LoopbackTransport()
    prefill, decode = Prefill(stack, 2, 4, [transport] * 2), Decode(stack, 1, 2, [transport])
    decode.agents[0].close()
    decode.agents[0] = decode.group = decode_agent(
        decode.layouts[0],
        decode.regions[0],
        [transport],
        waker=decode.waker,
        shard=Shard(0, 4, 4),  # of which each rank has one
    )
    stack.callback(decode.group.close)
    error = refusal(stack, prefill, decode)
    assert isinstance(error, LayoutMismatch)
    assert "rank 0 of 4 holds 2 of 4 KV heads; its share is 1" in error.message


@pytest.fixture
def strangers(stack):
    """Return a prefill of one rank with four heads, and what makes a rank of decode linked to it."""
    transport = LoopbackTransport()
    prefill = Prefill(stack, 1, 4, [transport])

    def link(number, tp_rank, tp_size):
        shape = replace(prefill.layouts[0], num_kv_heads=4 // tp_size)
        made = fake_decode(stack, prefill.agents[0].port, transport, number, shape)
        welcome = made.hello(tp_rank=tp_rank, tp_size=tp_size, model_kv_heads=4)
        assert isinstance(welcome, Welcome)
        return made

    return prefill, link


def test_nodes_of_two_sizes_cannot_grant_parts_of_one_room(strangers):
    prefill, link = strangers
    first, second = link(5, tp_rank=0, tp_size=2), link(6, tp_rank=1, tp_size=4)
    first.grant([1], room=ROOM)
    prefill.wait_until(lambda now: now.num_early_grants)
    second.grant([1], room=ROOM)
    word = second.expect(Released)
    assert word.error.message == "the room is granted by a node with a different number of ranks"


def test_a_part_that_is_over_cannot_be_granted_again_while_others_go_on(strangers):
    prefill, link = strangers
    first = link(5, tp_rank=0, tp_size=2)
    prefill.group.expect(ROOM)
    first.grant([], room=ROOM)
    prefill.group.finish(ROOM, 9, 77, 0)
    assert isinstance(first.next(), Landed)
    first.grant([], room=ROOM)
    assert "the room is over" in first.next().error.message


def test_grant_withdrawn_by_one_rank_fails_the_request_immediately(strangers):
    prefill, link = strangers
    first = link(5, tp_rank=0, tp_size=2)
    first.grant([1], room=ROOM)
    first.withdraw(ROOM)
    assert isinstance(first.next(), Released)
    prefill.group.expect(ROOM)
    assert isinstance(prefill.next().error, Aborted)
    prefill.is_idle()
    second = link(6, tp_rank=1, tp_size=2)
    second.grant([1], room=ROOM)
    assert second.next().error.code == "aborted"  # the other rank's grant is answered, too
