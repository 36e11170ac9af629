"""The loads of benchmarks that serve: driven by the client of `tandem bench`, shown as a table."""

import asyncio
from collections.abc import Sequence

from benchmarks.processes import Target
from tandem.bench.arguments import Load
from tandem.bench.client import Server, drive
from tandem.bench.report import LoadReport, Times, summarise, times_of
from tandem.bench.workload import Job, PromptRules


def load(
    target: Target,
    streams: int,
    *,
    input_tokens: int,
    output_tokens: int,
    num_requests: int,
    vocab_size: int,
    seed: int,
    model: str = "",
) -> LoadReport:
    """Drive a server once with `streams` requests open at a time.

    Args:
        num_requests: Sent in all.
        vocab_size: Ids of prompts are below it.
        seed: Of the prompts; equal ones give equal prompts.
        model: Asked for over OpenAI's API; empty drives the native one.
    """
    server = Server(url=target.url, api="completions" if model else "native", model=model)
    jobs = [
        Job(index=i, input_tokens=input_tokens, output_tokens=output_tokens)
        for i in range(num_requests)
    ]
    rules = PromptRules(vocab_size=vocab_size, seed=abs(seed))
    return summarise(Load(streams), asyncio.run(drive(server, rules, jobs, streams)))


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
