"""Both roles with two ranks each, over real links; rank 1's KV is a copy of rank 0's."""

from itertools import product

import pytest

from tandem.decode.role import DecodeRole
from tandem.kvtransfer.agents.group import DecodeGroup, PrefillGroup
from tandem.kvtransfer.agents.receiver import DecodeAgent, ReceiverTimeouts
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.prefill.role import PrefillRole
from tandem.wire.errors import PeerLost
from tandem.wire.hand_off import RankAddress
from tests.agents import decode_agent, prefill_agent
from tests.hand_off_rig import IMPATIENT, NUM_PAGES, Pair, prompt_of
from tests.sample import sampled


class CopiedSender:
    """Rank 1's agent, which copies rank 0's memory before it pushes."""

    def __init__(self, agent: PrefillAgent, own: MemoryRegion, source: MemoryRegion) -> None:
        self._agent, self._own, self._source = agent, own, source
        self.expect, self.finish = agent.expect, agent.finish
        self.abort, self.events = agent.abort, agent.events
        self.push_by_layer = lambda _runs: lambda _layer: None  # `push` fills its memory

    def push(self, room, page_ids, first_page_index):
        size = self._source.size_bytes // NUM_PAGES
        for page in page_ids:
            run = slice(page * size, (page + 1) * size)
            self._own.buffer[run] = self._source.buffer[run]
        self._agent.push(room, page_ids, first_page_index)


class GroupPair(Pair):
    """A pair whose roles have agents on two ranks."""

    def __init__(self, path, transport: str, timeouts: ReceiverTimeouts | None = None) -> None:
        super().__init__(path, transport)
        self.timeouts = timeouts
        self.sender.close()
        self.receiver.close()
        self.layout = self.receiver._layout
        self.allowed = transports(transport, TransportConfig())
        size = self.source.size_bytes
        self.sources = [self.source, MemoryRegion.private(size)]
        self.targets = [self.target, MemoryRegion.shared(size)]
        last = self._sender(1)
        self.sender = self._sender(0, [RankAddress(0), RankAddress(last.port)])
        self.senders = [self.sender, last]
        self.receivers = [self._receiver(rank) for rank in range(2)]
        self.receiver = self.receivers[0]
        copied = CopiedSender(last, self.sources[1], self.sources[0])
        self.prefill = PrefillRole(
            self.prefill_engine, PrefillGroup(self.sender, [copied]), self.prefill_answers, 100
        )
        self.decode = DecodeRole(
            self.decode_engine,
            DecodeGroup(self.receiver, self.receivers[1:]),
            self.decode_answers,
            50,
            100,
        )

    def _sender(self, rank: int, ranks=()) -> PrefillAgent:
        return prefill_agent(self.layout, self.sources[rank], **self._of(rank), ranks=ranks)

    def _receiver(self, rank: int) -> DecodeAgent:
        return decode_agent(
            self.layout, self.targets[rank], **self._of(rank), timeouts=self.timeouts
        )

    def _of(self, rank: int):
        """Return the arguments of both agents of a rank: its place in a model of twice as many heads."""
        shard = Shard(rank, 2, 2 * self.layout.num_kv_heads)
        return {"transports": self.allowed, "waker": self.waker, "shard": shard}

    def no_rank_holds_a_room(self) -> bool:
        senders = [agent.statistics() for agent in self.senders]
        receivers = [agent.statistics() for agent in self.receivers]
        return not any(
            s.num_waiting or s.num_pushing or s.num_early_grants for s in senders
        ) and not any(
            r.num_reserving or r.num_granted or r.num_withdrawn or r.num_fencing for r in receivers
        )

    def close(self) -> None:
        for agent in (*self.receivers, *self.senders):
            agent.close()
        self.waker.close()
        for region in (*self.sources, *self.targets):
            region.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request, tiny_model):
    made = GroupPair(tiny_model("qwen3"), request.param)
    yield made
    made.close()


@pytest.fixture(params=["shm", "tcp"])
def impatient_pair(request, tiny_model):
    made = GroupPair(tiny_model("qwen3"), request.param, IMPATIENT)
    yield made
    made.close()


@pytest.mark.parametrize("decode_first", [True, False])
def test_every_rank_pushes_to_the_same_rank(pair, decode_first):
    request = pair.start("a", prompt_of(61), decode_first, max_new_tokens=6, seed=4)
    seen = []

    def landed() -> bool:
        running = pair.running()
        seen.extend(page for active in running for page in active.page_ids[:7])
        return bool(running)

    pair.run_until(landed)
    size = pair.target.size_bytes // NUM_PAGES
    for page in seen:
        run = slice(page * size, (page + 1) * size)
        assert pair.targets[0].buffer[run] == pair.targets[1].buffer[run]
        assert any(pair.targets[1].buffer[run])
    pair.run_until(lambda: pair.decode_answers.finishes["a"])
    pair.run_until(pair.all_pages_are_back)
    assert pair.decode_answers.tokens["a"] == pair.alone(request)[request.request_id]
    assert pair.prefill_answers.finishes["a"] == ["handed_off"]
    assert pair.prefill.load().pushed_bytes == 2 * 8 * size


@pytest.mark.parametrize(
    ("who", "num_passes"),
    sampled(
        product(["prefill", "decode", "both"], [0, 1, 2, 3, 5, 8]),
        *(("prefill", 2), ("prefill", 5), ("decode", 1), ("decode", 3), ("both", 0), ("both", 8)),
    ),
)
def test_cancel_at_any_time_returns_all_pages_of_all_ranks(pair, num_passes, who):
    # Establish the links first: otherwise a cancel before the grant makes prefill wait for its timeout.
    pair.start("first", prompt_of(5), max_new_tokens=1)
    pair.run_until(pair.all_pages_are_back)
    pair.start("a", prompt_of(100)[::-1], max_new_tokens=8)
    passes = iter(range(num_passes))
    pair.run_until(lambda: next(passes, None) is None)
    if who in ("prefill", "both"):
        pair.prefill.cancel(pair.ticket("a"))
    if who in ("decode", "both"):
        pair.decode.cancel(pair.ticket("a"))
    pair.run_until(pair.all_pages_are_back)
    pair.run_until(pair.no_rank_holds_a_room)
    request = pair.start("b", prompt_of(20), max_new_tokens=3)
    pair.run_until(lambda: pair.decode_answers.finishes["b"])
    assert pair.decode_answers.tokens["b"] == pair.alone(request)[request.request_id]


@pytest.mark.parametrize("num_passes", sampled([1, 3, 5], 3))
def test_death_of_a_prefill_rank_fails_the_hand_off_without_losing_pages(
    impatient_pair, num_passes
):
    pair = impatient_pair
    for i in range(4):
        pair.start(str(i), prompt_of(100), max_new_tokens=8)
    passes = iter(range(num_passes))
    pair.run_until(lambda: next(passes, None) is None)
    pair.senders[1].close()
    heard = pair.decode_answers
    pair.run_until(lambda: all(str(i) in heard.errors or heard.finishes[str(i)] for i in range(4)))
    for error in heard.errors.values():
        assert isinstance(error, PeerLost)

    def decode_is_clean() -> bool:
        counts = pair.decode_engine.counts()
        return counts.free + counts.cached == counts.total

    pair.run_until(decode_is_clean)
    pair.decode_engine.cache.check_integrity()
