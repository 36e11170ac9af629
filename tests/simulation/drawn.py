"""Plans drawn from a seed: a cluster, and its clients."""

import random
from dataclasses import replace

from tandem.router.config import AdmissionConfig, QueueLimits
from tandem.router.pairing.policy import POLICIES
from tandem.wire.generation import GenerateRequest, LogprobOptions, SamplingParams
from tests.loopback import Fault
from tests.simulation.clients import Client
from tests.simulation.nodes import NodeShape
from tests.simulation.world import Plan


def draw_plan(draw: random.Random, *, is_plain: bool = False) -> Plan:
    """Draw a cluster and its clients.

    Args:
        is_plain: Every prompt is handed off, nobody waits at the gate, no client has a deadline.
    """
    page_size = draw.choice([2, 4, 8])
    routers = draw.choice([1, 2])
    write_faults = [
        Fault(draw.choice(["fail", "corrupt", "duplicate"]), draw.randrange(40))
        for _ in range(draw.choice([0, 0, 0, 1, 3]))
    ]
    pace, write_pace = draw.choice([0.0005, 0.002, 0.01]), draw.choice([4.0, 4.0, 20.0, 100.0])
    # Writes that take a second each outlast the other half's patience, which costs an attempt.
    takes_long = pace * write_pace > 0.25
    return Plan(
        prefills=_draw_nodes(draw, [page_size]),
        decodes=_draw_nodes(draw, [page_size, 4]),
        clients=_draw_clients(draw, routers, is_plain=is_plain),
        num_routers=routers,
        policy=draw.choice(sorted(POLICIES)),
        max_attempts=4 if takes_long else draw.choice([4, 1]),
        # Of prompts of 1 to 50 tokens: none, the short ones, all.
        local_prefill_threshold=0 if is_plain else draw.choice([0, 0, 16, 300]),
        admission=AdmissionConfig(is_on=False) if is_plain else _draw_admission(draw),
        pace=pace,
        is_one_sided=draw.random() < 0.7,
        fence_pace=draw.choice([20.0, 200.0]),
        write_pace=write_pace,
        write_faults=write_faults,
        spikes=draw.choice([0.0, 0.0, 0.01, 0.03]),
    )


def _draw_admission(draw: random.Random) -> AdmissionConfig:
    return AdmissionConfig(
        is_on=draw.random() < 0.8,
        max_in_flight=draw.choice([0, 0, 0, 1, 2]),
        limits=QueueLimits(
            max_requests=draw.choice([4096, 4096, 3]), max_wait_s=draw.choice([60.0, 60.0, 2.0])
        ),
    )


def _draw_nodes(draw: random.Random, page_sizes: list[int]) -> list[NodeShape]:
    """Return one that is listed, and up to two more."""
    nodes = [_draw_node(draw, draw.choice(page_sizes)) for _ in range(draw.randint(1, 3))]
    return nodes[:1] + [
        replace(node, announces_after_s=draw.choice([None, None, 0.0, draw.uniform(0.0, 3.0)]))
        for node in nodes[1:]
    ]


def _draw_node(draw: random.Random, page_size: int) -> NodeShape:
    # The longest prompt and answer have 70 tokens.
    num_tokens = draw.choice([80, 80, 144, 400])
    return NodeShape(
        num_pages=num_tokens // page_size,
        page_size=page_size,
        chunk_size=draw.choice([8, 16, 64]),
        is_asynchronous=draw.random() < 0.5,
        pushes_layers=draw.random() < 0.7,
    )


def _draw_clients(draw: random.Random, num_routers: int, *, is_plain: bool) -> list[Client]:
    prompts = [[draw.randrange(2, 997) for _ in range(draw.randint(1, 40))] for _ in range(4)]
    clients = []
    while len(clients) < draw.randint(2, 10):
        prompt = draw.choice(prompts)[: draw.randint(5, 40)]
        prompt = prompt + [draw.randrange(2, 997) for _ in range(draw.choice([0, 0, 3, 10]))]
        begins_s = draw.choice([0.0, draw.uniform(0, 0.5), draw.uniform(0, 6)])
        num = draw.choice([1, 1, 1, 2, 3])
        clients += _draw_group(draw, len(clients), num, prompt, begins_s, num_routers, is_plain)
    return clients


def _draw_group(draw, first, num, prompt, begins_s, num_routers, is_plain) -> list[Client]:
    """Return the clients of one prompt: `n` answers of one request go to one router."""
    logprobs = None
    if draw.random() < 0.3:
        logprobs = LogprobOptions(prompt_start=draw.choice([-1, 0, 0, draw.randrange(len(prompt))]))
    session, client = draw.choice(["", "one", "two"]), draw.choice(["", "a", "b"])
    some_s = None if is_plain else draw.choice([0.01, draw.expovariate(4.0), 2.0])
    deadline_s = draw.choice([None, None, some_s])
    temperature, group = draw.choice([0.0, 1.0]), f"group {first}" if num > 1 else ""
    return [
        Client(
            request=GenerateRequest(
                request_id=f"q{first}.{i}",
                prompt_ids=prompt,
                group=group,
                priority=draw.choice([0, 0, 1]),
                logprobs=logprobs,
                session=session,
                client=client,
                deadline_s=deadline_s,
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
            aborts_after_s=draw.choice([None] * 9 + [draw.expovariate(4.0)]),
            is_slow=draw.random() < 0.3,
            takes_ordinary=draw.random() < 0.7,
        )
        for i in range(num)
    ]
