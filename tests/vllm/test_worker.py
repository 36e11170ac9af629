"""A prefill worker and a decode worker over TCP, without vLLM."""

import contextlib
import threading
from collections import Counter
from functools import partial

import pytest
import torch

from tandem.kvtransfer.transports.tcp_stream import TcpListener
from tandem.vllm.caches import Caches, RankBlocks
from tandem.vllm.device_queue import DeviceQueue
from tandem.vllm.hand_offs import BlockGrant, FirstToken, Pages, WorkerOrders, WorkerReports
from tandem.vllm.worker import (
    DecodeWorker,
    HandOffConfig,
    PrefillWorker,
    Rank,
    Results,
    make_worker,
)
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import TokenLogprobs
from tests.device_events import BrokenEvent, FakeEvent
from tests.patience import PATIENCE_S, eventually
from tests.vllm.test_caches import NAMES, NUM_BLOCKS, NUM_LAYERS, PAGE, SIZE, pieces_of

ROOM, ASKED = 7, 0xA
LOGPROBS = TokenLogprobs(logprob=-0.5, top=[(11, -0.5)])
LANDED = FirstToken(11, 0, logprobs=LOGPROBS)
ONLY = Rank(0, 1)


class Pair:
    """The workers of two nodes of one rank."""

    def __init__(self, queue=None, **settings):
        self.reports, self.results = WorkerReports(), Results()
        common = {"fingerprint": "f", "bootstrap_port": 0, "backend": "tcp"}
        config = partial(HandOffConfig, **common, **settings)
        num_bytes = NUM_LAYERS * NUM_BLOCKS * SIZE
        self.memory = [torch.full((num_bytes,), fill, dtype=torch.uint8) for fill in (1, 0)]
        blocks = RankBlocks(NUM_BLOCKS, PAGE, pieces_of("layers"), are_alike=True)
        caches = [Caches(memory, blocks) for memory in self.memory]
        self.prefill = PrefillWorker(config(role="prefill"), caches[0], ONLY, queue)
        self.decode = DecodeWorker(config(role="decode"), caches[1], ONLY)

    def grant(self, request_id, page_ids):
        port = self.prefill.agent.port
        return BlockGrant(request_id, ROOM, "127.0.0.1", port, page_ids, 0, ASKED)

    def compute(self, request_id, prompt=ASKED):
        """Compute and push a one-page prompt at prefill."""
        self.prefill.follow(WorkerOrders(expected=[(request_id, ROOM)]))
        self.prefill.follow(WorkerOrders(pushes=[Pages(ROOM, [1], 0)]))
        for layer in NAMES:
            self.prefill.on_layer_written(layer)
        self.prefill.on_forward_finished()
        self.prefill.follow(
            WorkerOrders(computed={request_id: (ROOM, FirstToken(11, 0, prompt, LOGPROBS))})
        )

    def wait(self, *, received, handed_off=()):
        def is_done():
            return self.results.received == received and self.reports.handed_off == Counter(
                handed_off
            )

        self.wait_until(is_done)

    def wait_until(self, is_done):
        def step():
            for worker in (self.prefill, self.decode):
                results = worker.results(set(), wait_s=0.01)
                self.results.received |= results.received
                self.results.failed |= results.failed
                self.reports.add(worker.take_reports() or WorkerReports())

        assert eventually(is_done, step), self.results

    def close(self):
        for worker in (self.prefill, self.decode):
            worker.close()
            worker.waker.close()


@pytest.fixture
def pair():
    with contextlib.closing(Pair()) as pair:
        yield pair


def test_prompt_lands_with_its_first_token(pair):
    pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5])]))
    pair.compute("a")
    pair.wait(received={"a"}, handed_off=["a"])
    assert (pair.reports.landed, pair.results.failed) == ({"a": LANDED}, set())


def test_blocks_of_a_hand_off_are_free_once_vllm_finishes_its_request(pair):
    pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5])]))
    pair.compute("a")
    pair.wait(received={"a"}, handed_off=["a"])
    assert pair.prefill.results({"a"}).sent == {"a"}


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_blocks_on_a_device_are_pushed_once_it_has_computed_them(granularity):
    made = []
    queue = DeviceQueue(lambda: made.append(FakeEvent()) or made[-1])
    with contextlib.closing(Pair(queue=queue, push_granularity=granularity)) as pair:
        pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5])]))
        pair.compute("a")
        pair.wait_until(lambda: pair.reports.granted["a"])
        assert not pair.reports.landed
        pair.memory[0].fill_(9)  # what the device computes only now
        for event in made:
            event.passed.set()
        pair.wait(received={"a"}, handed_off=["a"])
        assert pair.reports.landed == {"a": LANDED}
        assert set(pair.memory[1].tolist()) == {0, 9}


