"""The fault matrix as a page for people: tables from results, and a legend."""

import datetime as dt
import os
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.faults.cells import (
    DELAY_MS,
    EMPTY,
    FAULTS,
    LASTS_S,
    LOSS,
    STAGES,
    TARGETS,
    Cell,
)

INTRODUCTION = """# The fault matrix

This page shows what clients and operators see if a process fails while requests are at a given stage. The tests compare every token with the
right one. `make faults`, as root, runs the matrix, resumes after an interruption, and writes this page. `tests/faults/test_matrix.py` runs cells of every
row and column.

Each cell has its own cluster, two at a time: two prefill and two decode nodes (simulated engines, real KV bytes over TCP,
checked; the second of each has half the heartbeat interval), a router with two edge workers, and a second router. Each cell sends six requests, *waiting* sixteen. They are greedy, sampled with a seed, or ended by a
stop id. *TP rank* is a tiny model with two ranks per decode node, on loopback.
"""

LEGEND = f"""## Legend

A cell has two lines, `right/all` and `gap/seen/pages`:

- **right/all**: requests with exactly the right tokens, omitted if all were right. The connections of the others ended with the process that held them. **Bold**: a
  token was lost, repeated or wrong, a client got an error, or pages leaked; the cell names it.
- **gap**: the longest pause of a client, in ms, beyond the longest pause of an undisturbed run.
- **seen**: when another process first logged the failure, in ms; `-`: none did.
- **pages**: how long after the last answer all pages of the other nodes were free or cached, in ms.

The stage is that of the first request to reach it (`tests/faults/stages.py`):

- *idle*: all requests begin after the fault;
- *pushing*: prefill has computed the prompt, and its KV is moving;
- *landed*: decode has the KV and has made at most one step;
- *decoding*: clients wait for the whole answer;
- *streaming*: each client has ten tokens.

SIGKILL and SIGSTOP hit all processes of a node or router, SIGTERM the first. *Engine process* belongs to prefill at *prefilling* and *pushing*, else to decode.

| fault | means |
|---|---|
| restart | SIGKILL, and the node is started again at once |
| SIGSTOP | for {LASTS_S["SIGSTOP"]:g} s, then SIGCONT |
| network cut | all packets of the host are dropped for {LASTS_S["network cut"]:g} s |
| delay and loss | {DELAY_MS:g} ms each way and {LOSS:.0%} of all packets, for {LASTS_S["delay and loss"]:g} s |
| disk full | no byte left for log, scratch files and metrics, for {LASTS_S["disk full"]:g} s |
| out of pages | other requests hold nearly all pages of the node for {LASTS_S["out of pages"]:g} s |
| memory limit | large requests until the kernel ends the process |
"""


def write_page(path: Path, results: Mapping[Cell, Mapping]) -> None:
    """Write it."""
    parts = [INTRODUCTION, _machine(), _totals(results), LEGEND]
    parts += [_table(target, results) for target in TARGETS]
    parts += [_operators(results), _not_run(results)]
    path.write_text("\n".join(parts).rstrip() + "\n")


def _machine() -> str:
    cores, kernel = os.cpu_count(), platform.release().split("-")[0]
    day = dt.datetime.now(dt.UTC).date()
    return f"Run on {day}, on {cores} cores, Linux {kernel}, Python {platform.python_version()}.\n"


def _totals(results: Mapping[Cell, Mapping]) -> str:
    ran = [r for r in results.values() if not r["not_run"]]
    total = Counter[str]()
    for one in ran:
        for key in ("num_requests", "num_right", "broken", "lost", "repeated", "wrong"):
            total[key] += one[key]
        total["errors"] += sum(one["errors"].values())
        total["leaks"] += one["pages_left"] > 0
    return (
        f"**{len(ran)} cells, {total['num_requests']} requests: {total['num_right']} with every token right, "
        f"{total['broken']} whose connection ended with its process, {total['errors']} errors; tokens lost "
        f"{total['lost']}, repeated {total['repeated']}, wrong {total['wrong']}; cells with pages "
        f"unaccounted for {total['leaks']}.**\n"
    )


def _table(target: str, results: Mapping[Cell, Mapping]) -> str:
    head = f"## {target}\n\n| | " + " | ".join(STAGES) + " |\n|---|" + "---|" * len(STAGES)
    rows = []
    for fault in FAULTS:
        why = EMPTY.get((target, fault))
        cells = [_shown(results.get(Cell(target, fault, stage))) for stage in STAGES]
        rows.append(f"| **{fault}** | " + (why or " | ".join(cells)) + " |")
    return "\n".join([head, *rows, ""])


def _shown(one: Mapping | None) -> str:
    if one is None or one["not_run"]:
        return "not run"
    right = f"{one['num_right']}/{one['num_requests']}"
    parts = [right] if one["num_right"] < one["num_requests"] else []
    parts += [f"{name} {one[name]}" for name in ("lost", "repeated", "wrong") if one[name]]
    parts += [f"{count} {name}" for name, count in one["errors"].items()]
    left = one["pages_left"]
    parts += [f"pages left {left}"] if left else []
    seen = "-" if one["noticed_ms"] is None else f"{one['noticed_ms']:.0f}"
    parts.append(f"{one['gap_ms']:.0f}/{seen}/{'-' if left else format(one['pages_ms'], '.0f')}")
    text = "<br>".join(parts)
    is_bad = one["lost"] or one["repeated"] or one["wrong"] or one["errors"] or left
    return f"**{text}**" if is_bad else text


def _operators(results: Mapping[Cell, Mapping]) -> str:
    lines = [
        "## What operators see\n",
        "| process | fault | log events |",
        "|---|---|---|",
    ]
    for target in TARGETS:
        for fault in FAULTS:
            of = [r for c, r in results.items() if (c.target, c.fault) == (target, fault)]
            events = Counter[str]()
            for one in of:
                events.update(one["operator"].keys())
            if any(not one["not_run"] for one in of):
                names = ", ".join(f"`{name}`" for name, _ in events.most_common(6)) or "-"
                lines.append(f"| {target} | {fault} | {names} |")
    return "\n".join([*lines, ""])


def _not_run(results: Mapping[Cell, Mapping]) -> str:
    lines = [
        f"- {c.target}, {c.fault}, {c.stage}: {r['not_run']}."
        for c, r in results.items()
        if r["not_run"]
    ]
    return "\n".join(["## Cells that were not run", "", *lines, ""]) if lines else ""
