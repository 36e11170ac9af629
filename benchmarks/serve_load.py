"""The loads of benchmarks that serve: driven by the client of `tandem bench`, shown as a table."""

import asyncio
from collections.abc import Sequence

from benchmarks.processes import Target
from tandem.bench.config import Load
from tandem.bench.processes import drive
from tandem.bench.records import Api, ClientPlan, Job, PromptRules, Server, Turn
from tandem.bench.report import LoadReport, Times
from tandem.bench.statistics import summarise
from tandem.bench.table import times_of
from tandem.bench.workload import split_plan


def load(
    target: Target,
    streams: int,
    turn: Turn,
    *,
    num_requests: int,
    vocab_size: int,
    seed: int,
    model: str = "",
    clients: int = 2,
) -> LoadReport:
    """Drive a server once with `streams` requests open at a time; prompts are made from `seed`.

    Args:
        target: The server.
        streams: Requests open at once.
        turn: Tokens of each prompt and answer.
        num_requests: Sent in all.
        vocab_size: Ids of prompts are below it.
        seed: Of the prompts; equal ones give equal prompts.
        model: Asked for over OpenAI's API; empty drives the native one.
        clients: Processes that send, at most one for each stream.
    """
    api: Api = "completions" if model else "native"
    plan = ClientPlan(
        server=Server(url=target.url, api=api, model=model),
        rules=PromptRules(vocab_size=vocab_size, seed=abs(seed)),
        jobs=[Job(index=i, turns=[turn]) for i in range(num_requests)],
        concurrency=streams,
    )
    measured = asyncio.run(drive(split_plan(plan, min(clients, streams))))
    return summarise(Load(streams), measured.samples, measured.cpu_s)


def table(reports: Sequence[tuple[str, LoadReport]]) -> str:
    """Return (name of a target, how it served a load) as text, one line each; times in milliseconds."""
    heads = [f"{name} p50/90/99 ms" for name in times_of(reports[0][1])]
    rows = [["target", "streams", "requests", "failed", "tokens/s", *heads]]
    for name, one in reports:
        counts = [str(n) for n in (one.concurrency, one.num_requests, one.num_failed)]
        times = [_cell(times) for times in times_of(one).values()]
        rows.append([name, *counts, f"{one.output_tokens_per_s:.1f}", *times])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def _cell(times: Times) -> str:
    return "/".join(f"{ms:.1f}" for ms in (times.p50, times.p90, times.p99)) if times.count else "-"
