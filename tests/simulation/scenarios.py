"""What happens: plans drawn from a seed with faults at random, and one small request with a fault at each step."""

import asyncio
import random
from dataclasses import dataclass

from kvtransfer.transports.loopback import Fault
from tests.simulation.ground import simulated
from tests.simulation.nodes import NodeShape
from tests.simulation.routers import Client
from tests.simulation.virtual_time import run_in_virtual_time
from tests.simulation.world import Plan, World
from wire.generation import GenerateRequest, LogprobsWanted, SamplingParams


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


def draw_plan(draw: random.Random) -> Plan:
    """Draw a cluster and its clients."""
    page_size = draw.choice([2, 4, 8])
    routers = draw.choice([1, 2])
    write_faults = [
        Fault(draw.choice(["fail", "corrupt", "duplicate"]), draw.randrange(40))
        for _ in range(draw.choice([0, 0, 0, 1, 3]))
    ]
    return Plan(
        prefills=[_draw_node(draw, page_size) for _ in range(draw.randint(1, 3))],
        decodes=[_draw_node(draw, draw.choice([page_size, 4])) for _ in range(draw.randint(1, 3))],
        clients=_draw_clients(draw, routers),
        num_routers=routers,
        policy=draw.choice(["least_load", "round_robin", "random", "power_of_two"]),
        pace=draw.choice([0.0005, 0.002, 0.01]),
        is_one_sided=draw.random() < 0.7,
        fence_pace=draw.choice([20.0, 200.0]),
        write_pace=draw.choice([4.0, 4.0, 20.0, 100.0]),
        write_faults=write_faults,
        spikes=draw.choice([0.0, 0.0, 0.01, 0.03]),
    )


def _draw_node(draw: random.Random, page_size: int) -> NodeShape:
    # The longest prompt and answer have 70 tokens.
    num_tokens = draw.choice([80, 80, 144, 400])
    return NodeShape(
        num_pages=num_tokens // page_size,
        page_size=page_size,
        chunk_size=draw.choice([8, 16, 64]),
        is_beside_host=draw.random() < 0.5,
        pushes_layers=draw.random() < 0.7,
    )


def _draw_clients(draw: random.Random, num_routers: int) -> list[Client]:
    prompts = [[draw.randrange(2, 997) for _ in range(draw.randint(1, 40))] for _ in range(4)]
    clients = []
    while len(clients) < draw.randint(2, 10):
        prompt = draw.choice(prompts)[: draw.randint(5, 40)]
        prompt = prompt + [draw.randrange(2, 997) for _ in range(draw.choice([0, 0, 3, 10]))]
        begins_s = draw.choice([0.0, draw.uniform(0, 0.5), draw.uniform(0, 6)])
        num = draw.choice([1, 1, 1, 2, 3])
        clients += _draw_group(draw, len(clients), num, prompt, begins_s, num_routers)
    return clients


def _draw_group(draw, first, num, prompt, begins_s, num_routers) -> list[Client]:
    """Return the clients of one prompt: `n` answers of one request go to one router."""
    logprobs = None
    if draw.random() < 0.3:
        logprobs = LogprobsWanted(prompt_start=draw.choice([-1, 0, 0, draw.randrange(len(prompt))]))
    temperature, group = draw.choice([0.0, 1.0]), f"group {first}" if num > 1 else ""
    return [
        Client(
            request=GenerateRequest(
                request_id=f"q{first}.{i}",
                prompt_ids=prompt,
                group=group,
                priority=draw.choice([0, 0, 1]),
                logprobs=logprobs,
                sampling=SamplingParams(
                    max_new_tokens=draw.choice([1, 2, 5, 20]),
                    temperature=temperature,
                    seed=draw.getrandbits(40),
                ),
            ),
            router_number=first % num_routers,
            begins_s=begins_s,
            leaves_after=draw.choice([None] * 8 + [0, 1, 3]),
            # Of those who wait for a prompt to be computed or pushed.
            patience_s=draw.choice([None] * 5 + [draw.expovariate(4.0)]),
            aborts_after=draw.choice([None] * 9 + [1, 3]),
            is_slow=draw.random() < 0.3,
            taps=draw.random() < 0.7,
        )
        for i in range(num)
    ]


