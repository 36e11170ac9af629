"""A prefill's and a decode's worker over TCP, without vLLM."""

import contextlib
from collections import Counter
from functools import partial

import pytest
import torch

from tandem.vllm.caches import Blocks, Caches
from tandem.vllm.halves import First, Grant, Orders, Pages, Reports
from tandem.vllm.worker import DecodeWorker, HandOffConfig, PrefillWorker, Rank, Results
from tests.kept_port import kept_port
from tests.patience import patiently
from tests.tandem.vllm.test_caches import NUM_BLOCKS, NUM_LAYERS, PAGE, SIZE, pieces_of

ROOM, ASKED = 7, 0xA
LANDED = First(11, 0)
ONLY = Rank(0, 1)


class Pair:
    """The workers of one rank. `first_port`: of prefill's first rank; 0: any, where that is the only one."""

    def __init__(self, rank=ONLY, first_port=0):
        self.reports, self.results, self._first_port = Reports(), Results(), first_port
        settings = {"fingerprint": "f", "bootstrap_port": first_port, "transfer_backend": "tcp"}
        config = partial(HandOffConfig, **settings)
        num_bytes = NUM_LAYERS * NUM_BLOCKS * SIZE
        self._memory = [torch.full((num_bytes,), fill, dtype=torch.uint8) for fill in (1, 0)]
        blocks = Blocks(NUM_BLOCKS, PAGE, pieces_of("layers"), are_alike=True)
        caches = [Caches(memory, blocks, is_shared=False) for memory in self._memory]
        self.prefill = PrefillWorker(config(role="prefill"), caches[0], rank)
        self.decode = DecodeWorker(config(role="decode"), caches[1], rank)

    def grant(self, request_id, page_ids):
        port = self._first_port or self.prefill.agent.port
        return Grant(request_id, ROOM, "127.0.0.1", port, page_ids, 0, ASKED)

    def compute(self, request_id, prompt=ASKED):
        """Let prefill compute and push a prompt of a page."""
        self.prefill.follow(Orders(expected=[(request_id, ROOM)]))
        self.prefill.follow(Orders(pushes=[Pages(ROOM, [1], 0)]))
        self.prefill.saved()
        self.prefill.follow(Orders(computed=[(ROOM, First(11, 0, prompt))]))

    def wait(self, *, received, handed_off=()):
        for _ in patiently():
            if self.results.received == received and self.reports.handed_off == Counter(handed_off):
                return
            for worker in (self.prefill, self.decode):
                results = worker.results(set(), wait_s=0.01)
                self.results.received |= results.received
                self.results.failed |= results.failed
                self.reports.add(worker.take_reports() or Reports())
        pytest.fail(str(self.results))

    def close(self):
        for worker in (self.prefill, self.decode):
            worker.close()
            worker.waker.close()


@pytest.fixture
def pair():
    with contextlib.closing(Pair()) as pair:
        yield pair


def test_a_prompt_lands_with_its_first_token(pair):
    pair.decode.follow(Orders(grants=[pair.grant("a", [5])]))
    pair.compute("a")
    pair.wait(received={"a"}, handed_off=["a"])
    assert (pair.reports.landed, pair.results.failed) == ({"a": LANDED}, set())


def test_a_stage_of_a_pipeline_asks_the_same_stage_whose_port_is_behind_those_of_the_stages_before():
    with kept_port() as port:
        first_port = port - Rank(0, 1, stage=2).first_port
        assert first_port == port - 2
        with contextlib.closing(Pair(Rank(0, 1, stage=2), first_port)) as pair:
            pair.decode.follow(Orders(grants=[pair.grant("a", [5])]))
            pair.compute("a")
            pair.wait(received={"a"}, handed_off=["a"])
            assert (pair.reports.landed, pair.results.failed) == ({"a": LANDED}, set())


def test_another_prompt_in_the_room_fails_the_request(pair):
    pair.decode.follow(Orders(grants=[pair.grant("a", [5])]))
    pair.compute("a", prompt=0xB)
    pair.wait(received={"a"}, handed_off=["a"])
    assert (pair.reports.landed, pair.results.failed) == ({}, {"a"})
    assert pair.reports.failed["a"].code == "transfer_refused"


def test_a_second_request_in_an_open_room_fails_and_the_first_lands(pair):
    pair.decode.follow(Orders(grants=[pair.grant("a", [5]), pair.grant("b", [6])]))
    pair.compute("a")
    pair.wait(received={"a", "b"}, handed_off=["a"])
    assert (pair.reports.landed, pair.results.failed) == ({"a": LANDED}, {"b"})
    assert "room 7 is in use" in pair.reports.failed["b"].message


def test_a_room_may_be_used_again_once_it_is_over(pair):
    for request_id in ("a", "b"):
        pair.decode.follow(Orders(grants=[pair.grant(request_id, [5])]))
        pair.compute(request_id)
        pair.wait(received={request_id}, handed_off=[request_id])
        pair.results, pair.reports.handed_off = Results(), Counter()
    assert pair.reports.landed == {"a": LANDED, "b": LANDED}


def test_a_second_prompt_in_an_open_room_fails_at_prefill_and_is_let_go_when_it_ends(pair):
    pair.prefill.follow(Orders(expected=[("a", ROOM), ("b", ROOM)]))
    assert set((pair.prefill.take_reports() or Reports()).failed) == {"b"}
    assert pair.prefill.results({"b"}).sent == {"b"}
    pair.decode.follow(Orders(grants=[pair.grant("a", [5])]))
    pair.prefill.follow(Orders(pushes=[Pages(ROOM, [1], 0)]))
    pair.prefill.saved()
    pair.prefill.follow(Orders(computed=[(ROOM, First(11, 0, ASKED))]))
    pair.wait(received={"a"}, handed_off=["a"])
    assert pair.reports.landed == {"a": LANDED}


def test_a_room_that_needs_no_pages_is_open_to_no_other_request(pair):
    pair.decode.follow(Orders(grants=[pair.grant("", []), pair.grant("b", [6])]))
    pair.wait(received={"b"})
    assert pair.results.failed == {"b"}
