"""What goes wrong, or is ordered, while requests run."""

import asyncio
import random

from tests.simulation.world import World


async def misfortunes(world: World, kinds) -> None:
    """Let a few things go wrong, at moments drawn from the seed."""
    draw = world.draw
    for _ in range(draw.choice([0, 1, 2, 3, 5] if kinds != ORDERS else [0, 2, 5, 8])):
        # Mostly while the first requests run, whatever their pace.
        longest_s = draw.choice([20 * world.plan.pace, 100 * world.plan.pace, 3.0])
        await asyncio.sleep(draw.uniform(0.0, longest_s))
        kind, node = draw.choice(kinds), draw.choice(world.nodes)
        if kind in ORDERS:
            world.num_orders += 1
            order(world, kind, node, draw)
        else:
            world.num_faults += 1
            inflict(world, kind, node, draw)
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

# What operators do. A node that ends is away for a while, as one that died.
ORDERS = ("drain", "drain", "end", "remove", "remove")


def order(world: World, kind: str, node, draw: random.Random) -> None:
    """Have a node drain or end, or routers forget it, for a while."""
    timeout_s = draw.choice([0.0, 0.0, draw.uniform(0.0, 0.3), 3.0])
    match kind:
        case "drain":
            node.drain(timeout_s, ends=False)
            world.loop.call_later(draw.uniform(0.0, 6.0), node.resume)
        case "end":
            world.num_ends += 1  # a request may be on its way to it
            node.drain(timeout_s, ends=True)
        case "remove":
            comes_back = draw.random() < 0.7
            world.remove(node, hands_over=draw.random() < 0.5, comes_back=comes_back)
            world.loop.call_later(draw.uniform(0.0, 4.0), world.add, node)


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
        case "hand over":
            node.drain(0.0, ends=False)
            world.loop.call_later(5.0, node.resume)
        case "remove":  # not in the middle of what a router does
            world.loop.call_soon(lambda: world.remove(node, hands_over=True, comes_back=True))
            world.loop.call_later(5.0, world.add, node)
