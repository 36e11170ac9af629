"""A cluster in one event loop: what it is made of follows from a plan, what happens to it from a seed."""

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field

import structlog

from tandem.router.config import AdmissionConfig
from tandem.router.membership.membership import Announcement
from tandem.router.nodes.node import NodeUnusable
from tandem.wire.errors import TandemError
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill
from tests.loopback import Fault
from tests.simulation.clients import Client
from tests.simulation.network import Network
from tests.simulation.nodes import NodeShape, SimulatedNode, SimulatedTransport
from tests.simulation.processes import CURRENT, Process
from tests.simulation.routers import SimulatedRouter

# Virtual time, after the last fault was healed.
ANSWERED_WITHIN_S = 180.0
SETTLED_WITHIN_S = 60.0
# When nothing went wrong; a write under way, which is waited for, takes 1.7 s at the most.
SETTLED_WITHIN_CALM_S = 4.0
HTTP_TIMEOUT_S = 2.0
# What is no part of any request's life.
HEARTBEATS = ("Ping", "Pong", "LinkPing")


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(kw_only=True)
class Plan:
    """What a world is made of.

    Attributes:
        pace: Mean seconds of a frame on its way; everything else is in proportion.
        write_faults: Of the transport, by number of the write.
        is_one_sided: Nothing but a fence keeps a writer out.
        fence_pace: Mean seconds of a fence, in `pace`.
        write_pace: Mean seconds of a write of pages, in `pace`.
        landed_s: How long decode waits for the KV of a grant.
        max_attempts: That may fail, of each request.
        local_prefill_threshold: See `RouterConfig`.
        spikes: Of how many frames or passes one takes a hundred times as long.
    """

    prefills: list[NodeShape]
    decodes: list[NodeShape]
    clients: list[Client]
    num_routers: int = 1
    policy: str = "least_load"
    max_attempts: int = 4
    local_prefill_threshold: int = 0
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    pace: float = 0.001
    is_one_sided: bool = True
    fence_pace: float = 20.0
    write_pace: float = 4.0
    landed_s: float = 20.0
    write_faults: list[Fault] = field(default_factory=list)
    spikes: float = 0.0


