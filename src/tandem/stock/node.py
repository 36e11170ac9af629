"""One stock node: polls its engine, and serves the node protocol while the engine answers.

```
 poll ──answers──▶ learn ──▶ a life: an engine link of its own ──lost, restarted, no answer in time──┐
   ▲                                                                                                  │ the link closes,
   └──────────────────────────────────────────────────────────────────────────────────────────────────┘ the router replays
```
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import zmq

from tandem.node.answers import Answers
from tandem.node.config import NodeRole
from tandem.node.loop import EngineLoop
from tandem.router.stock_options import StockOptions
from tandem.stock.dialect import Dialect, EngineFacts
from tandem.stock.generator import StockGenerator
from tandem.stock.kv_events import KvEventSubscriber
from tandem.stock.model_files import ModelFiles
from tandem.stock.rooms import Meeting, Rooms
from tandem.stock.sent import SentPrefixes
from tandem.telemetry.log import get_logger
from tandem.vllm.node.outputs import HandOffParams
from tandem.vllm.node.role import VllmRole
from tandem.wire.channel import Heartbeat, Inbox, Waker, tcp_address
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import new_epoch
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import ModelInfo, NodeInfo, ToEngine
from tandem.wire.prefixes import BLOCK_TOKENS, PrefixJournal

log = get_logger(__name__)

POLL_INTERVAL_S = 1.0
# Polls of many nodes spread over the interval.
JITTER = 0.2
# Longest time between two passes of an idle loop, which watches heartbeats.
TURN_S = 0.1
MAX_WAITING = 1 << 16


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the nodes of one adapter share.

    Attributes:
        host: Address on which the nodes' links listen.
        port: Port of the adapter's HTTP, where the halves of requests meet.
        files: Returns the files of a model by its name on the engine. Called in a thread.
        rooms: Rooms of this adapter's prefill nodes.
        meeting: Returns the rooms of a hand-off, for decode.
        options: What engines do not report of themselves.
    """

    host: str
    port: int
    key: ChannelKey | None
    heartbeat: Heartbeat
    files: Callable[[str], ModelFiles]
    rooms: Rooms
    meeting: Callable[[HandOffParams], Meeting]
    options: StockOptions


