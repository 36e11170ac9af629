"""Nodes whose ranks hold different numbers of heads: every head of every block arrives, and nothing else changes."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cli.up import free_ports
from tandem.kvtransfer import copying
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.sharding import held_heads, pair_ranks
from tandem.vllm.caches import Caches, Heads, LayerCache, RankBlocks
from tandem.vllm.hand_offs import BlockGrant, FirstToken, Pages, WorkerOrders, WorkerReports
from tandem.vllm.worker import DecodeWorker, HandOffConfig, PrefillWorker, Rank
from tandem.wire.generation import Room
from tests.patience import eventually

NUM_LAYERS, NUM_BLOCKS, PAGE = 3, 8, 4
NAMES = [f"layer {layer}" for layer in range(NUM_LAYERS)]
TOKEN_BYTES = (6, 2, 4)  # of one head, by layer
OBSTACLE = "blocks of layout LBNHC cannot be divided by heads"


class Node:
    """The blocks of a node's ranks. `kv`: memory of each rank and layer, (block, head of the rank, byte)."""

    def __init__(self, size: int, num_heads: int, order: str, fill: int = 0) -> None:
        own = max(1, num_heads // size)
        self.size, self.heads = size, Heads(own, num_heads)
        sizes = [own * PAGE * num_bytes for num_bytes in TOKEN_BYTES]
        begins = np.cumsum([0, *sizes]).tolist()
        self.caches, self.kv = [], []
        for _ in range(size):
            memory = torch.full((NUM_BLOCKS * begins[-1],), fill, dtype=torch.uint8)
            if order == "layers":
                at = [(NUM_BLOCKS * begin, num) for begin, num in zip(begins, sizes, strict=False)]
            else:
                at = [(begin, begins[-1]) for begin in begins[:-1]]
            pieces = [
                LayerCache(name, base, stride, num)
                for name, (base, stride), num in zip(NAMES, at, sizes, strict=True)
            ]
            blocks = RankBlocks(NUM_BLOCKS, PAGE, pieces, True, self.heads)
            self.caches.append(Caches(memory, blocks))
            self.kv.append(
                [
                    memory.as_strided((NUM_BLOCKS, own, num // own), (stride, num // own, 1), base)
                    for (base, stride), num in zip(at, sizes, strict=True)
                ]
            )

    def held(self, rank: int = 0) -> list[range]:
        """Return the heads of each rank, as one of them describes them."""
        shard = Rank(rank, self.size).shard(self.heads)
        return held_heads(shard, self.caches[rank].layout.num_kv_heads)

    def fill(self, truth: list[torch.Tensor]) -> None:
        for kv, heads in zip(self.kv, self.held(), strict=True):
            for part, whole in zip(kv, truth, strict=True):
                part[:] = whole[:, heads.start : heads.stop]


def truth_of(num_heads: int, seed: int = 0) -> list[torch.Tensor]:
    """Return the KV of the whole model, by layer: (block, head, byte)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (NUM_BLOCKS, num_heads, PAGE * num), generator=generator).byte()
        for num in TOKEN_BYTES
    ]


@st.composite
def nodes(draw):
    num_heads = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = st.sampled_from([1, 2, 4, 8])
    orders = st.sampled_from(["layers", "blocks"])
    return num_heads, *(Node(draw(sizes), num_heads, draw(orders)) for _ in range(2))


@given(nodes(), st.permutations(range(NUM_BLOCKS)), st.integers(1, 4), st.data())
def test_each_rank_receives_its_heads_and_nothing_else(pair, order, num_pages, data):
    num_heads, prefill, decode = pair
    truth = truth_of(num_heads)
    prefill.fill(truth)
    theirs, ours = order[:num_pages], sorted(order, reverse=True)[:num_pages]
    first = data.draw(st.integers(0, NUM_LAYERS - 1))
    layers = range(first, data.draw(st.integers(first + 1, NUM_LAYERS)))
    for source, destination, heads in pair_ranks(prefill.held(), decode.held()):
        here, there = prefill.caches[source], decode.caches[destination]
        assert here.layout.holds_same_heads(there.layout)
        sides = PagedTokens(here.layout, theirs), PagedTokens(there.layout, ours)
        plan = plan_copies(*sides, range(num_pages * PAGE), heads, layers)
        copying.copy(plan, here.region.array(), there.region.array())
    expected = [torch.zeros_like(whole) for whole in truth]
    for layer in layers:
        expected[layer][ours] = truth[layer][theirs]
    for kv, heads in zip(decode.kv, decode.held(), strict=True):
        for part, whole in zip(kv, expected, strict=True):
            assert torch.equal(part, whole[:, heads.start : heads.stop])


class Workers:
    """The workers of two nodes over TCP. `num_stages`: pipeline stages, each on a host; these are the ranks of the last."""

    def __init__(self, prefill: Node, decode: Node, num_stages=1, obstacle="", **settings) -> None:
        [self._port] = free_ports(1)
        common = {"fingerprint": "f", "bootstrap_port": self._port, "backend": "tcp"}
        config = partial(HandOffConfig, **common, **settings)

        def workers(make, role, node, stage=num_stages - 1):
            hosts = [f"127.0.0.{1 + each // node.size}" for each in range(num_stages * node.size)]
            for caches in node.caches:
                caches.heads = Heads(node.heads.num_own, node.heads.num_all, obstacle)
            ranks = [Rank(each, node.size, stage, num_stages, hosts) for each in range(node.size)]
            pairs = zip(node.caches, ranks, strict=True)
            host = hosts[stage * node.size]
            return [make(config(role=role, host=host), caches, rank) for caches, rank in pairs]

        # Decode knows the address of rank 0 of the first stage only.
        first = Node(prefill.size, prefill.heads.num_all, "layers")
        self._first_stage = workers(PrefillWorker, "prefill", first, 0) if num_stages > 1 else []
        self.prefill = workers(PrefillWorker, "prefill", prefill)
        self.decode = workers(DecodeWorker, "decode", decode)
        self.reports = WorkerReports()
        self.received = {number: set() for number in range(decode.size)}

    def hand_off(self, from_pages, to_pages, *, by_layer=False) -> None:
        """Move the pages, until every rank is done."""
        grant = BlockGrant("a", Room(7), "127.0.0.1", self._port, to_pages, 0, 0xA)
        for worker in self.decode:
            worker.follow(WorkerOrders(grants=[grant]))
        pages = Pages(Room(7), from_pages, 0)
        for worker in self.prefill:
            worker.follow(WorkerOrders(expected=[("a", Room(7))], pushes=[pages]))
            for name in NAMES if by_layer else ():
                worker.on_layer_written(name)
            worker.on_forward_finished()
            worker.follow(WorkerOrders(computed={"a": (Room(7), FirstToken(11, 0, 0xA))}))
        assert eventually(self._are_done, self._step), self.reports

    def _step(self) -> None:
        for worker in (*self.prefill, *self.decode):
            results = worker.results(set(), wait_s=0.01)
            if worker in self.decode:
                self.received[self.decode.index(worker)] |= results.received
            self.reports.add(worker.take_reports() or WorkerReports())

    def _are_done(self) -> bool:
        is_sent = self.reports.handed_off["a"] == len(self.prefill)
        return all(self.received.values()) and (is_sent or bool(self.reports.failed))

    def close(self) -> None:
        for worker in (*self._first_stage, *self.prefill, *self.decode):
            worker.close()
            worker.waker.close()


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(
    ("sizes", "num_heads"),
    [
        ((1, 2), 4),
        ((2, 1), 4),
        ((2, 4), 4),
        ((4, 2), 4),
        ((2, 2), 4),
        ((1, 4), 2),
        ((2, 1), 1),
        ((1, 2), 1),
    ],
)
def test_unequal_workers_of_a_stage_on_a_second_host_hand_off_with_checksums(
    sizes, num_heads, by_layer
):
    prefill, decode = (Node(size, num_heads, "layers") for size in sizes)
    truth = truth_of(num_heads)
    prefill.fill(truth)
    settings = {"verify": "always", "push_granularity": "layer" if by_layer else "chunk"}
    workers = Workers(prefill, decode, num_stages=2, **settings)
    with contextlib.closing(workers):
        workers.hand_off([1, 6], [5, 2], by_layer=by_layer)
        assert not workers.reports.failed
        # One report per rank of prefill, however many ranks of decode it pushes to.
        assert workers.reports.granted["a"] == sizes[0]
    for kv, heads in zip(decode.kv, decode.held(), strict=True):
        for part, whole in zip(kv, truth, strict=True):
            assert torch.equal(part[[5, 2]], whole[[1, 6], heads.start : heads.stop])


def test_blocks_without_heads_are_refused_between_unequal_sizes_with_the_reason():
    prefill, decode = Node(1, 1, "layers"), Node(2, 2, "layers")
    workers = Workers(prefill, decode, obstacle=OBSTACLE)
    with contextlib.closing(workers):
        workers.prefill[0].follow(WorkerOrders(expected=[("a", Room(7))]))
        grant = BlockGrant("a", Room(7), "127.0.0.1", workers._port, [1], 0, 0xA)
        for worker in workers.decode:
            worker.follow(WorkerOrders(grants=[grant]))
        assert eventually(lambda: "a" in workers.reports.failed, workers._step)
    error = workers.reports.failed["a"]
    assert error.code == "layout_mismatch"
    assert error.message.endswith(OBSTACLE)
