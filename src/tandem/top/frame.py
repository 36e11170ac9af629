"""One picture of a cluster for a terminal: as wide as that is, and no longer than it is asked to be."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.router.overview import Overview
from tandem.top import tables
from tandem.top.words import NONE, number, plain, rate, seconds

# Lines that are not of a list: headline, titles, heads of tables, gaps.
FIXED_LINES = 18
GOODPUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Look:
    """How a picture is to be.

    Attributes:
        width: In characters.
        num_lines: It may have; None: as many as it needs.
        problem: Why what is shown is old; empty when it is not.
    """

    width: int
    num_lines: int | None
    slo_ttft_s: float
    slo_itl_s: float
    url: str
    problem: str = ""


def frame(overview: Overview | None, look: Look) -> RenderableType:
    """Return the picture; without an overview, what there is to say."""
    if overview is None:
        waiting = look.problem or f"asking {look.url} …"
        return Text(plain(waiting), style="bold red" if look.problem else "")
    rooms = _rooms(overview, look)
    problem = [Text(plain(look.problem), style="bold red")] if look.problem else []
    return Group(*problem, _headline(overview, look), *_lists(overview, look, rooms))


def _rooms(overview: Overview, look: Look) -> Sequence[int]:
    """Return how many nodes, pairs and requests there is room for."""
    wanted = [len(overview.nodes), min(8, len(tables.busy(overview))), 12]
    if look.num_lines is None:
        return wanted
    left = max(4, look.num_lines - FIXED_LINES)
    # Nodes are what one looks for first; the others share what is left.
    nodes = min(wanted[0], max(2, left // 2))
    pairs = min(wanted[1], max(1, (left - nodes) // 4))
    return [nodes, pairs, max(1, left - nodes - pairs)]


def _lists(overview: Overview, look: Look, rooms: Sequence[int]) -> Iterator[RenderableType]:
    num_nodes, num_pairs, num_requests = rooms
    yield from _titled(
        "nodes",
        tables.nodes(overview.nodes[:num_nodes], look.width),
        len(overview.nodes) - num_nodes,
    )
    yield tables.page_legend()
    if busy := tables.busy(overview):
        yield from _titled("pairs", tables.pairs(overview, num_pairs), len(busy) - num_pairs)
    if overview.recent:
        recent = overview.recent[-num_requests:]
        yield from _titled("recent requests", tables.requests(recent, look.width), 0)
        yield tables.phase_legend()


def _titled(title: str, table: Table, num_more: int) -> Iterator[RenderableType]:
    more = f"  and {num_more} more" if num_more > 0 else ""
    yield Text.assemble(("\n" + title, "bold"), (more, "bright_black"))
    yield table


def _headline(overview: Overview, look: Look) -> RenderableType:
    times, rates, totals = overview.latencies, overview.rates, overview.totals
    clock = time.strftime("%H:%M:%S", time.localtime(overview.now_unix_s))
    title = Text.assemble(
        ("● ", "green" if overview.is_serving else "red"),
        ("Tandem ", "bold"),
        (f"{plain(overview.model)}  ", "cyan"),
        plain(overview.detail),
        (f"  {clock}", "bright_black"),
    )
    if overview.silent_workers:
        title.append(f"  {len(overview.silent_workers)} edge workers are silent", style="yellow")
    facts = [
        ("requests/s", rate(rates.requests)),
        ("in flight", number(overview.num_in_flight)),
        ("queued", number(overview.num_queued)),
        ("TTFT p50/p99", f"{seconds(times.ttft.p50_s)} / {seconds(times.ttft.p99_s)}"),
        ("ITL p50/p99", f"{seconds(times.itl.p50_s)} / {seconds(times.itl.p99_s)}"),
        ("E2E p50/p99", f"{seconds(times.e2e.p50_s)} / {seconds(times.e2e.p99_s)}"),
        ("tokens/s", f"{rate(rates.generated_tokens)} (+{rate(rates.prompt_tokens)} of prompts)"),
        ("goodput", _goodput(overview, look)),
        ("finished", number(totals.num_finished)),
        ("failed", number(totals.num_failed)),
        ("refused", number(totals.num_refused)),
        ("replays", number(totals.num_replays)),
    ]
    return Group(title, "", *_lines(facts, look.width))


def _lines(facts: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Yield facts in lines that end between two of them."""
    line = Text()
    for name, value in facts:
        if line and len(line) + len(name) + len(value) + 1 > width:
            yield line
            line = Text()
        line.append(f"{name} ", style="bright_black").append(value, style="bold").append("   ")
    yield line


def _goodput(overview: Overview, look: Look) -> str:
    """Return which part of the requests that ended in the last minute kept the limits."""
    since = overview.now_unix_s - GOODPUT_S
    ended = [
        timings
        for timings in overview.recent
        if timings["ended_unix_s"] > since and timings["outcome"] != "cancelled"
    ]
    good = [
        timings
        for timings in ended
        if timings["outcome"] == "finished"
        and (timings["ttft_s"] or 0.0) <= look.slo_ttft_s
        and _between_tokens(timings) <= look.slo_itl_s
    ]
    return f"{100 * len(good) / len(ended):.0f} %" if ended else NONE


def _between_tokens(timings: dict[str, Any]) -> float:
    gaps = timings["num_output_tokens"] - 1
    if gaps < 1 or timings["ttft_s"] is None:
        return 0.0
    return float((timings["e2e_s"] - timings["ttft_s"]) / gaps)