class StockLife:
    """One life of an engine, on an engine link of its own. The node's loop runs inside asyncio's."""

    def __init__(
        self,
        role: NodeRole,
        generator: StockGenerator,
        journal: PrefixJournal,
        around: Surroundings,
    ) -> None:
        self.epoch, self._asyncio = new_epoch(), asyncio.get_running_loop()
        address, heartbeat = tcp_address(around.host, 0), around.heartbeat
        self.inbox: Inbox[ToEngine] = Inbox(address, ToEngine, around.key, heartbeat)
        answers = Answers(self.inbox, self.epoch, journal)
        self.role = VllmRole(role, generator, answers, max_waiting=MAX_WAITING)
        self._waker = Waker()
        self._loop = EngineLoop(self.role, self.inbox, answers, self._waker, heartbeat=heartbeat)
        self._is_due = self._is_over = False
        generator.on_news = self._note_due
        self._asyncio.add_reader(self.inbox.socket.fileno(), self._note_due)
        self._tick()

    def _note_due(self) -> None:
        if not self._is_due and not self._is_over:
            self._is_due = True
            self._asyncio.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        if self._is_over:
            return
        self._loop.run_once(0.0)
        # ZMQ's descriptor signals only changes.
        if int(self.inbox.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._note_due()

    def _tick(self) -> None:
        self._note_due()
        self._timer = self._asyncio.call_later(TURN_S, self._tick)

    def close(self) -> None:
        """Cancel every request, and close the link."""
        for ticket in self.role.tickets():
            self.role.cancel(ticket)
        self._is_over = True
        self._timer.cancel()
        self._asyncio.remove_reader(self.inbox.socket.fileno())
        self.inbox.close()
        self._waker.close()


class StockNode:
    """A node whose engine is another process's.

    Attributes:
        reason: Why the node cannot be used; empty while it can.
    """

    def __init__(self, dialect: Dialect, role: NodeRole, around: Surroundings) -> None:
        self._dialect, self._role, self._around = dialect, role, around
        self.reason = "its engine has not been reached yet"
        self._life: StockLife | None = None
        self._info: NodeInfo | None = None
        self.tokenizer: dict[str, str] = {}

    async def watch(self) -> None:
        """Watch the engine until cancelled."""
        try:
            while True:
                try:
                    await self._live()
                except TandemError as error:
                    self._end(error.message)
                except Exception as error:  # whatever one engine sends must not affect other nodes
                    log.exception("stock_node.failed")
                    self._end(f"its engine's answers cannot be read: {error!r}")
                await asyncio.sleep(_interval_s())
        finally:
            self._end("the adapter stops")

    async def _live(self) -> None:
        """Serve one life of the engine. Raises the error that ends it."""
        facts = await self._dialect.learn()
        around = self._around
        files = await asyncio.to_thread(around.files, facts.model)
        model = files.info(facts)
        load = await self._dialect.poll()
        sent = SentPrefixes(load.num_pages * load.page_size // BLOCK_TOKENS)
        generator = StockGenerator(self._dialect, model, around.rooms, around.meeting, sent)
        generator.load = load
        self.tokenizer = files.tokenizer
        async with self._cached_prefixes(facts, sent) as journal:
            life = self._life = StockLife(self._role, generator, journal, around)
            self._info = self._node_info(facts, life, model)
            self.reason = ""
            log.info("stock_node.up", engine=self._dialect.engine, model=facts.name)
            while True:
                generator.suspect.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_interval_s()):
                        await generator.suspect.wait()
                generator.load = await self._dialect.poll()

    @asynccontextmanager
    async def _cached_prefixes(
        self, facts: EngineFacts, sent: SentPrefixes
    ) -> AsyncIterator[PrefixJournal]:
        """Yield what the engine publishes that it caches, else what it was sent."""
        host = urlsplit(self._dialect.url).hostname or ""
        endpoint, replay_endpoint = self._around.options.events_of(host)
        # Which rank serves a request is the engine's choice, so what one of them caches is of no use.
        if not endpoint or facts.num_ranks > 1:
            yield sent.journal
            return
        subscriber = KvEventSubscriber(endpoint, replay_endpoint)
        following = asyncio.create_task(subscriber.run())
        try:
            yield subscriber.follower.journal
        finally:
            following.cancel()
            await asyncio.wait([following])

    def _end(self, reason: str) -> None:
        if reason != self.reason:
            log.warning("stock_node.down", reason=reason)
        self.reason = reason
        if self._life is not None:
            self._life.close()
            self._life = None

    def _node_info(self, facts: EngineFacts, life: StockLife, model: ModelInfo) -> NodeInfo:
        is_decode = self._role == "decode"
        return NodeInfo(
            role=self._role,
            version=facts.version,
            epoch=life.epoch,
            engine_port=life.inbox.port,
            model=model,
            bootstrap_port=None if is_decode else self._around.port,
            max_prompt_tokens=facts.max_prompt_tokens,
            heartbeat_interval_ms=1000 * self._around.heartbeat.interval_s,
            takes_prompts=is_decode and facts.takes_prompts,
            engine=self._dialect.engine,
            continues_sampling=False,
        )

    def info(self) -> NodeInfo:
        """Return the node with its load. Raises `PeerLost` with the reason while it cannot be used."""
        if self._life is None or self._info is None:
            raise PeerLost(self.reason)
        return msgspec.structs.replace(self._info, load=self._life.role.load())


def _interval_s() -> float:
    return POLL_INTERVAL_S * random.uniform(1 - JITTER, 1 + JITTER)