def test_failure_of_the_device_ends_the_worker():
    with contextlib.closing(Pair(queue=DeviceQueue(BrokenEvent))) as pair:
        failed = threading.Event()

        def step():
            try:
                pair.compute("a")
            except RuntimeError:
                failed.set()

        assert eventually(failed.is_set, step)


def test_devices_are_divided_among_the_ranks_of_a_host():
    hosts = ("a", "a", "b", "b")
    assert [Rank(each, 4, hosts=hosts).on_host() for each in range(4)] == [(0, 2), (1, 2)] * 2
    assert [Rank(each, 2, 1, 2, hosts).on_host() for each in range(2)] == [(0, 2), (1, 2)]
    assert Rank(3, 4).on_host() == (3, 4)


def test_different_prompt_in_the_room_fails_the_request(pair):
    pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5])]))
    pair.compute("a", prompt=0xB)
    pair.wait(received={"a"}, handed_off=["a"])
    assert (pair.reports.landed, pair.results.failed) == ({}, {"a"})
    assert pair.reports.failed["a"].code == "transfer_refused"


def test_blocks_of_a_lost_prefill_return_only_once_it_is_fenced(pair, monkeypatch):
    fence, let_go = TcpListener.fence, threading.Event()

    def fence_later(listener, peer):
        assert let_go.wait(PATIENCE_S)
        fence(listener, peer)

    pair.prefill.follow(WorkerOrders(expected=[("a", ROOM)]))
    pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5])]))
    pair.wait_until(lambda: pair.reports.granted["a"])
    monkeypatch.setattr(TcpListener, "fence", fence_later)
    pair.prefill.agent.close()
    pair.wait_until(lambda: "a" in pair.reports.failed)
    assert pair.results.received == set()
    let_go.set()
    pair.wait(received={"a"})
    assert pair.results.failed == {"a"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_shm_is_rejected_for_blocks_that_vllm_allocated(role):
    config = HandOffConfig(role=role, fingerprint="f", backend="shm")
    blocks = RankBlocks(NUM_BLOCKS, PAGE, pieces_of("layers"), are_alike=True)
    memory = torch.zeros(NUM_LAYERS * NUM_BLOCKS * SIZE, dtype=torch.uint8)
    with pytest.raises(ConfigInvalid, match="use auto or tcp"):
        make_worker(config, memory, blocks, ONLY)


def test_second_request_in_an_open_room_fails_and_the_first_lands(pair):
    pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5]), pair.grant("b", [6])]))
    pair.compute("a")
    pair.wait(received={"a", "b"}, handed_off=["a"])
    assert (pair.reports.landed, pair.results.failed) == ({"a": LANDED}, {"b"})
    assert "room 7 is in use" in pair.reports.failed["b"].message


def test_closed_room_can_be_reused(pair):
    for request_id in ("a", "b"):
        pair.decode.follow(WorkerOrders(grants=[pair.grant(request_id, [5])]))
        pair.compute(request_id)
        pair.wait(received={request_id}, handed_off=[request_id])
        pair.results, pair.reports.handed_off = Results(), Counter()
    assert pair.reports.landed == {"a": LANDED, "b": LANDED}


def test_second_prompt_in_an_open_room_fails_at_prefill(pair):
    pair.prefill.follow(WorkerOrders(expected=[("a", ROOM), ("b", ROOM)]))
    assert set((pair.prefill.take_reports() or WorkerReports()).failed) == {"b"}
    assert pair.prefill.results({"b"}).sent == {"b"}
    pair.decode.follow(WorkerOrders(grants=[pair.grant("a", [5])]))
    pair.prefill.follow(WorkerOrders(pushes=[Pages(ROOM, [1], 0)]))
    pair.prefill.on_forward_finished()
    pair.prefill.follow(WorkerOrders(computed={"a": (ROOM, FirstToken(11, 0, ASKED, LOGPROBS))}))
    pair.wait(received={"a"}, handed_off=["a"])
    assert pair.reports.landed == {"a": LANDED}


def test_room_of_an_empty_grant_rejects_a_second_request(pair):
    pair.decode.follow(WorkerOrders(grants=[pair.grant("", []), pair.grant("b", [6])]))
    pair.wait(received={"b"})
    assert pair.results.failed == {"b"}


def test_time_limits_of_the_config_reach_the_links():
    settings = {"heartbeat_interval_ms": 250.0, "grant_timeout_s": 1.5, "landed_timeout_s": 3.5}
    settings["early_grant_timeout_s"] = 2.5
    with contextlib.closing(Pair(**settings)) as pair:
        sender, receiver = pair.prefill.agent._timeouts, pair.decode.agent._timeouts
    assert (sender.heartbeat.interval_s, sender.grant_s) == (0.25, 1.5)
    assert sender.early_grant_s == 2.5
    assert (receiver.heartbeat.interval_s, receiver.landed_s) == (0.25, 3.5)
