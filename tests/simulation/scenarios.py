"""What happens: plans drawn from a seed with faults at random, and one small request with a fault at each step."""

import asyncio
import random
from dataclasses import dataclass
from functools import partial

from tandem.router.config import AdmissionConfig
from tandem.wire.generation import GenerateRequest, LogprobOptions, SamplingParams
from tests.simulation.clients import Client
from tests.simulation.drawn import draw_plan
from tests.simulation.ground import simulated
from tests.simulation.misfortunes import KINDS, ORDERS, misfortunes, strike
from tests.simulation.nodes import NodeShape
from tests.simulation.virtual_time import run_in_virtual_time
from tests.simulation.world import Plan, World


class Failure(AssertionError):
    """A run that broke a promise, named so that it can be run again."""

    def __init__(self, name: str, error: BaseException, world: World) -> None:
        super().__init__(f"{name}: {type(error).__name__}: {error}")
        self.name, self.error, self.world = name, error, world


def run_plan(name: str, plan: Plan, seed: int, misfortune, **more) -> World:
    """Run a world to its end.

    Raises:
        Failure: It broke a promise.
    """
    world = World(plan, seed, **more)
    try:
        with simulated():
            run_in_virtual_time(lambda loop: world.run(loop, misfortune))
    except Exception as error:
        raise Failure(name, error, world) from error
    return world


# ── at random ────────────────────────────────────────────────────────────────────────────────────


# What may happen, by the seed's rest. Where nobody fails, no client may notice what is ordered.
ORDERED, FAILING, ALL = range(3)
TROUBLES = (ORDERS, KINDS, KINDS + ORDERS)


def seeds_of(rest: int, first: int, last: int) -> range:
    """Return the seeds from `first` to before `last` in which this may happen."""
    return range(first + (rest - first) % len(TROUBLES), last, len(TROUBLES))


def run_seed(seed: int, **more) -> World:
    """Run what a seed means.

    Raises:
        Failure: It broke a promise.
    """
    rest = seed % len(TROUBLES)
    plan = draw_plan(random.Random(seed), is_plain=rest == FAILING)
    trouble = partial(misfortunes, kinds=TROUBLES[rest])
    return run_plan(f"seed {seed}", plan, seed, trouble, **more)


# ── at every step ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Blow:
    """One fault at one step of one request on two pairs of nodes.

    Attributes:
        target: Which of the nodes that it was started on.
        at_step: Of all messages, their arrivals, steps and writes; the fault comes before it.
        is_local: Decode computes the prompt.
    """

    kind: str
    target: str
    at_step: int
    is_local: bool = False


BLOWS = ("kill", "power off", "stop", "reset", "cut off", "hand over", "remove")


def small_plan(*, is_local: bool = False, max_attempts: int = 4) -> Plan:
    """Return the small scenario: one request, two nodes of each role, chunks and layers."""
    request = GenerateRequest(
        request_id="small",
        prompt_ids=[5 + 7 * i for i in range(13)],
        sampling=SamplingParams(max_new_tokens=6, temperature=1.0, seed=11),
        logprobs=LogprobOptions(prompt_start=0),
    )
    node = NodeShape(num_pages=30, page_size=4, chunk_size=8)
    return Plan(
        prefills=[node] * 2,
        decodes=[node] * 2,
        clients=[Client(request=request)],
        local_prefill_threshold=100 if is_local else 0,
        max_attempts=max_attempts,
    )


def num_small_steps(*, is_local: bool = False) -> int:
    """Return how many steps the small scenario has when nothing goes wrong."""
    return run_plan("undisturbed", small_plan(is_local=is_local), 0, _nothing).num_steps


def run_blow(blow: Blow, **more) -> World:
    """Run the small scenario with one fault, which its client must not notice.

    Raises:
        Failure: It broke a promise, or the client saw an error.
    """

    def on_step(world: World, number: int) -> None:
        if number == blow.at_step:
            (node,) = [node for node in world.nodes if node.host == f"{blow.target[0]}0"]
            strike(world, blow.kind, node)

    async def wait(world: World) -> None:
        await world.answered(within_s=60.0)

    # A hand-over uses none up.
    max_attempts = 1 if blow.kind in ("hand over", "remove") else 4
    plan = small_plan(is_local=blow.is_local, max_attempts=max_attempts)
    return run_plan(str(blow), plan, 0, wait, on_step=on_step, **more)


