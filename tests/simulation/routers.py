"""Routers and their clients: the real cluster and backend, and readers that check every token."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field

from router.backend import ClusterBackend
from router.cluster import Cluster
from router.config import PrefillTarget, RouterConfig
from router.policies import POLICIES
from tests.simulation.processes import Process
from tests.simulation.toy import answer, logprob_after
from wire.errors import NoNodeAvailable, TandemError
from wire.generation import GenerateRequest

MAX_ATTEMPTS = 4
NODE_WAIT_S = 5.0


class SimulatedRouter:
    """One router with one edge worker. It can be killed, and has one life."""

    def __init__(self, world, host: str, policy: str) -> None:
        self.world, self.host = world, host
        self.process = Process(world, host)
        self._tasks = []
        self.process.context.run(self._build, policy)

    def _build(self, policy: str) -> None:
        config = RouterConfig(
            prefills=tuple(
                PrefillTarget(n.url) for n in self.world.nodes if n.role_name == "prefill"
            ),
            decodes=tuple(n.url for n in self.world.nodes if n.role_name == "decode"),
        )
        self.cluster = Cluster(config)
        rng = random.Random(self.world.draw.getrandbits(32))
        wait_s = self.world.draw.choice((0.0, NODE_WAIT_S))
        self.backend = ClusterBackend(self.cluster, POLICIES[policy], MAX_ATTEMPTS, rng, wait_s)
        self.backend._gate._clock = self.world.loop.time
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

    def leftovers(self) -> str:
        """Say what it still holds of any request; empty when nothing."""
        found = []
        for node in (*self.cluster.prefills, *self.cluster.decodes):
            num_streams = node.client.num_streams if node.client is not None else 0
            counts = (node.in_flight_requests, node.in_flight_tokens, num_streams)
            if any(counts):
                found.append(f"{node.url}: requests, tokens, streams in flight {counts}")
        return "; ".join(found)


@dataclass(kw_only=True)
class Client:
    """One request's client: what it asks for, how it behaves, and what it got.

    Attributes:
        leaves_after: Tokens after which it hangs up; None stays.
        patience_s: How long it stays; None for as long as it takes.
        aborts_after: Tokens after which the request is aborted by its id.
        is_slow: It pauses between reads.
        taps: It takes ordinary tokens at once.
    """

    request: GenerateRequest
    router_number: int = 0
    begins_s: float = 0.0
    leaves_after: int | None = None
    patience_s: float | None = None
    aborts_after: int | None = None
    is_slow: bool = False
    taps: bool = True
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finish: str = ""
    error: TandemError | None = None
    has_left: bool = False
    has_aborted: bool = False
    router: SimulatedRouter | None = None
    ended_s: float = -1.0

    @property
    def name(self) -> str:
        """Its request's id."""
        return self.request.request_id

    async def run(self, router: SimulatedRouter) -> None:
        """Send the request and read its answer, checking what comes."""
        self.router, world = router, router.world
        self._expected, self._expected_told = answer(self.request.prompt_ids, self.request.sampling)
        await asyncio.sleep(self.begins_s)
        world.note("client", f"{self.name} begins at {router.host}")
        try:
            async with asyncio.timeout(self.patience_s):
                await self._read(router, world)
        except TimeoutError:
            self.has_left = True
        except TandemError as error:
            self.error = error
            self._check_error(error)
        finally:
            self.ended_s = world.loop.time()
            end = self.finish or self.error or ("left" if self.has_left else "cut off")
            world.note("client", f"{self.name} ends: {end}")
        if not self.error and not self.has_left:
            self._check_whole()

    async def _read(self, router, world) -> None:
        deltas = router.backend.generate(self.request, tap=self if self.taps else None)
        async with aclosing(deltas):
            async for delta in deltas:
                num = len(self.token_ids)
                world.check(not self.finish, f"{self.name} got a delta after its end")
                world.check(
                    delta.index == num, f"{self.name}: index {delta.index} behind {num} tokens"
                )
                self._take(delta.token_ids, delta.logprobs)
                self.prompt_logprobs += delta.prompt_logprobs
                self.finish = delta.finish.reason if delta.finish is not None else ""
                if self._is_after(self.leaves_after) and not self.finish:
                    self.has_left = True
                    return
                if self._is_after(self.aborts_after) and not self.has_aborted:
                    self.has_aborted = True
                    await router.backend.abort(self.name)
                if self.is_slow:
                    await asyncio.sleep(world.draw.expovariate(20))

    def take_ordinary(self, token_ids) -> bool:
        """See `frontend.backend.Tap`."""
        world = self.router.world
        if self._wants_logprobs or world.draw.random() < 0.1:
            return False
        if self._would_act(self.leaves_after) or self._would_act(self.aborts_after):
            return False
        self._take(token_ids, ())
        return True

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.logprobs is not None

    def _is_after(self, count: int | None) -> bool:
        return count is not None and len(self.token_ids) >= count

    def _would_act(self, count: int | None) -> bool:
        return count is not None and len(self.token_ids) + 1 >= count

    def _take(self, token_ids, logprobs) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        num = len(self.token_ids)
        self.router.world.check(
            self.token_ids == self._expected[:num],
            f"{self.name} got {self.token_ids} instead of {self._expected[:num]}",
        )

    def _check_whole(self) -> None:
        check, request = self.router.world.check, self.request
        if self.finish == "abort":
            check(self.has_aborted, f"{self.name} was aborted by nobody")
            return
        check(bool(self.finish), f"{self.name} ended without a finish")
        check(
            self.token_ids == self._expected,
            f"{self.name} ended with {len(self.token_ids)} of {len(self._expected)} tokens",
        )
        if request.logprobs is None:
            return
        check(self.logprobs == self._expected_told, f"{self.name} got other log-probabilities")
        if request.logprobs.prompt_start >= 0:
            prompt = request.prompt_ids
            told = [
                logprob_after(prompt[:position], prompt[position])
                for position in range(max(1, request.logprobs.prompt_start), len(prompt))
            ]
            got = [each for each in self.prompt_logprobs if each.logprob is not None]
            check(
                got == told, f"{self.name} got {len(got)} of {len(told)} prompt log-probabilities"
            )

    def _check_error(self, error: TandemError) -> None:
        """An error is right when no attempt is left, or no node."""
        world = self.router.world
        num_attempts = world.num_attempts(self.router, self.name)
        is_used_up = error.is_retryable and num_attempts >= MAX_ATTEMPTS
        has_no_node = (
            isinstance(error, NoNodeAvailable) and not self.router.cluster.health().is_serving
        )
        world.check(
            world.num_faults > 0 and (is_used_up or has_no_node),
            f"{self.name} failed after {num_attempts} attempts with {error.code}: {error}",
        )
