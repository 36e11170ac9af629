"""The lists in a picture, as tables that leave columns out where the terminal is narrow."""

import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tandem.router.overview import NodeView, Overview, PairView
from tandem.top.words import bytes_rate, number, plain, rate, seconds
from tandem.wire.messages import NodeLoad

# Of pages, what they are drawn with: apart also where there are no colours.
PAGE_STATES = (
    ("held", "█", "blue"),
    ("granted", "▓", "yellow"),
    ("quarantined", "!", "red"),
    ("cached", "▒", "cyan"),
    ("free", "░", "bright_black"),
)
PHASES = {
    "tokenize": ("t", "white"),
    "queue": ("q", "yellow"),
    "pair": ("c", "white"),
    "lost_attempt": ("x", "red"),
    "reserve": ("r", "magenta"),
    "prefill_queue": ("w", "bright_yellow"),
    "prefill": ("P", "blue"),
    "link": ("l", "cyan"),
    "detokenize": ("d", "bright_black"),
    "unanswered": ("u", "red"),
}
# Below these a column is left out.
VERY_WIDE, WIDE, MIDDLE = 150, 112, 92


def _table(*columns: tuple[str, bool]) -> Table:
    """Return a table without lines; columns are named, and those of numbers stand to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    for name, is_number in columns:
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    return table


def nodes(shown: Sequence[NodeView], width: int) -> Table:
    """Return some nodes."""
    bar = max(8, min(30, width // 5))
    columns = [("role", False), ("node", False), ("state", False), ("pages", False)]
    columns += [("run", True), ("wait", True), ("tok/s", True)]
    if width >= MIDDLE:
        columns += [("moving", True), ("KV", True)]
    if width >= WIDE:
        columns += [("cached", True), ("zone", False)]
    has_tiers = width >= VERY_WIDE and any(node.load.tiers for node in shown)
    if has_tiers:
        columns += [("tiers: full, hits", False)]
    table = _table(*columns)
    for node in shown:
        cells: list[str | Text] = [
            node.role or "?",
            plain(node.id),
            _state(node),
            page_bar(node, bar),
        ]
        is_prefill, load, rates = node.role == "prefill", node.load, node.rates
        speed = rates.prompt_tokens if is_prefill else rates.generated_tokens
        cells += [number(load.num_running), number(load.num_waiting), rate(speed)]
        if width >= MIDDLE:
            moved = rates.pushed_bytes if is_prefill else rates.received_bytes
            cells += [number(load.num_transferring), bytes_rate(moved)]
        if width >= WIDE:
            cached = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
            cells += [f"{100 * cached:.0f} %", plain(node.zone)]
        if has_tiers:
            cells += [_tiers(load)]
        table.add_row(*cells)
    return table


def _state(node: NodeView) -> Text:
    style = {"up": "green", "down": "red"}.get(node.state, "yellow")
    why = f": {plain(node.reason)}" if node.reason and node.state == "down" else ""
    text = Text(f"{node.state}{why}", style=style)
    troubled = [tier for tier in node.load.tiers if tier.state != "up"]
    if node.state == "up" and troubled:
        text.append(f", {' '.join(plain(tier.name) for tier in troubled)}!", style="yellow")
    return text


def _tiers(load: NodeLoad) -> Text:
    """Return how full each tier is and which part of the prompt tokens came from it, or what ails it."""
    text = Text()
    for tier in load.tiers:
        hits = tier.hit_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
        full = f"{100 * tier.num_bytes / tier.limit_bytes:.0f} %, " if tier.limit_bytes else ""
        text.append(f"{'   ' if text else ''}{plain(tier.name)} ", style="bright_black")
        if tier.state == "up":
            text.append(f"{full}{100 * hits:.0f} %")
        else:
            text.append(plain(tier.state).replace("_", " "), style="yellow")
    return text


def page_bar(node: NodeView, width: int) -> Text:
    """Return a node's pages by state. One page of a state is seen, however many there are."""
    bar, load = Text(), node.load
    if not load.num_pages or node.state == "down":
        return Text("·" * width, style="bright_black")
    counts = [getattr(load, f"pages_{state}") for state, _, _ in PAGE_STATES[:-1]]
    cells = [max(1, round(width * count / load.num_pages)) if count else 0 for count in counts]
    left = width
    for (_, char, style), wanted in zip(PAGE_STATES, [*cells, width], strict=True):
        bar.append(char * min(wanted, left), style=style)
        left -= min(wanted, left)
    return bar


