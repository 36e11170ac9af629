"""Walks through the model: every schedule of a small plan, or many random ones of a large one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kvtransfer.receiver import ReceiverTimeouts
from tandem.kvtransfer.sender import SenderTimeouts
from tests.kvtransfer.model import faults
from tests.kvtransfer.model.rules import GIVEN_UP, NOTICE_S, Plan, Rules, Violation
from tests.kvtransfer.model.world import World

# What a step takes once everything goes its way; only timers take longer.
STEP_S = 0.001
Schedule = Sequence[tuple]


@dataclass(frozen=True)
class Settled:
    """How long it took, in virtual time, until the last of each end's pages was back."""

    decode_s: float
    prefill_s: float


class Failure(AssertionError):
    """A schedule under which a promise is broken."""

    def __init__(self, error: Violation, plan: Plan, schedule: Schedule) -> None:
        steps = "\n".join(f"  {step}" for step in schedule)
        super().__init__(f"{error}\n{plan}\n{steps}")
        self.error, self.plan, self.schedule = error, plan, schedule


def settle(world, choose=lambda due: due[0], trail=None, late=None):
    """Let everything happen that happens by itself, time included, and check the end.

    Args:
        choose: Picks from what is due.
        trail: Gets every step.
        late: A kind of step that comes after everything else, even after what time brings about.
    """
    begin_s, last = world.now_s, [world.now_s, world.now_s]
    for _ in range(10_000):
        due, timers = world.due(), world.timers()
        quick = [step for step in due if step[0] != late or not timers or not world.happened]
        if quick:
            step = choose(quick)
            world.now_s += STEP_S
        elif timers:
            when_s, step = min(timers)
            world.check(world.happened, f"without a fault, {step} needs a timer")
            world.now_s = max(world.now_s, when_s)
            if due:
                world.happened.add(f"early {step[0]}")
        else:
            break
        if trail is not None:
            trail.append(step)
        world.do(*step)
        last = [
            world.now_s if is_busy else before
            for is_busy, before in zip(_is_busy(world), last, strict=True)
        ]
    else:
        raise Violation("it never comes to rest")
    world.check_end()
    return Settled(*(each - begin_s for each in last))


def _is_busy(world):
    decode, prefill = world.decode, world.prefill
    return (
        decode is not None and len(decode.free_pages()) < world.plan.pool_pages,
        prefill is not None and set(prefill.role) != prefill.ended,
    )


def limits(world):
    """Return within which time each end must have its pages back: that of the fault's own timer."""
    slack_s, sender = 1.0, SenderTimeouts()
    decode_s = prefill_s = 0.0
    if world.happened:  # the other half may never come
        prefill_s = sender.grant_s + NOTICE_S
    if world.happened - GIVEN_UP:
        decode_s = max(ReceiverTimeouts().connect_s, sender.early_grant_s + NOTICE_S)
    return Settled(decode_s + slack_s, prefill_s + slack_s)


def settle_in_time(world, trail=None):
    took, limit = settle(world, trail=trail), limits(world)
    world.check(took.decode_s <= limit.decode_s, f"decode's pages are back after {took}")
    world.check(took.prefill_s <= limit.prefill_s, f"prefill's pages are back after {took}")


def explore_all(plan: Plan, rules: Rules, max_states: int = 10_000_000) -> int:
    """Try every order of every event. Returns how many states there are.

    Raises:
        Failure: With the schedule that leads to it.
    """
    start = World.begin(plan, rules)
    seen = {start.key()}
    stack: list[tuple[World, tuple | None]] = [(start, None)]
    while stack:
        world, path = stack.pop()
        due = world.due()
        steps = [(World.do, step) for step in due]
        steps += [(faults.inflict, step) for step in faults.possible(world)]
        if not due:
            _guard(settle_in_time, world.copy(), path)
        for do, step in steps:
            after, way = world.copy(), (step, path)
            _guard(lambda world, _, do=do, step=step: do(world, *step), after, way)
            if (key := after.key()) not in seen:
                seen.add(key)
                stack.append((after, way))
        if len(seen) > max_states:
            raise RuntimeError(f"more than {max_states} states")
    return len(seen)


def _guard(act, world, path):
    trail: list[tuple] = []
    try:
        act(world, trail)
    except Violation as error:
        steps = []
        while path is not None:
            step, path = path
            steps.append(step)
        raise Failure(error, world.plan, [*reversed(steps), *trail]) from None


def random_plan(draw: random.Random) -> Plan:
    """Draw a plan of several rooms that share few pages."""
    num_pages = draw.randint(1, 3)
    return Plan(
        num_rooms=draw.randint(1, 5),
        num_pages=num_pages,
        pool_pages=num_pages * draw.randint(1, 3),
        num_pieces=draw.randint(1, 3),
        is_one_sided=draw.random() < 0.7,
        faults=draw.randint(1, 5),
    )


def run_random(rules: Rules, seed: int) -> World:
    """Run one schedule drawn from `seed`: faults at random moments, and then peace.

    Raises:
        Failure: With the schedule.
    """
    draw = random.Random(seed)
    plan = random_plan(draw)
    world, trail = World.begin(plan, rules), []
    fault_rate = draw.choice([0.02, 0.1, 0.3])
    # One kind of step that is always late: orders that chance alone hardly ever draws.
    late = draw.choice([None, "land", "start job", "fence", "prefill hears", "decode hears"])
    try:
        for _ in range(draw.randrange(5, 40 * plan.num_rooms)):
            due, wrong = world.due(), faults.possible(world)
            if wrong and (not due or draw.random() < fault_rate):
                kind = draw.choice(sorted({fault[0] for fault in wrong}))
                step = draw.choice([fault for fault in wrong if fault[0] == kind])
                trail.append(step)
                faults.inflict(world, *step)
            elif due:
                quick = [step for step in due if step[0] != late]
                step = draw.choice(quick if quick and draw.random() < 0.9 else due)
                trail.append(step)
                world.do(*step)
        settle(world, draw.choice, trail, late)
    except Violation as error:
        raise Failure(error, plan, trail) from None
    return world


def replay(plan: Plan, rules: Rules, schedule: Schedule) -> Violation | None:
    """Run those steps of a schedule that are possible, each at its turn; return what it breaks."""
    world = World.begin(plan, rules)
    try:
        for step in schedule:
            if step in world.due():
                world.do(*step)
            elif step in faults.possible(world):
                faults.inflict(world, *step)
            elif any(step == timer for _, timer in world.timers()):
                world.happened.add(f"early {step[0]}")
                world.do(*step)
        settle(world)
    except Violation as error:
        return error
    return None


def shrink(failure: Failure, rules: Rules) -> Failure:
    """Leave out steps as long as something breaks; the last of them is where it does."""
    plan, schedule, error = failure.plan, list(failure.schedule), failure.error
    size = max(1, len(schedule) // 2)
    while size:
        at = 0
        while at < len(schedule):
            shorter = [*schedule[:at], *schedule[at + size :]]
            if found := replay(plan, rules, shorter):
                schedule, error = shorter, found
            else:
                at += size
        size //= 2
    return Failure(error, plan, schedule)