class World:
    """One run of a plan.

    Args:
        on_step: Called with the number of each step of requests, before it is made.
        is_traced: Keep a line for everything that happens.
    """

    def __init__(
        self, plan: Plan, seed: int, *, is_traced=False, on_step=lambda world, number: None
    ):
        self.plan, self.draw = plan, random.Random(seed)
        self.trace, self.num_steps = [], 0
        self.num_faults = len(plan.write_faults)
        self.num_orders = self.num_ends = self.num_drained = 0
        self.replays = self.num_local = 0
        self.routers = []
        self._removed = {}  # nodes, to whether they come back
        self.violations = []
        self._is_traced, self._on_step = is_traced, on_step
        self._attempts = defaultdict(int)
        self.is_counting = False

    async def run(self, loop, misfortune) -> None:
        """Start everything, let `misfortune(world)` happen beside the requests, and check the end."""
        self.loop, self.network = loop, Network(self)
        loop.set_exception_handler(self._failed)
        structlog.configure(
            processors=[self._logged],
            wrapper_class=structlog.make_filtering_bound_logger(20 if self._is_traced else 40),
            logger_factory=lambda *_: None,
        )
        # Whatever is not of a process draws from the same seed.
        CURRENT.set(Process(self, "nowhere"))
        self.transport = SimulatedTransport(
            self.plan.write_faults, is_one_sided=self.plan.is_one_sided
        )
        self.nodes = [
            *(SimulatedNode(self, f"p{i}", "prefill", s) for i, s in enumerate(self.plan.prefills)),
            *(SimulatedNode(self, f"d{i}", "decode", s) for i, s in enumerate(self.plan.decodes)),
        ]
        for node in self.nodes:
            node.start()
        self.routers = [SimulatedRouter(self, f"r{i}") for i in range(self.plan.num_routers)]
        await self._until(self._is_serving, 10.0, "the routers know all nodes")
        self.is_counting = True
        readers = [
            router.run(client.run(router))
            for client in self.plan.clients
            for router in [self.routers[client.router_number]]
        ]
        await misfortune(self)
        self.heal()
        done = asyncio.gather(*readers, return_exceptions=True)
        await self._until(done.done, ANSWERED_WITHIN_S, "every request ended")
        for outcome in done.result():
            if isinstance(outcome, Exception):
                raise outcome
        is_calm = self.is_calm and not self.num_orders
        limit_s = SETTLED_WITHIN_CALM_S if is_calm else SETTLED_WITHIN_S
        await self._until(lambda: not self.leftovers(), limit_s, "nothing is left")
        for node in self.nodes:
            node.engine.cache.check_integrity()
        for router in self.routers:
            router.end()
        self._raise()

    @property
    def is_calm(self) -> bool:
        """Whether nothing fails and nothing takes long, whatever is ordered."""
        return not self.num_faults and not self.plan.spikes

    @property
    def is_undisturbed(self) -> bool:
        """Whether all nodes serve all the time."""
        return not self.num_faults and not self.num_orders

    # ── what the parts ask ───────────────────────────────────────────────────────────────────────

    def delay(self) -> float:
        """Return how long a frame is on its way."""
        return self._some(1.0)

    def latency(self) -> float:
        """Return how long one who is woken takes to look."""
        return self._some(0.2)

    def step_s(self) -> float:
        """Return how long a forward takes."""
        return self._some(3.0)

    def write_s(self) -> float:
        """Return how long a write of pages takes."""
        return self.plan.pace * self.plan.write_pace * self.draw.uniform(0.3, 1.7)

    def fence_s(self) -> float:
        """Return how long a fence takes."""
        return self.plan.pace * self.plan.fence_pace * self.draw.uniform(0.3, 1.7)

    def _some(self, factor: float) -> float:
        spike = 100.0 if self.plan.spikes and self.draw.random() < self.plan.spikes else 1.0
        return self.plan.pace * factor * spike * self.draw.uniform(0.3, 1.7)

    def note(self, kind: str, text: str, name: str = "") -> None:
        """Take note of what happens; a step of a request's life is counted before it is made."""
        is_step = kind in ("send", "arrive", "step", "write begins", "write ends")
        if self.is_counting and is_step and name not in HEARTBEATS:
            self.num_steps += 1
            if self._is_traced:
                self.trace.append(f"{self.loop.time():10.6f} #{self.num_steps} {kind}: {text}")
            self._on_step(self, self.num_steps)
        elif self._is_traced and name not in HEARTBEATS:
            self.trace.append(f"{self.loop.time():10.6f} {kind}: {text}")

    def said(self, process, message) -> None:
        """An edge said something to an engine: count attempts."""
        if isinstance(message, StartDecode | StartPrefill | StartColocated):
            key = process.host, message.request.request_id
            self._attempts[key] = max(self._attempts[key], message.attempt + 1)
            self.replays += message.attempt > 0 and not isinstance(message, StartPrefill)
            self.num_local += isinstance(message, StartColocated)

    def num_attempts(self, router, request_id) -> int:
        """Return how often a request was tried."""
        return self._attempts[router.host, request_id]

    async def server_info(self, process, url):
        """Answer for a node over HTTP."""
        await asyncio.sleep(2 * self.delay())
        (node,) = [node for node in self.nodes if node.url == url]
        if self.network.is_cut(process.host, node.host) or node.process.is_stopped:
            await asyncio.sleep(HTTP_TIMEOUT_S)
            raise NodeUnusable("does not answer")
        if node.process.is_dead:
            raise NodeUnusable("connection refused")
        info = node.info()
        await asyncio.sleep(self.delay())
        return info

    def check(self, is_right: bool, sentence: str) -> None:
        """Raise unless `is_right`; remembered, should somebody swallow it."""
        if not is_right:
            self.violations.append(sentence)
            self.note("violation", sentence)
            raise Violation(sentence)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def heal(self) -> None:
        """Bring everything back: paths, hosts, nodes."""
        hosts = [*(node.host for node in self.nodes), *(router.host for router in self.routers)]
        for i, one in enumerate(hosts):
            for other in hosts[:i]:
                self.network.heal(one, other)
        for node in self.nodes:
            node.slow_until_s = 0.0
            node.restart()
            node.go_on()
            node.resume()
        for node, comes_back in list(self._removed.items()):
            if comes_back:
                self.add(node)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────

    def remove(self, node, *, hands_over: bool, comes_back: bool) -> None:
        """Have all routers forget a node; one that announces itself soon comes back."""
        others = [each for each in self.nodes if each.role_name == node.role_name and each != node]
        # One stays, for those who are still to be answered.
        stays = any(
            self._removed.get(other, True) and other.shape.announces_after_s is None
            for other in others
        )
        self._removed[node] = comes_back or not stays
        self._tell(
            Announcement(url=node.url, role=node.role_name, is_removed=True, hands_over=hands_over)
        )

    def add(self, node) -> None:
        """Have all routers know a node that was removed, unless it is for good."""
        if self._removed.pop(node, False):
            self._tell(Announcement(url=node.url, role=node.role_name))

    def _tell(self, said: Announcement) -> None:
        self.note("order", f"{said}")
        for router in self.routers:
            router.hear(said)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def leftovers(self) -> str:
        """Say what anybody alive still holds of any request."""
        parties = [*self.nodes, *(each for each in self.routers if not each.process.is_dead)]
        held = [(party, party.leftovers()) for party in parties]
        return "; ".join(f"{party.host}: {what}" for party, what in held if what)

    async def answered(self, within_s: float) -> None:
        """Wait until every request ended, or for so long."""
        end_s = self.loop.time() + within_s
        while self.loop.time() < end_s and any(each.ended_s < 0 for each in self.plan.clients):  # noqa: ASYNC110 - no time passes
            await asyncio.sleep(0.05)

    def _is_serving(self) -> bool:
        return all(
            node.is_up
            for router in self.routers
            for node in (*router.cluster.prefills, *router.cluster.decodes)
            if node.source == "listed"
        )

    async def _until(self, is_so, limit_s: float, what: str) -> None:
        begin_s = self.loop.time()
        while not is_so():
            self._raise()
            if self.loop.time() - begin_s > limit_s:
                waiting = [c.name for c in self.plan.clients if c.ended_s < 0]
                raise Violation(
                    f"after {limit_s} s it is not so that {what}: {self.leftovers()}; {waiting}"
                )
            await asyncio.sleep(0.1)
        self._raise()

    def _raise(self) -> None:
        if self.violations:
            raise Violation(self.violations[0])

    def _failed(self, _loop, context) -> None:
        self.violations.append(f"{context['message']}: {context.get('exception')!r}")

    def _logged(self, _logger, method, event):
        """Keep a line; that of an exception is a bug that somebody survived."""
        host = CURRENT.get().host if CURRENT.get(None) else ""
        fields = {k: v for k, v in event.items() if k not in ("event", "module", "exc_info")}
        if event.get("exc_info"):
            import traceback

            self.violations.append(f"{host} {event['event']} {fields}: {traceback.format_exc()}")
        self.note("log", f"{host} {event['event']} {fields}")
        raise structlog.DropEvent


__all__ = ["Plan", "TandemError", "Violation", "World"]