def page_legend() -> Text:
    """Return what stands for which state of a page."""
    parts = [part for state, char, style in PAGE_STATES for part in ((char, style), f" {state}  ")]
    return Text.assemble(*parts, style="bright_black")


def busy(overview: Overview) -> list[PairView]:
    """Return the pairs that work now, those that push most first."""
    pairs = [pair for pair in overview.pairs if pair.num_running or pair.pushed_bytes_per_s >= 1]
    return sorted(pairs, key=lambda pair: (-pair.pushed_bytes_per_s, -pair.num_running))


def phase_legend() -> Text:
    """Return which letter stands for which phase."""
    parts = [
        part
        for name, (char, style) in PHASES.items()
        for part in ((char, f"{style} reverse"), f" {name.replace('_', ' ')}  ")
    ]
    return Text.assemble(*parts, style="bright_black")


def pairs(overview: Overview, num: int) -> Table:
    """Return the first of those that work."""
    ids = {node.url: node.id for node in overview.nodes}
    table = _table(
        ("prefill", False), ("", False), ("decode", False), ("requests", True), ("pushed", True)
    )
    for pair in busy(overview)[:num]:
        prefill = ids.get(pair.prefill, pair.prefill) or "decode alone"
        table.add_row(
            plain(prefill),
            "→",
            plain(ids.get(pair.decode, pair.decode)),
            number(pair.num_running),
            bytes_rate(pair.pushed_bytes_per_s),
        )
    return table


def requests(recent: Sequence[dict[str, Any]], width: int) -> Table:
    """Return some requests, the newest first."""
    bar = max(10, min(44, width // 3))
    longest = max(timings["ttft_s"] or timings["e2e_s"] for timings in recent) or 1.0
    table = _table(
        ("began", False),
        ("request", False),
        ("to the first token", False),
        ("TTFT", True),
        ("whole", True),
    )
    if width >= MIDDLE:
        table.add_column("tokens", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("most of it", no_wrap=True)
    for timings in reversed(recent):
        clock = time.strftime("%H:%M:%S", time.localtime(timings["started_unix_s"]))
        name = plain(str(timings["request_id"]))
        mark = " ↻" if timings["num_attempts"] > 1 else ""
        ended = timings["outcome"]
        ttft = seconds(timings["ttft_s"]) if ended == "finished" else Text(ended, style="red")
        cells: list[str | Text] = [
            clock,
            f"{name[:18]}{mark}",
            phase_bar(timings, longest, bar),
            ttft,
            seconds(timings["e2e_s"]),
        ]
        if width >= MIDDLE:
            cells.append(f"{timings['num_prompt_tokens']} → {timings['num_output_tokens']}")
        if width >= WIDE:
            cells.append(_most(timings))
        table.add_row(*cells)
    return table


def phase_bar(timings: dict[str, Any], longest_s: float, width: int) -> Text:
    """Return what came before the first token, each phase by its letter and colour."""
    bar = Text()
    for phase in timings["phases"]:
        char, style = PHASES.get(phase["name"], ("?", "white"))
        if phase["name"] == "stream":
            continue
        end = round(width * min(1.0, (phase["start_s"] + phase["duration_s"]) / longest_s))
        bar.append(char * max(0, end - len(bar)), style=f"{style} reverse")
    return bar


def _most(timings: dict[str, Any]) -> str:
    """Return the longest phase before the first token."""
    before = [phase for phase in timings["phases"] if phase["name"] != "stream"]
    if not before:
        return ""
    most = max(before, key=lambda phase: phase["duration_s"])
    return f"{plain(most['name']).replace('_', ' ')} {seconds(most['duration_s'])}"
