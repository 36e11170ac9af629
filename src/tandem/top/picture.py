"""One picture of a cluster for a terminal: a headline, and tables of nodes, pairs and running requests.

Names and errors come from other machines: `plain` removes their control characters.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.asking import plain
from tandem.router.overview import NodeView, Overview

NONE = "-"
# Each page state has a different character, so that states differ without colours, too.
PAGE_STATES = (
    ("held", "█", "blue"),
    ("granted", "▓", "yellow"),
    ("quarantined", "!", "red"),
    ("cached", "▒", "cyan"),
    ("free", "░", "bright_black"),
)
STYLES = {"up": "green", "down": "red"}
# Lines outside the lists: headline, table headers, gaps.
FIXED_LINES = 14
TABLE_LINES = 3
# The last phase of a running request, in words.
PHASES = {"unanswered": "to the first token", "stream": "answering"}


def picture(
    overview: Overview, width: int, num_lines: int | None = None, problem: str = ""
) -> RenderableType:
    """Return the picture of one state.

    Args:
        width: The width in characters.
        num_lines: The lines of the screen; None: all nodes, and the busiest pairs and oldest requests up to 40 rows in all.
        problem: The reason that the state is outdated; empty if it is current.
    """
    busy = [pair for pair in overview.pairs if pair.num_running or pair.prompt_tokens_per_s >= 1]
    busy.sort(key=lambda pair: (-pair.prompt_tokens_per_s, -pair.num_running))
    left = 40 if num_lines is None else max(6, num_lines - FIXED_LINES)
    num_nodes = len(overview.nodes) if num_lines is None else min(left // 2, len(overview.nodes))
    num_pairs = min(len(busy), max((left - num_nodes) // 2, 1))
    num_requests = max(left - num_nodes - num_pairs - TABLE_LINES, 0)
    more = (
        f", and {len(overview.nodes) - num_nodes} more" if len(overview.nodes) > num_nodes else ""
    )
    legend = [Text(f"{char} {state}", style=style) for state, char, style in PAGE_STATES]
    parts: list[RenderableType] = [
        *_headline(overview, problem),
        _nodes(overview.nodes[:num_nodes], f"nodes{more}", width),
        Columns(legend, padding=(0, 2)),
    ]
    if busy:
        ids = {node.url: node.id for node in overview.nodes}
        rows = [
            (
                plain(ids.get(pair.prefill, pair.prefill) or "decode alone"),
                plain(ids.get(pair.decode, pair.decode)),
                number(pair.num_running),
                f"{number(pair.prompt_tokens_per_s)}/s",
            )
            for pair in busy[:num_pairs]
        ]
        parts.append(_table("pairs", ["prefill", "decode"], ["requests", "prompt tokens"], rows))
    if requests := [_request(each, overview) for each in overview.live[:num_requests]]:
        numbers = ["attempts", "prompt", "answer", "first token", "so far"]
        parts.append(_table("running requests", ["request", "phase", "decode"], numbers, requests))
    return Group(*parts)


def _headline(overview: Overview, problem: str) -> Iterator[RenderableType]:
    if problem:
        yield Text(plain(problem), style="bold red")
    times, rates, totals = overview.latencies, overview.rates, overview.totals
    yield Text.assemble(
        ("● ", "green" if overview.is_serving else "red"),
        ("Tandem ", "bold"),
        (f"{plain(overview.model)}  ", "cyan"),
        f"{plain(overview.detail)}  {_clock(overview.now_unix_s)}",
    )
    if overview.silent_workers:
        silent = f"{len(overview.silent_workers)} edge workers do not answer"
        yield Text(silent, style="yellow")
    facts = {
        "requests/s": number(rates.requests),
        "in flight": number(overview.num_in_flight),
        "queued": number(overview.num_queued),
        "TTFT p50/p99": f"{seconds(times.ttft.p50_s)} / {seconds(times.ttft.p99_s)}",
        "ITL p50/p99": f"{seconds(times.itl.p50_s)} / {seconds(times.itl.p99_s)}",
        "E2E p50/p99": f"{seconds(times.e2e.p50_s)} / {seconds(times.e2e.p99_s)}",
        "tokens/s": f"{number(rates.generated_tokens)} (+{number(rates.prompt_tokens)} of prompts)",
        "finished": number(totals.num_finished),
        "failed": number(totals.num_failed),
        "refused": number(totals.num_refused),
        "replays": number(totals.num_replays),
    }
    yield Columns([Text(f"{name} {value}") for name, value in facts.items()], padding=(0, 3))


# ── tables ───────────────────────────────────────────────────────────────────────────────────────

Cells = Sequence[str | Text]


def _table(title: str, texts: list[str], numbers: list[str], rows: Iterable[Cells]) -> Table:
    """Return a table: the columns of text, then the columns of numbers, right-aligned."""
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None)
    table.pad_edge, table.show_header = False, any(texts)
    for name in texts:
        table.add_column(name, no_wrap=True, header_style="bright_black")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True, header_style="bright_black")
    for row in rows:
        # Converted to Text, because rich parses the markup of a string.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _nodes(shown: Sequence[NodeView], title: str, width: int) -> Table:
    texts, numbers = ["role", "node", "state", "pages"], ["run", "wait", "tok/s", "KV"]
    return _table(title, texts, numbers, (_node(node, width) for node in shown))


def _node(node: NodeView, width: int) -> Cells:
    rates, is_prefill = node.rates, node.role == "prefill"
    moved = rates.pushed_bytes if is_prefill else rates.received_bytes
    return [
        node.role or "?",
        plain(node.id),
        _state(node),
        page_bar(node, max(8, min(30, width // 6))),
        number(node.load.num_running),
        number(node.load.num_waiting),
        number(rates.prompt_tokens if is_prefill else rates.generated_tokens),
        f"{number(moved)}B/s",
    ]


def _request(timings: dict[str, Any], overview: Overview) -> Cells:
    ids, phase = {node.url: node.id for node in overview.nodes}, timings["phases"][-1]["name"]
    return [
        plain(timings["request_id"]),
        PHASES.get(phase, plain(phase)),
        plain(ids.get(timings["decode"], timings["decode"]) or NONE),
        number(timings["num_attempts"]),
        number(timings["num_prompt_tokens"]),
        number(timings["num_output_tokens"]),
        seconds(timings["ttft_s"]),
        seconds(timings["e2e_s"]),
    ]


def _state(node: NodeView) -> Text:
    """Return a node's state, the reason if the node is down, and the tiers that are not up."""
    why = f": {plain(node.reason)}" if node.reason and node.state == "down" else ""
    text = Text(f"{node.state}{why}", style=STYLES.get(node.state, "yellow"))
    for tier in node.load.tiers:
        if tier.state != "up":
            text.append(
                f", {plain(tier.name)} {plain(tier.state)}".replace("_", " "), style="yellow"
            )
    return text


def page_bar(node: NodeView, width: int) -> Text:
    """Return a bar of a node's pages by state. A state with few pages has a character if one is left."""
    load = node.load
    if not load.num_pages or node.state == "down":
        return Text("·" * width, style="bright_black")
    bar, left = Text(), width
    for state, char, style in PAGE_STATES:
        count = getattr(load, f"pages_{state}")
        wanted = max(1, round(width * count / load.num_pages)) if count else 0
        wanted = left if state == "free" else min(wanted, left)
        bar.append(char * wanted, style=style)
        left -= wanted
    return bar


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def seconds(value: float | None) -> str:
    """Format a time: 1.50 s, 12.3 ms."""
    if value is None:
        return NONE
    return f"{value:,.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def number(value: float) -> str:
    """Format a count or a rate: 0.4, 7, 1,024, 12.3k, 4.56M."""
    if value < 10_000:
        return f"{value:.1f}" if 0 < value < 10 and value % 1 else f"{value:,.0f}"
    for unit in "kMG":
        value /= 1000
        if value < 1000 or unit == "G":
            break
    return f"{value:.3g}{unit}"


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
