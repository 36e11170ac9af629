"""A plan as tables and as JSON, and the files and commands to check the plan in a simulated cluster."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tandem.engine.profile import Profile
from tandem.plan.load import Load
from tandem.plan.sizing import Goals, Size
from tandem.wire.errors import ConfigInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The nodes that a load requires, by role and kind of node."""

    load: Load
    goals: Goals
    prefills: list[Size]
    decodes: list[Size]

    @property
    def best(self) -> tuple[Size, Size] | None:
        """The cheapest prefill and decode nodes; None if a role cannot reach its goal."""
        prefill, decode = (
            min(s, key=lambda each: each.cost) for s in (self.prefills, self.decodes)
        )
        return (prefill, decode) if prefill.num_nodes and decode.num_nodes else None


_PROFILE, _CONFIG, _LOAD = "profile.json", "config.json", "load.jsonl"


def write_check(plan: Plan, folder: Path) -> dict[str, list[str]]:
    """Write the files to check the best cluster; return the arguments after `tandem` of each command.

    `up` starts the cluster with simulated engines; `bench` sends the load.

    Raises:
        ConfigInvalid: The files cannot be written.
    """
    assert plan.best is not None
    prefill, decode = (size.kind for size in plan.best)
    # One file serves all nodes: prefill nodes use its prefill times, decode nodes its decode times.
    profile = Profile(prefill=prefill.profile.prefill, decode=decode.profile.decode)
    # The smallest model config for a simulated engine that stores no KV.
    config = {
        "model_type": "llama",
        "vocab_size": 32_000,
        "max_position_embeddings": min(prefill.most_tokens, decode.most_tokens),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size"), 1),
    }
    encode = msgspec.json.encode
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _PROFILE).write_bytes(msgspec.json.format(encode(profile)))
        (folder / _CONFIG).write_bytes(encode(config))
        (folder / _LOAD).write_bytes(b"".join(encode(row) + b"\n" for row in plan.load.rows))
    except OSError as error:
        raise ConfigInvalid(f"--check {folder}: {error.strerror}") from error
    return _commands(plan, folder)


def _commands(plan: Plan, folder: Path) -> dict[str, list[str]]:
    assert plan.best is not None
    prefill, decode = (size.kind.figures for size in plan.best)
    figures = {
        "--prefills": plan.best[0].num_nodes,
        "--decodes": plan.best[1].num_nodes,
        "--model": folder,
        "--sim-profile": folder / _PROFILE,
        "--page-size": decode.page_size,
        "--max-total-tokens": min(prefill.num_tokens, decode.num_tokens),
        "--max-running-requests": decode.max_running_requests,
        "--chunked-prefill-size": prefill.chunked_prefill_size,
    }
    up = ["up", "--engine", "simulated", "--sim-kv", "none", "--policy", "cache_aware"]
    bench = ["bench", "--trace", str(folder / _LOAD)]
    for flag, goal_s in (("--slo-ttft-ms", plan.goals.ttft_s), ("--slo-itl-ms", plan.goals.itl_s)):
        bench += [] if goal_s is None else [flag, f"{1000 * goal_s:g}"]
    up += [str(each) for pair in figures.items() for each in pair]
    return {"up": up, "bench": bench}


def render(plan: Plan, check: dict[str, list[str]] | None, console: Console) -> None:
    """Print the plan and, if `check` is given, its commands."""
    console.print(_load_line(plan), _answer(plan), sep="\n", soft_wrap=True)
    console.print(_table(plan))
    if any(size.kind.figures.is_estimated for size in plan.prefills + plan.decodes):
        console.print(
            "~ estimated from vendors' figures, not measured: may be off by a third. Measure a node with "
            "`tandem profile` before buying many.",
            soft_wrap=True,
        )
    if check is not None:
        console.print("\nCheck it with simulated engines, in two terminals:", soft_wrap=True)
        for argv in check.values():
            console.print(f"  tandem {shlex.join(argv)}", soft_wrap=True)


def _load_line(plan: Plan) -> str:
    load = plan.load
    left_out = f"; {load.num_too_long:,} too long for a node are left out"
    return (
        f"{len(load.rows):,} requests in {load.lasts_s:,.0f} s ({load.rate:.4g}/s); on average, prompts of "
        f"{load.prompts.mean():,.0f} tokens, {1 - load.new.sum() / load.prompts.sum():.0%} of them seen before, and "
        f"answers of {load.outputs.mean():,.0f}{left_out if load.num_too_long else ''}"
    )


def _answer(plan: Plan) -> str:
    if plan.best is None:
        return "No number of these nodes reaches the goals."
    prefill, decode = plan.best
    return (
        f"{prefill.num_nodes} prefill x {prefill.kind.label} and {decode.num_nodes} decode x {decode.kind.label}, "
        f"cost {prefill.cost + decode.cost:g}"
    )


def _table(plan: Plan) -> Table:
    """Return a table with a row per role and kind; times are TTFT for prefill and ITL for decode."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("role", "kind"):
        table.add_column(title, no_wrap=True)
    for title in ("nodes", "cost", "busy", "p50, ms", f"p{plan.goals.percentile:g}, ms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("bound by")
    for role, sizes in (("prefill", plan.prefills), ("decode", plan.decodes)):
        for size in sizes:
            table.add_row(role, size.kind.label, *_cells(size))
    return table


def _cells(size: Size) -> tuple[str, ...]:
    if not size.num_nodes:
        return (*"-----", size.reason)
    times = (f"{1000 * each:,.1f}" for each in (size.median_s, size.percentile_s))
    return f"{size.num_nodes}", f"{size.cost:g}", f"{size.busy:.0%}", *times, size.reason


def as_json(plan: Plan, check: dict[str, list[str]] | None) -> bytes:
    """Return the plan as one JSON object."""
    load, best = plan.load, plan.best
    found: dict[str, Any] = {
        "load": {
            "num_requests": len(load.rows),
            "num_too_long": load.num_too_long,
            "lasts_s": load.lasts_s,
            "rate": load.rate,
            "num_prompt": int(load.prompts.sum()),
            "num_uncached": int(load.new.sum()),
            "num_output": int(load.outputs.sum()),
        },
        "goals": plan.goals,
        "best": best
        and {"prefill": best[0], "decode": best[1], "cost": sum(size.cost for size in best)},
        "prefills": plan.prefills,
        "decodes": plan.decodes,
        "check": check,
    }
    return msgspec.json.format(msgspec.json.encode(found)) + b"\n"
