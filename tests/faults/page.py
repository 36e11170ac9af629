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

What clients and operators see when a process of a cluster is hurt while requests are at a given stage.
Written by `python -m tests.faults.matrix --write docs/fault-matrix.md` from real processes: two prefill and
two decode nodes (simulated engines, real KV bytes over TCP, checked), a router with two edge workers and
a second router, each on a network and a disk of its own. Six requests run in each cell, sixteen in those
of *waiting*: greedy, sampled with a seed, and ended by a stop id; every token is compared with the one that is right.
The rows of *TP rank* run a tiny model with two ranks a decode node, on loopback.

`make faults` runs all of it and writes this page: as root, for the networks and the disks; a run that was cut off goes on
where it was. Some cells of every row and column are in the tests (`tests/faults/test_matrix.py`). `make soak` serves
thousands of requests for half an hour while every 10 s somebody is killed, frozen, ended or taken out, and
compares every token, memory, descriptors, pages and what is left behind (`tests/faults/soak.py`).
"""

LEGEND = f"""## Legend

- **Cells**: `6/6` are requests with exactly the right tokens, of all. `gap` is the longest pause of any client, in ms, beyond the
  longest pause of an undisturbed run; `seen` is when another process first logged that something is wrong, in ms;
  `pages` is how long after the last answer all pages of the nodes that were not hurt were free or cached again.
  `broken` counts connections that ended with the process that held them: their clients come again. Errors are
  named as clients were told. **Bold** is a cell in which something was lost.
- **Stages**, of the first request to reach one (`tests/faults/stages.py` has the exact words): *idle*: there is none, and all
  begin after the fault; *waiting*: in line for pages; *prefilling*: the prompt is computed; *pushing*: it is, and its KV
  is on its way; *landed*: decode has the KV and has not made more than a step; *decoding*: answers are generated, and
  their clients wait for the whole; *streaming*: clients have at least ten tokens of a stream.
- **Who**: a killed or frozen node or router is all of its processes, as when its container is; SIGTERM goes to the first. An
  *engine process* is that of a prefill node for *prefilling* and *pushing*, else that of a decode node.
- **How**: SIGSTOP for {LASTS_S["SIGSTOP"]:g} s, then SIGCONT; *network cut* for {LASTS_S["network cut"]:g} s: every packet to and from the host is
  dropped in silence; *delay and loss* for {LASTS_S["delay and loss"]:g} s: {DELAY_MS:g} ms each way and {LOSS:.0%} of all packets; *disk full* for
  {LASTS_S["disk full"]:g} s: no byte left where it writes its log, its scratch files and, a router, its metrics; *out of pages* for
  {LASTS_S["out of pages"]:g} s: other requests hold nearly all pages of the node; *memory limit*: the process may have hardly more memory than it
  has, and is sent requests that take megabytes to read, until the kernel ends it.
"""


def write_page(path: Path, results: Mapping[Cell, Mapping]) -> None:
    """Write it."""
    parts = [INTRODUCTION, _machine(), _totals(results), LEGEND]
    parts += [_table(target, results) for target in TARGETS]
    parts += [_operators(results), _empty(results)]
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
        cells = [_shown(Cell(target, fault, stage), results) for stage in STAGES]
        rows.append(f"| **{fault}** | " + " | ".join(cells) + " |")
    return "\n".join([head, *rows, ""])


def _shown(cell: Cell, results: Mapping[Cell, Mapping]) -> str:
    if cell.why_empty:
        return "-"
    one = results.get(cell)
    if one is None or one["not_run"]:
        return "not run"
    parts = [f"{one['num_right']}/{one['num_requests']}"]
    parts += [f"broken {one['broken']}"] if one["broken"] else []
    parts += [f"{name} {one[name]}" for name in ("lost", "repeated", "wrong") if one[name]]
    parts += [f"{count} {name}" for name, count in one["errors"].items()]
    parts.append(f"gap {one['gap_ms']:.0f}")
    parts.append("seen -" if one["noticed_ms"] is None else f"seen {one['noticed_ms']:.0f}")
    left = one["pages_left"]
    parts.append(f"pages left {left}" if left else f"pages {one['pages_ms']:.0f}")
    text = "<br>".join(parts)
    is_bad = one["lost"] or one["repeated"] or one["wrong"] or one["errors"] or left
    return f"**{text}**" if is_bad else text


def _operators(results: Mapping[Cell, Mapping]) -> str:
    lines = [
        *("## What operators see", ""),
        *(
            "| who | how | log events | /health of a router, where it changed |",
            "|---|---|---|---|",
        ),
    ]
    for target in TARGETS:
        for fault in FAULTS:
            of = [r for c, r in results.items() if (c.target, c.fault) == (target, fault)]
            events = Counter[str]()
            for one in of:
                events.update(one["operator"].keys())
            if any(not one["not_run"] for one in of):
                told = ", ".join(f"`{name}`" for name, _ in events.most_common(6)) or "-"
                health = max((one["health"] for one in of), key=len, default="")
                lines.append(f"| {target} | {fault} | {told} | {_plain(health) or '-'} |")
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def _empty(results: Mapping[Cell, Mapping]) -> str:
    lines = ["## Cells that are empty, and cells that were not run", ""]
    lines += [f"- {target}, {fault}: {why}." for (target, fault), why in EMPTY.items()]
    lines += [
        f"- {c.target}, {c.fault}, {c.stage}: not run: {r['not_run']}."
        for c, r in results.items()
        if r["not_run"]
    ]
    return "\n".join([*lines, ""])
