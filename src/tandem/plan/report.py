"""A plan as tables, a chart for a terminal, and JSON."""

from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tandem.plan import words
from tandem.plan.planning import Option, Plan, Trial

BAR_WIDTH = 40


def render(plan: Plan, num_too_long: int, console: Console) -> None:
    """Print the plan."""
    console.print(words.load_line(plan, num_too_long), soft_wrap=True)
    for line in words.answer(plan):
        console.print(line, soft_wrap=True)
    if plan.trials:
        console.print(_fleets(plan))
    if len(plan.options) > 1:
        console.print(_options(plan))
    if plan.ratios:
        _chart(plan, console)
    kinds = [kind for option in plan.options for kind in (option.prefill, option.decode)]
    if line := words.estimated_line(kinds):
        console.print(line, soft_wrap=True)


def _fleets(plan: Plan) -> Table:
    """Return the best fleet, and those beside it."""
    caption = (
        f"times: median/percentile {plan.goals.percentile:g}; goodput: requests that meet the goals; "
        "busy: prefills' devices"
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        caption=caption,
        caption_justify="left",
    )
    table.add_column("prefill : decode", no_wrap=True)
    for title in ("cost", "TTFT, ms", "ITL, ms", "goodput", "busy"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    shown = [plan.best] if plan.best is not None else []
    for trial in [*shown, *words.beside(plan)]:
        table.add_row(*_row(trial), end_section=trial is plan.best)
    return table


def _row(trial: Trial) -> tuple[str, ...]:
    verdict = trial.verdict
    return (
        words.fleet_name(trial),
        f"{trial.fleet.cost:g}",
        f"{words.milliseconds(verdict.ttft_p50_s)}/{words.milliseconds(verdict.ttft_s)}",
        f"{words.milliseconds(verdict.itl_p50_s)}/{words.milliseconds(verdict.itl_s)}",
        f"{verdict.goodput:.4g}/s",
        f"{verdict.busy_prefill:.0%}",
        words.misses(verdict),
    )


def _options(plan: Plan) -> Table:
    """Return what came of each pair of kinds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("prefill", "decode", "at the least", "found"):
        table.add_column(title, no_wrap=title != "found")
    for option in plan.options:
        table.add_row(
            words.kind_name(option.prefill), words.kind_name(option.decode), *_found(option, plan)
        )
    return table


def _found(option: Option, plan: Plan) -> tuple[str, str]:
    if not option.is_possible:
        return "-", words.reason(option, plan)
    least = f"{option.prefill_bound.least}:{option.decode_bound.least}, cost {option.least_cost:g}"
    if option.best is not None:
        return least, f"{option.best.ratio}, cost {option.best.fleet.cost:g}"
    if plan.best is not None:
        return least, "nothing cheaper than the best"
    return least, words.reason(option, plan)


def _chart(plan: Plan, console: Console) -> None:
    """Print a bar for each ratio: as long as its goodput is of the load."""
    rate = plan.load.rate
    console.print(
        "goodput over the ratio of prefills to decodes, of as many nodes:", soft_wrap=True
    )
    width = max(len(trial.ratio) for trial in plan.ratios)
    for trial in plan.ratios:
        verdict = trial.verdict
        bar = "█" * round(BAR_WIDTH * min(verdict.goodput / rate, 1.0))
        mark = "◀" if plan.best is not None and trial.ratio == plan.best.ratio else " "
        console.print(
            f"  {trial.ratio:>{width}} {mark} {bar:<{BAR_WIDTH}} {verdict.goodput:8.4g}/s  {words.misses(verdict)}",
            soft_wrap=True,
        )


def as_json(plan: Plan, num_too_long: int) -> bytes:
    """Return the plan as one JSON object; times that never came are null."""
    found: dict[str, Any] = {
        "load": {**_fields(plan.load), "num_too_long": num_too_long, "rate": plan.load.rate},
        "goals": _fields(plan.goals),
        "is_complete": all(option.is_complete for option in plan.options),
        "best": None if plan.best is None else _trial(plan.best),
        "reasons": words.reasons(plan) if plan.best is None else [],
        "tried": [_trial(trial) for trial in plan.trials],
        "ratios": [_trial(trial) for trial in plan.ratios],
        "nodes": {
            kind.name: {"is_estimated": words.is_estimated(kind), "origin": kind.profile.origin}
            for option in plan.options
            for kind in (option.prefill, option.decode)
        },
    }
    return msgspec.json.format(msgspec.json.encode(found)) + b"\n"


def _trial(trial: Trial) -> dict[str, Any]:
    fleet = trial.fleet
    return {
        "prefill": fleet.prefill.name,
        "num_prefill": fleet.num_prefill,
        "decode": fleet.decode.name,
        "num_decode": fleet.num_decode,
        "policy": fleet.policy,
        "cost": fleet.cost,
        "is_met": trial.is_met,
        **_fields(trial.verdict),
    }


def _fields(value: object) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(value)
    return made
