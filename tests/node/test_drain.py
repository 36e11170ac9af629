"""A draining node loses no token and no finish, whenever the order arrives and however late edge workers read."""

from functools import partial

import pytest

from tandem.decode.role import DecodeRole
from tandem.node.answers import Answers
from tandem.node.life.engine_process import DrainOrder
from tandem.node.loop import EngineLoop
from tandem.wire.channel import Inbox, Link, Waker
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Epoch, GenerateRequest, RequestId, SamplingParams
from tandem.wire.messages import (
    FromEngine,
    Ping,
    RequestFailed,
    StartColocated,
    ToEngine,
    TokenBatch,
)
from tests.engine.toy_runner import toy_answer, toy_engine
from tests.patience import patiently, until

PROMPTS = {"a": [5, 6, 7], "b": [9] * 11, "c": [3]}
NUM_TOKENS = {"a": 3, "b": 6, "c": 1}


class Edge:
    """An edge worker that reads, and then pings, at intervals.

    Attributes:
        heard: Of each request: its tokens, then its finish or the code of its error.
    """

    def __init__(self, address: str) -> None:
        self._link: Link[FromEngine] = Link(address, FromEngine)
        self._streams = dict(enumerate(PROMPTS, 1))
        self.heard: dict[str, list] = {}

    def start(self, name: str) -> bool:
        """Send a request; return False while the link is not up."""
        stream = 1 + list(PROMPTS).index(name)
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_ids=PROMPTS[name],
            sampling=SamplingParams(
                temperature=0, max_new_tokens=NUM_TOKENS[name], ignore_eos=True
            ),
        )
        try:
            self._link.send(StartColocated(request=request, stream=stream))
        except PeerLost:
            return False
        self.heard[name] = []
        return True

    def read(self) -> None:
        while (message := self._link.receive()) is not None:
            if isinstance(message, RequestFailed):
                self.heard[message.request_id].append(message.error.code)
            elif isinstance(message, TokenBatch):
                self._take(message)
        self._link.send(Ping())

    def _take(self, batch: TokenBatch) -> None:
        for stream, token in zip(batch.streams, batch.token_ids, strict=True):
            self.heard[self._streams[stream]].append(token)
        for delta in batch.deltas:
            heard = self.heard[delta.request_id]
            heard += delta.token_ids
            if delta.finish is not None:
                heard.append(delta.finish.reason)

    def close(self) -> None:
        self._link.close()


class Node:
    """A node in this thread. `at_end`: what its edge worker has received when the drain is reported."""

    def __init__(self, *, is_overlapped: bool) -> None:
        self.engine, _ = toy_engine(64, 4, is_overlapped=is_overlapped)
        self._inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
        self._waker = Waker()
        answers = Answers(self._inbox, Epoch(1))
        self.role = DecodeRole(self.engine, None, answers, 8, 8)
        self.edge = Edge(self._inbox.address)
        self.at_end = None
        self.loop = EngineLoop(
            self.role, self._inbox, answers, self._waker, on_drained=self._drained
        )

    def _drained(self, _number: int) -> None:
        self.at_end = {name: list(heard) for name, heard in self.edge.heard.items()}

    def close(self) -> None:
        self.edge.close()
        self._inbox.close()
        self._waker.close()


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
@pytest.mark.parametrize("names", ["abc", "c"])
@pytest.mark.parametrize("num_passes", [0, 1, 2, 3, 5, 7, 9])
def test_edge_worker_has_every_token_when_the_drain_is_reported(
    names, num_passes, timeout_s, is_overlapped
):
    node = Node(is_overlapped=is_overlapped)
    try:
        for name in names:
            until(partial(node.edge.start, name))
        # All requests arrive before the first forward.
        until(lambda: len(node.role.tickets()) == len(names), node.loop._listen)
        for _ in range(num_passes):
            node.loop.run_once(0)
        node.loop.order(DrainOrder(number=1, timeout_s=timeout_s))
        for number, _ in enumerate(patiently()):
            node.loop.run_once(0.002)
            if node.at_end is not None:
                break
            if number % 4 == 3:
                node.edge.read()
        assert node.at_end is not None
        for name, heard in node.at_end.items():
            *tokens, last = heard
            expected = toy_answer(PROMPTS[name], NUM_TOKENS[name])
            if last == "length":
                assert tokens == expected
            else:
                assert last == "node_draining"
                assert tokens == expected[: len(tokens)]
                assert len(tokens) < len(expected), "it was finished, and handed over all the same"
        if timeout_s:
            assert {heard[-1] for heard in node.at_end.values()} == {"length"}
    finally:
        node.close()