async def misfortunes(world: World) -> None:
    """Let a few things go wrong, at moments drawn from the seed."""
    draw = world.draw
    for _ in range(draw.choice([0, 1, 2, 3, 5])):
        # Mostly while the first requests run, whatever their pace.
        longest_s = draw.choice([20 * world.plan.pace, 100 * world.plan.pace, 3.0])
        await asyncio.sleep(draw.uniform(0.0, longest_s))
        world.num_faults += 1
        inflict(world, draw.choice(KINDS), draw.choice(world.nodes), draw)
    # Some are healed by themselves before everything is, unless nobody is left to notice.
    await world.answered(within_s=draw.uniform(0.0, 12.0))


KINDS = (
    "kill",
    "power off",
    "stop",
    "cut",
    "reset",
    "slow",
    "cut off",
    "kill router",
    "kill router",
)


def _peers(world: World, node) -> list[str]:
    others = [other.host for other in world.nodes if other.role_name != node.role_name]
    return others + [router.host for router in world.routers]


def inflict(world: World, kind: str, node, draw: random.Random) -> None:
    """Have one thing go wrong with a node, or the way to it, and end by itself."""
    loop, others = world.loop, _peers(world, node)
    match kind:
        case "kill" | "power off":
            node.kill(is_silent=kind == "power off")
            loop.call_later(draw.uniform(0.05, 6.0), node.restart)
        case "stop":
            node.stop()
            loop.call_later(draw.choice([0.5, 1.9, 3.0, 10.0]), node.go_on)
        case "cut":
            _cut(world, node.host, [draw.choice(others)], draw.choice([0.5, 1.9, 2.2, 6.0]))
        case "cut off":
            _cut(world, node.host, others, draw.choice([0.5, 1.9, 2.2, 6.0]))
        case "reset":
            _reset(world, node.host, [draw.choice(others)])
        case "slow":
            world.note("fault", f"slow {node.host}")
            node.slow_until_s = loop.time() + draw.uniform(0.5, 4.0)
        case "kill router" if len(world.routers) > 1:
            # One of them stays.
            world.routers[1].kill()


def _cut(world: World, host: str, others: list[str], for_s: float) -> None:
    for other in others:
        world.note("fault", f"cut {host} {other}")
        world.network.cut(host, other)
        world.loop.call_later(for_s, world.network.heal, host, other)


def _reset(world: World, host: str, others: list[str]) -> None:
    for other in others:
        world.note("fault", f"reset {host} {other}")
        world.network.reset(host, other)


def run_seed(seed: int, **more) -> World:
    """Run what a seed means.

    Raises:
        Failure: It broke a promise.
    """
    return run_plan(f"seed {seed}", draw_plan(random.Random(seed)), seed, misfortunes, **more)


# ── at every step ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Blow:
    """One fault at one step of one request on two pairs of nodes.

    Attributes:
        target: Which of the nodes that it was started on.
        at_step: Of all messages, their arrivals, steps and writes; the fault comes before it.
    """

    kind: str
    target: str
    at_step: int


BLOWS = ("kill", "power off", "stop", "reset", "cut off")


def small_plan() -> Plan:
    """Return the small scenario: one request, two nodes of each role, chunks and layers."""
    request = GenerateRequest(
        request_id="small",
        prompt_ids=[5 + 7 * i for i in range(13)],
        sampling=SamplingParams(max_new_tokens=6, temperature=1.0, seed=11),
        logprobs=LogprobsWanted(prompt_start=0),
    )
    node = NodeShape(num_pages=30, page_size=4, chunk_size=8)
    return Plan(prefills=[node] * 2, decodes=[node] * 2, clients=[Client(request=request)])


def num_small_steps() -> int:
    """Return how many steps the small scenario has when nothing goes wrong."""
    return run_plan("undisturbed", small_plan(), 0, _nothing).num_steps


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

    return run_plan(str(blow), small_plan(), 0, wait, on_step=on_step, **more)


def strike(world: World, kind: str, node) -> None:
    """Have a node fail entirely, for so long that everybody notices."""
    match kind:
        case "kill" | "power off":
            node.kill(is_silent=kind == "power off")
            world.loop.call_later(5.0, node.restart)
        case "stop":
            node.stop()
            world.loop.call_later(10.0, node.go_on)
        case "cut off":
            _cut(world, node.host, _peers(world, node), 6.0)
        case "reset":
            _reset(world, node.host, _peers(world, node))


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


async def _nothing(world: World) -> None:
    """Nothing goes wrong."""
