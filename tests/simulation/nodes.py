"""Prefill and decode nodes: the real loop, role, engine and agent, each on simulated ground."""

from contextlib import contextmanager
from dataclasses import dataclass

from tandem.decode.role import DecodeRole
from tandem.engine.pages.kv_cache import PageState
from tandem.kvtransfer.agents.receiver import DecodeAgent, ReceiverTimeouts
from tandem.kvtransfer.agents.sender import PrefillAgent, SenderTimeouts
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.answers import Answers
from tandem.node.life.engine_process import DrainOrder, Resume
from tandem.node.life.life import Life, LifeEvent, NodeState
from tandem.node.loop import EngineLoop
from tandem.node.process.announce import INTERVAL_S, TTL_S
from tandem.node.process.supervisor import HAND_OVER_S
from tandem.prefill.role import PrefillRole
from tandem.router.membership.membership import Announcement
from tandem.wire.errors import PeerLost
from tandem.wire.generation import new_epoch
from tandem.wire.messages import ModelInfo, NodeInfo, ToEngine
from tests.loopback import (
    LoopbackConnection,
    LoopbackListener,
    LoopbackTransport,
)
from tests.simulation.processes import CURRENT, Process, Repeated
from tests.simulation.sockets import SimulatedInbox, SimulatedWaker
from tests.simulation.toy import CONTEXT, EOS, VOCAB, toy_engine, toy_layout

ENGINE_PORT, BOOTSTRAP_PORT = 9000, 8998
# Shorter than the product's: a scenario is over in seconds.
SENDER_TIMEOUTS = SenderTimeouts(grant_s=12.0, early_grant_s=8.0)
CONNECT_S, RELEASED_S = 4.0, 5.0
IDLE_S = 0.25


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """How a node is made; the same in all its lives.

    Attributes:
        announces_after_s: Routers hear of it from itself, from then on; None: it is listed.
    """

    num_pages: int
    page_size: int
    chunk_size: int = 16
    is_asynchronous: bool = False
    pushes_layers: bool = True
    verify: str = "always"
    announces_after_s: float | None = None


class OneSidedListener(LoopbackListener):
    """Receives as memory does that a network card writes into: only a fence keeps a peer out.

    The judge sees each write: it must lie in pages that are granted to its room, or in quarantine for it.
    """

    def __init__(self, pool, listeners) -> None:
        super().__init__(pool, listeners)
        self._owners = {}  # rooms, by the page that was granted last

    def permit(self, peer, room, page_ids):
        super().permit(peer, room, page_ids)
        self._owners |= dict.fromkeys(page_ids, room)

    @contextmanager
    def writing(self, peer, room, plan):
        if peer not in self._permits:
            raise PeerLost("this peer was fenced")
        world = self.process.world
        (node,) = [node for node in world.nodes if node.process is self.process]
        pages = self._pool.places.pages(plan.destination_offset, plan.size_bytes)
        for page in set(pages.tolist()):
            state, owner = node.engine.cache.state(page), self._owners.get(page)
            is_right = owner == room and state in (PageState.GRANTED, PageState.QUARANTINED)
            world.check(is_right, f"room {room} writes into page {page}, {state} of room {owner}")
        yield self._pool.region


class SimulatedTransport(LoopbackTransport):
    """Copies within the process, from and to the processes that made its ends."""

    def __init__(self, faults, *, is_one_sided: bool) -> None:
        super().__init__(faults)
        self._kind = OneSidedListener if is_one_sided else LoopbackListener

    def listen(self, pool):
        listener = self._kind(pool, self._listeners)
        listener.process = CURRENT.get()
        return listener

    def connect(self, offer, region):
        plain = super().connect(offer, region)
        connection = SimulatedConnection(self, plain._listener, plain._peer, region)
        connection.far = plain._listener.process
        CURRENT.get().worker.connection = connection
        return connection


class SimulatedConnection(LoopbackConnection):
    """Writes to a process that may be gone."""

    def write(self, room, plan):
        if self.far.is_dead:
            raise PeerLost("its process is gone")
        super().write(room, plan)