# ── given up ─────────────────────────────────────────────────────────────────────────────────────


def run_abandoned(how: str) -> World:
    """Have a long request, of ten seconds, given up at its third token: its nodes must soon be idle.

    Args:
        how: `a client leaves` or `its router dies`.

    Raises:
        Failure: They work on.
    """
    client = Client(
        request=GenerateRequest(
            request_id="long",
            prompt_ids=[9, 8, 7],
            sampling=SamplingParams(max_new_tokens=180, temperature=0.0, ignore_eos=True),
        ),
        leaves_after=3 if how == "a client leaves" else None,
    )

    async def misfortune(world: World) -> None:
        while len(client.token_ids) < 3:  # noqa: ASYNC110 - no time passes
            await asyncio.sleep(0.01)
        if how == "its router dies":
            world.routers[0].kill()

    node = NodeShape(num_pages=50, page_size=4)
    plan = Plan(prefills=[node], decodes=[node], clients=[client], pace=0.02)
    return run_plan(how, plan, 0, misfortune)


def run_crowded() -> World:
    """Have twenty requests, each of a second, for nodes with room for one; none waits longer than two.

    Raises:
        Failure: One of them was begun after its time.
    """
    clients = [
        Client(
            request=GenerateRequest(
                request_id=f"q{i}",
                prompt_ids=[9, 8, 7, 2 + i],
                deadline_s=2.0,
                sampling=SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True),
            )
        )
        for i in range(20)
    ]
    node = NodeShape(num_pages=7, page_size=4)
    plan = Plan(
        prefills=[node],
        decodes=[node],
        clients=clients,
        pace=0.02,
        admission=AdmissionConfig(is_on=False),
    )
    return run_plan("crowded", plan, 0, _nothing)


# ── under a writer that stands still ─────────────────────────────────────────────────────────────


def run_stopped_writers(seed: int) -> World:
    """Stop prefills in the middle of a write, and let them go on while decode fences them.

    Decode has pages for two requests and many wait for them, so a page that is freed too early is reused
    before the write of its last owner ends.

    Raises:
        Failure: It broke a promise.
    """
    draw = random.Random(seed)
    clients = [
        Client(
            request=GenerateRequest(
                request_id=f"q{i}",
                prompt_ids=[2 + draw.randrange(900) for _ in range(draw.randint(14, 20))],
                sampling=SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True),
            ),
            begins_s=draw.uniform(0.0, 3.0),
        )
        for i in range(12)
    ]
    plan = Plan(
        prefills=[NodeShape(num_pages=80, page_size=4)] * 2,
        decodes=[NodeShape(num_pages=30, page_size=4)],
        clients=clients,
        max_attempts=20,
        write_pace=50.0,
        fence_pace=2000.0,
        landed_s=draw.choice([20.0, 1.0]),
    )

    async def misfortune(world: World) -> None:
        world.num_faults += 1
        while any(client.ended_s < 0 for client in clients):
            await asyncio.sleep(0.01)
            for node in world.nodes:
                if node.is_up and node.process.jobs and draw.random() < 0.2:
                    node.stop()
                    world.loop.call_later(draw.uniform(1.8, 3.5), node.go_on)

    return run_plan(f"stopped writers {seed}", plan, seed, misfortune)


# ── silence ──────────────────────────────────────────────────────────────────────────────────────


def seconds_to_notice(kind: str, target: str) -> float:
    """Return how long the other end of a hand-off takes to lose a node that falls silent in a write.

    Args:
        kind: Of `strike`.
    """
    took_s = []

    async def misfortune(world: World) -> None:
        prefill, decode = world.nodes
        while not prefill.process.jobs:  # noqa: ASYNC110 - no time passes
            await asyncio.sleep(0.001)
        node, other = (prefill, decode) if target == "prefill" else (decode, prefill)
        world.num_faults += 1
        begin_s = world.loop.time()
        strike(world, kind, node)
        while not other.agent.times.num_lost_links:  # noqa: ASYNC110 - no time passes
            await asyncio.sleep(0.01)
        took_s.append(world.loop.time() - begin_s)
        await world.answered(within_s=60.0)

    plan = small_plan()
    plan.prefills, plan.decodes = plan.prefills[:1], plan.decodes[:1]
    plan.write_pace = 100.0
    run_plan(f"{kind} {target}", plan, 0, misfortune)
    return took_s[0]


async def _nothing(world: World) -> None:
    """Nothing goes wrong."""
