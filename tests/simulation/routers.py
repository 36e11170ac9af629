"""Routers: the real cluster and backend, with what is said of their nodes in files of their own."""

import asyncio
import random
import tempfile

from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.config import PrefillTarget, RouterConfig
from tandem.router.membership import Said
from tandem.router.membership_files import MemberFiles
from tandem.router.policies import POLICIES
from tests.simulation.processes import Process

NODE_WAIT_S = 5.0


class SimulatedRouter:
    """One router with one edge worker. It can be killed, and has one life."""

    def __init__(self, world, host: str) -> None:
        self.world, self.host = world, host
        self.process = Process(world, host)
        self._tasks = []
        self._directory = tempfile.TemporaryDirectory(prefix="simulated-router-")
        self.process.context.run(self._build)

    def _build(self) -> None:
        plan = self.world.plan
        listed = [node for node in self.world.nodes if node.shape.announces_after_s is None]
        config = RouterConfig(
            prefills=tuple(PrefillTarget(n.url) for n in listed if n.role_name == "prefill"),
            decodes=tuple(n.url for n in listed if n.role_name == "decode"),
            takes_announced=True,
            local_prefill_threshold=plan.local_prefill_threshold,
        )
        self.cluster = Cluster(config, MemberFiles(self._directory.name))
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

    def close(self) -> None:
        """Remove its files."""
        self._directory.cleanup()

    def hear(self, said: Said) -> None:
        """Be told of a node, as over HTTP."""
        if not self.process.is_dead:
            self.process.context.run(self.cluster.say, said)

    def leftovers(self) -> str:
        """Say what it still holds of any request; empty when nothing."""
        found = []
        for node in self.cluster.roster:
            if node.leaving.is_set():
                found.append(f"{node.url} was removed, and is known")
            num_streams = node.client.num_streams if node.client is not None else 0
            counts = (node.in_flight_requests, node.in_flight_tokens, num_streams, node._own_tokens)
            if any(counts):
                found.append(f"{node.url}: requests, tokens, streams, own prompts {counts}")
        gate, waiters = self.backend._gate, self.cluster.waiters
        held = {
            "inside the gate": gate._num_inside,
            "in line": len(gate._admission),
            "waiting at the gate": len(gate._entries) + len(gate._by_id),
            "waiting for nodes": len(waiters),
            "known to wait": len(waiters._waiters),
            "groups": len(self.backend._groups),
        }
        found += [f"{name} {number}" for name, number in held.items() if number]
        return "; ".join(found)