class SimulatedNode:
    """One node over all of its lives.

    Attributes:
        slow_until_s: Until then a step takes seconds.
    """

    def __init__(self, world, host: str, role: str, shape: NodeShape) -> None:
        self.world, self.host, self.role_name, self.shape = world, host, role, shape
        self.url = f"http://{host}:8000"
        self.slow_until_s = 0.0
        self.process = None
        self.num_lives = self._num_drains = 0

    def __repr__(self) -> str:
        return f"<SimulatedNode {self.process}>"

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self.process is not None and not (self.process.is_dead or self.process.is_stopped)

    def start(self) -> None:
        """Begin a life."""
        self.num_lives += 1
        self.process = Process(self.world, self.host)
        self.process.context.run(self._build)
        self.life = Life(self.role_name)
        self.life.apply(LifeEvent.LOADED)
        if self.shape.announces_after_s is not None:
            first_s = self.shape.announces_after_s if self.num_lives == 1 else self.world.delay()
            self.process.later(first_s, self._announce)

    def _build(self) -> None:
        world, shape = self.world, self.shape
        self.epoch = new_epoch()
        layout = toy_layout(shape.num_pages, shape.page_size)
        region = MemoryRegion.private(layout.pool_bytes)
        self.engine = toy_engine(
            region,
            layout,
            is_asynchronous=shape.is_asynchronous,
            chunked_prefill_size=shape.chunk_size,
            max_running_requests=32,
        )
        waker = SimulatedWaker()
        inbox = SimulatedInbox(f"tcp://{self.host}:{ENGINE_PORT}", ToEngine)
        answers = Answers(inbox, self.epoch, self.engine.cache.journal)
        if self.role_name == "prefill":
            end = SenderEnd(self.epoch, "toy", layout, region, [world.transport])
            self.agent = PrefillAgent(
                f"tcp://{self.host}:{BOOTSTRAP_PORT}",
                end,
                waker=waker,
                timeouts=SENDER_TIMEOUTS,
                verify=shape.verify,
                min_push_bytes=1,
                clock=world.loop.time,
            )
            self.role = PrefillRole(
                self.engine, self.agent, answers, 1000, pushes_layers=shape.pushes_layers
            )
        else:
            self.agent = DecodeAgent(
                epoch=self.epoch,
                fingerprint="toy",
                layout=layout,
                region=region,
                transports=[world.transport],
                waker=waker,
                timeouts=ReceiverTimeouts(
                    connect_s=CONNECT_S, landed_s=world.plan.landed_s, released_s=RELEASED_S
                ),
                clock=world.loop.time,
                verify=shape.verify,
            )
            self.role = DecodeRole(self.engine, self.agent, answers, 32, 1000)
        self._loop = EngineLoop(
            self.role,
            inbox,
            answers,
            waker,
            clock=world.loop.time,
            log_interval_s=1e9,
            on_drained=lambda number: self.process.later(
                world.latency(), lambda: self._drained(number)
            ),
        )
        passes = Repeated(self.process, self._pass)
        waker.call = passes.wake
        passes.wake()

    def _pass(self) -> float:
        if self.life.state is NodeState.DRAINED:
            self.world.check(not self.role.tickets(), f"{self.host} takes requests when drained")
        had_work = self.role.has_work
        self._loop.run_once(0.0)
        if had_work:
            self.world.note("step", self.host, "step")
        if not self.role.has_work:
            return IDLE_S
        if self.world.loop.time() < self.slow_until_s:
            return self.world.draw.uniform(0.5, 2.5)
        return self.world.step_s()

    def info(self) -> NodeInfo:
        """Return what it says at /server_info."""
        model = ModelInfo(
            name="toy",
            fingerprint="toy",
            context_length=CONTEXT,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
        )
        return NodeInfo(
            role=self.role_name,
            version="0",
            epoch=self.epoch,
            engine_port=ENGINE_PORT,
            bootstrap_port=BOOTSTRAP_PORT if self.role_name == "prefill" else None,
            model=model,
            is_healthy=self.life.state is NodeState.SERVING,
            is_draining=self.life.is_draining,
            takes_prompts=self.role_name == "decode",
            max_prompt_tokens=self.shape.num_pages * self.shape.page_size - 1,
        )

    # ── as a node's parent process does ──────────────────────────────────────────────────────────

    def drain(self, timeout_s: float, *, ends: bool) -> None:
        """Take nothing new, and hand over in `timeout_s` what is left; with `ends`, as by SIGTERM."""
        if not self.is_up or self.life.state is NodeState.LEAVING:
            return
        self.world.note("order", f"{'end' if ends else 'drain'} {self.host} in {timeout_s} s")
        state = self.life.apply(LifeEvent.END if ends else LifeEvent.DRAIN)
        if state is NodeState.ENDED:
            self._end()
        elif state is not NodeState.DRAINED:
            self._num_drains += 1
            order = DrainOrder(number=self._num_drains, timeout_s=timeout_s)
            self._order(order)
            limit_s = timeout_s + HAND_OVER_S
            self.process.later(limit_s, lambda: self._too_late(order.number))

    def resume(self) -> None:
        """Cancel a drain, unless it ends the node."""
        if self.is_up and self.life.state is not NodeState.LEAVING:
            self.world.note("order", f"resume {self.host}")
            self._num_drains += 1
            self.life.apply(LifeEvent.RESUME)
            self._order(Resume())

    def _order(self, order) -> None:
        self.process.later(self.world.latency(), lambda: self._loop.order(order))

    def _drained(self, number: int) -> None:
        if number != self._num_drains or not self.life.is_draining:
            return
        self.world.note("drained", self.host)
        self.world.check(not self.role.tickets(), f"{self.host} is drained and has requests")
        self.world.num_drained += 1
        if self.life.apply(LifeEvent.EMPTIED) is NodeState.ENDED:
            self._end()

    def _too_late(self, number: int) -> None:
        if number != self._num_drains or self.life.state not in (
            NodeState.DRAINING,
            NodeState.LEAVING,
        ):
            return
        self.world.check(
            not self.world.is_calm, f"{self.host} was not drained in time: {self.leftovers()}"
        )
        if self.life.state is NodeState.LEAVING:
            self.life.apply(LifeEvent.TOO_LATE)
            self._end()

    def _end(self) -> None:
        """End as its parent has it end, and begin anew before long."""
        if self.shape.announces_after_s is not None:
            self._say(Announcement(url=self.url, role=self.role_name, is_removed=True))
        self.process.later(self.world.draw.uniform(0.0, 0.01), self.kill)
        self.world.loop.call_later(self.world.draw.uniform(0.05, 6.0), self.restart)

    def _announce(self) -> None:
        """Have the routers know of it, over and over."""
        if self.life.state is not NodeState.ENDED:
            self._say(Announcement(url=self.url, role=self.role_name, ttl_s=TTL_S))
            self.process.later(INTERVAL_S, self._announce)

    def _say(self, said) -> None:
        for router in self.world.routers:
            if not self.world.network.is_cut(self.host, router.host):
                self.world.loop.call_later(self.world.delay(), router.hear, said)

    # ── what may happen to it ────────────────────────────────────────────────────────────────────

    def kill(self, *, is_silent: bool = False) -> None:
        """End its life: the process alone, or (`is_silent`) with its host, so that nobody is told."""
        if self.process.is_dead:
            return
        self.world.note("fault", f"{'power off' if is_silent else 'kill'} {self.host}")
        self.process.is_dead = True
        self.world.network.died(self.process, is_silent=is_silent)
        for worker in self.process.jobs:
            # One-sided writes that the network card has taken on may land all the same.
            if self.world.draw.random() < 0.5:
                self.world.loop.call_later(self.world.write_s(), worker.finish_of_the_dead)

    def restart(self) -> None:
        """Begin a new life at the same address, unless it lives."""
        if self.process.is_dead:
            self.world.note("fault", f"restart {self.host}")
            self.world.network.back(self.host)
            self.start()

    def stop(self) -> None:
        """As SIGSTOP."""
        if self.is_up:
            self.world.note("fault", f"stop {self.host}")
            self.process.is_stopped = True
            self.world.network.stopped(self.process)

    def go_on(self) -> None:
        """As SIGCONT."""
        if self.process.is_stopped and not self.process.is_dead:
            self.world.note("fault", f"go on {self.host}")
            self.process.go_on()

    def leftovers(self) -> str:
        """Say what it still holds of any request; empty when nothing."""
        load, said = self.role.load(), self.agent.statistics()
        held = {
            "tickets": len(self.role.tickets()),
            "running": load.num_running,
            "waiting": load.num_waiting,
            "transferring": load.num_transferring,
            "pages held": load.pages_held,
            "pages granted": load.pages_granted,
            "pages quarantined": load.pages_quarantined,
            "pages missing": load.num_pages - load.pages_free - load.pages_cached,
        }
        names = (
            ("num_waiting", "num_early_grants", "num_pushing")
            if self.role_name == "prefill"
            else ("num_reserving", "num_granted", "num_withdrawn", "num_fencing")
        )
        held |= {f"agent's {name}": getattr(said, name) for name in names}
        noted = [each() for _, _, each in self.role._deadlines._heap]
        held["deadlines"] = sum(each is not None for each in noted)
        return ", ".join(f"{name} {number}" for name, number in held.items() if number)
