"""Routers: the real membership, cluster and backend, in one process."""

import asyncio
import random

from tandem.router.config import PrefillTarget, RouterConfig
from tandem.router.membership.membership import Announcement, Membership, listed_members
from tandem.router.nodes.cluster import Cluster
from tandem.router.pairing.policy import POLICIES
from tandem.router.serving.backend import ClusterBackend
from tests.simulation.processes import Process

NODE_WAIT_S = 5.0


class SimulatedRouter:
    """One router with one edge worker. It can be killed, and has one life."""

    def __init__(self, world, host: str) -> None:
        self.world, self.host = world, host
        self.process = Process(world, host)
        self._tasks = []
        self.process.context.run(self._build)

    def _build(self) -> None:
        plan = self.world.plan
        listed = [node for node in self.world.nodes if node.shape.announces_after_s is None]
        config = RouterConfig(
            prefills=tuple(PrefillTarget(n.url) for n in listed if n.role_name == "prefill"),
            decodes=tuple(n.url for n in listed if n.role_name == "decode"),
            discovers_announced=True,
            local_prefill_threshold=plan.local_prefill_threshold,
        )
        self.membership = Membership(listed_members(config))
        self.cluster = Cluster(config)
        rng = random.Random(self.world.draw.getrandbits(32))
        wait_s = self.world.draw.choice((0.0, NODE_WAIT_S))
        self.backend = ClusterBackend(
            self.cluster,
            POLICIES[plan.policy],
            plan.max_attempts,
            rng,
            wait_s,
            admission=plan.admission,
        )
        self.run(self.cluster.run())
        self.run(self._expire())

    async def _expire(self) -> None:
        """Forget announcements that were not repeated, as the parent process does."""
        while True:
            if self.membership.expire(self.world.loop.time(), self._is_up):
                self.cluster.apply(self.membership.members())
            await asyncio.sleep(1.0)

    def _is_up(self, url: str) -> bool:
        node = self.cluster.roster.find(url)
        return node is not None and node.is_up

    def run(self, coroutine) -> asyncio.Task:
        """Run a task in this process."""
        task = self.world.loop.create_task(coroutine, context=self.process.context)
        self._tasks.append(task)
        return task

    def kill(self) -> None:
        """End it, and its clients' streams with it."""
        if not self.process.is_dead:
            self.world.note("fault", f"kill {self.host}")
            self.process.is_dead = True
            self.world.network.died(self.process, is_silent=False)
            self.end()

    def end(self) -> None:
        """Stop its tasks."""
        for task in self._tasks:
            task.cancel()

    def hear(self, one: Announcement) -> None:
        """Take an announcement, as over HTTP."""
        if not self.process.is_dead:
            self.membership.announce(one)
            self.process.context.run(self.cluster.apply, self.membership.members())

    def leftovers(self) -> str:
        """Say what it still holds of any request; empty when nothing."""
        found = []
        for node in self.cluster.roster:
            if node.leaving.is_set():
                found.append(f"{node.url} was removed, and is known")
            num_streams = node.client.num_streams if node.client is not None else 0
            counts = (
                node.entry.in_flight_requests,
                node.entry.in_flight_tokens,
                num_streams,
                node._own_backlog_tokens,
            )
            if any(counts):
                found.append(f"{node.url}: requests, tokens, streams, own prompts {counts}")
        held = self.backend.leftovers
        found += [f"{name} {number}" for name, number in held.items() if number]
        return "; ".join(found)
