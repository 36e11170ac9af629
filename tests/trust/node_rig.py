"""A prefill and a decode node in one process, over toy models, at whose links anybody may knock."""

from contextlib import ExitStack

from tandem.decode.role import DecodeRole
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.answers import Answers
from tandem.node.loop import EngineLoop
from tandem.prefill.role import PrefillRole
from tandem.wire.channel import Inbox, Link, Waker, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Epoch, GenerateRequest, RequestId, SamplingParams
from tandem.wire.messages import (
    Cancel,
    FromEngine,
    Ping,
    Pong,
    StartColocated,
    StartDecode,
    StartPrefill,
    ToEngine,
)
from tests.agents import decode_agent, prefill_agent
from tests.calm import CALM, calm_receiver, calm_sender
from tests.engine.toy_runner import toy_engine
from tests.loopback import LoopbackTransport
from tests.patience import Clock, eventually

NUM_PAGES, PAGE = 24, 4
# What a pass takes of the agents' time. Whoever lies runs into their limits soon. For an honest request time stands
# still: the agents' threads may need any number of passes.
PASS_S = 0.001
PREFILL, DECODE, COLOCATED = range(3)


class Node:
    """One engine's loop, and a link to its inbox."""

    def __init__(self, stack: ExitStack, make_role, epoch: int) -> None:
        self.engine, _ = toy_engine(NUM_PAGES, PAGE, context_length=64)
        self.waker = Waker()
        stack.callback(self.waker.close)
        self.inbox: Inbox[ToEngine] = stack.enter_context(
            Inbox("tcp://127.0.0.1:0", ToEngine, heartbeat=CALM)
        )
        answers = Answers(self.inbox, Epoch(epoch))
        self.role = make_role(self.engine, answers, self.waker)
        self.loop = EngineLoop(self.role, self.inbox, answers, self.waker)
        self.link = self.make_link()
        stack.callback(lambda: self.link.close())  # noqa: PLW0108 - of then

    def make_link(self) -> Link[FromEngine]:
        return Link(self.inbox.address, FromEngine, heartbeat=CALM)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left: no ticket, no page, no work."""
        self.engine.cache.check_integrity()
        counts = self.engine.counts()
        is_free = counts.free + counts.cached == counts.total
        return is_free and not self.role.tickets() and not self.role.has_work


class Cluster:
    """Three nodes: prefill, decode and one that is both."""

    def __init__(self, stack: ExitStack) -> None:
        self._clock, self._pass_s = Clock(), PASS_S
        transport = LoopbackTransport()
        layout = KVLayout(
            num_pages=NUM_PAGES, page_size=PAGE, num_layers=1, num_kv_heads=1, head_dim=1,
            dtype="float32", itemsize=4,
        )  # fmt: skip
        source, target = (
            stack.enter_context(MemoryRegion.private(layout.pool_bytes)) for _ in range(2)
        )

        def prefill(engine, answers, waker):
            limits = calm_sender(grant_s=0.05, early_grant_s=0.05)
            self.sender = prefill_agent(
                layout, source, [transport], timeouts=limits, waker=waker, clock=self._clock
            )
            stack.callback(self.sender.close)
            return PrefillRole(engine, self.sender, answers, 8)

        def decode(engine, answers, waker):
            limits = calm_receiver(connect_s=0.05, landed_s=0.2, released_s=0.2)
            self.receiver = decode_agent(
                layout, target, [transport], timeouts=limits, waker=waker, clock=self._clock
            )
            stack.callback(self.receiver.close)
            return DecodeRole(engine, self.receiver, answers, 8, 8)

        def both(engine, answers, waker):
            del waker
            return DecodeRole(engine, None, answers, 8, 8)

        self.nodes = [
            Node(stack, make, epoch) for epoch, make in enumerate((prefill, decode, both), 1)
        ]

    def step(self) -> None:
        """Let every node make a pass."""
        self._clock.now_s += self._pass_s
        for node in self.nodes:
            node.loop.run_once(0)

    def tell(self, index: int, frames) -> None:
        """Send these frames to one node and see that it has read them: it answers what comes last."""
        node = self.nodes[index]
        for frame in (*frames, None):
            self.until(lambda frame=frame: _sent(node.link, frame))
        self.until(lambda: _heard(node.link, Pong))

    def until(self, is_so) -> None:
        """Let all nodes run until something is so."""

        def step() -> None:
            self.step()
            wait([], 0.0005)

        assert eventually(is_so, step), [node.engine.counts() for node in self.nodes]

    def settle(self) -> None:
        """Hang up, as every liar does in the end, and see that nothing of it is left."""
        for node in self.nodes:
            node.link.close()
            node.link = node.make_link()
            # What a broken connection does after 0.2 s of nobody asking, now.
            for ticket in node.role.tickets():
                node.role.cancel(ticket)
        self.until(lambda: all(node.is_idle for node in self.nodes))

    def serve_one(self) -> None:
        """Serve an honest request through the pair, and one alone."""
        request = GenerateRequest(
            request_id=RequestId("honest"),
            prompt_ids=[5, 6, 7, 8, 9],
            sampling=SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True),
        )
        room = 424242
        decode = StartDecode(
            request=request, room=room, bootstrap_host="127.0.0.1", bootstrap_port=self.sender.port
        )
        starts = [StartPrefill(request=request, room=room), decode, StartColocated(request=request)]
        self._pass_s = 0.0
        for node, start in zip(self.nodes, starts, strict=True):
            self.until(lambda node=node, start=start: _sent(node.link, start))
        for node in self.nodes[DECODE:]:
            tokens: set[int] = set()
            self.until(lambda node=node, tokens=tokens: _count(node.link, tokens) == 3)
        self._pass_s = PASS_S
        for node in self.nodes:
            node.link.send(Cancel(request_id=request.request_id))
        self.until(lambda: all(node.is_idle for node in self.nodes))


def _sent(link, frame) -> bool:
    try:
        if isinstance(frame, bytes):
            link.socket.send(frame, 1)  # zmq.NOBLOCK
        else:
            link.send(frame or Ping())
    except PeerLost:
        return False
    except Exception as error:  # zmq.Again, while the connection is being made
        if type(error).__name__ == "Again":
            return False
        raise
    return True


def _heard(link, kind) -> bool:
    while (message := link.receive()) is not None:
        if isinstance(message, kind):
            return True
    return False


def _count(link, tokens: set[int]) -> int:
    while (message := link.receive()) is not None:
        for delta in getattr(message, "deltas", []):
            tokens.update(range(delta.index, delta.index + len(delta.token_ids)))
        tokens.update(getattr(message, "indexes", []))
    return len(tokens)
