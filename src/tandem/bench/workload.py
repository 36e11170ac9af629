"""From what was asked for to what each client process does. Pure."""

import os
from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.bench.arrivals import arrival_times
from tandem.bench.config import BenchConfig, Load
from tandem.bench.records import ClientPlan, Job, PromptRules, Server, Turn
from tandem.bench.trace import TraceRow, due_times

# Requests of a closed loop for each stream, where their number was not given: the first ones meet an idle
# server, the last ones an emptying one.
REQUESTS_PER_STREAM = 8
OPEN_REQUESTS = 200
# Of one client process: at 200 tokens/s each and 13 µs a token a third of a core (docs/bench.md).
STREAMS_PER_CLIENT = 128


def make_jobs(
    config: BenchConfig, load: Load, first_index: int, rows: Sequence[TraceRow] = ()
) -> list[Job]:
    """Return the conversations of one load.

    Args:
        config: What was asked for.
        load: One of its loads.
        first_index: Of the jobs; those of two loads of a run must not share any, or prompts repeat.
        rows: Of the trace, when the load replays one.
    """
    if rows:
        return [
            Job(
                index=first_index + i,
                turns=[Turn(row.input_length, row.output_length)],
                due_s=due_s,
                block_ids=row.hash_ids,
            )
            for i, (row, due_s) in enumerate(
                zip(rows, due_times(list(rows), config.trace_speed), strict=True)
            )
        ]
    count = num_conversations(config, load)
    rate = load.rate or float("inf")
    due = arrival_times(rate, config.burstiness, count, config.seed)
    rng = np.random.default_rng([config.seed, first_index, count])
    shape = (count, config.turns)
    inputs = _lengths(rng, config.input_tokens, config.range_ratio, shape)
    outputs = _lengths(rng, config.output_tokens, config.range_ratio, shape)
    return [
        Job(
            index=first_index + i,
            turns=[Turn(*pair) for pair in zip(inputs[i], outputs[i], strict=True)],
            due_s=due[i],
            prefix=i % config.num_prefixes,
        )
        for i in range(count)
    ]


def num_conversations(config: BenchConfig, load: Load) -> int:
    """Return how many a load has when it replays no trace."""
    if config.num_prompts:
        return config.num_prompts
    return OPEN_REQUESTS if load.rate else load.concurrency * REQUESTS_PER_STREAM


def _lengths(
    rng: np.random.Generator, mean: int, ratio: float, shape: tuple[int, int]
) -> list[list[int]]:
    """Draw whole numbers uniformly from mean * (1 - ratio) to mean * (1 + ratio), at least 1."""
    low, high = max(round(mean * (1 - ratio)), 1), max(round(mean * (1 + ratio)), 1)
    drawn: list[list[int]] = rng.integers(low, high + 1, shape).tolist()
    return drawn


def num_clients(asked: int, load: Load, num_jobs: int) -> int:
    """Return how many processes drive a load: as asked, else by its size and this machine's."""
    streams = min(load.concurrency or num_jobs, num_jobs)
    if asked:
        return min(asked, streams)
    half_of_cores = max((os.cpu_count() or 1) // 2, 1)
    return max(min(half_of_cores, -(-streams // STREAMS_PER_CLIENT)), 1)


def split_plan(plan: ClientPlan, clients: int) -> list[ClientPlan]:
    """Deal the jobs of one plan out to processes, each getting as many of them as of the streams.

    Args:
        plan: Of the whole load.
        clients: Processes; of a bounded load at most one for each stream.
    """
    streams = plan.concurrency or clients
    return [
        msgspec.structs.replace(
            plan,
            jobs=[job for i, job in enumerate(plan.jobs) if i % streams % clients == client],
            concurrency=len(range(client, plan.concurrency, clients)),
        )
        for client in range(clients)
    ]


def warm_up_plan(config: BenchConfig, server: Server, rules: PromptRules) -> ClientPlan:
    """Return requests as those of the load, one after the other; of a trace's, which vary, none is taken."""
    turns = [Turn(config.input_tokens, config.output_tokens)]
    jobs = [Job(index=i, turns=turns) for i in range(config.warmup_requests)]
    return ClientPlan(server=server, rules=rules, jobs=jobs, concurrency=1)
