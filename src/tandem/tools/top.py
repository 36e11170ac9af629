"""`tandem top`: polls a router's overview, and draws a headline and a table of the nodes.

Names and errors come from other machines: `plain` removes their control characters.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Annotated

import aiohttp
import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.router.console.overview import NodeView, Overview
from tandem.settings.flags import Flag, add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.tools.query import KeyRefused, QueryFailed, plain, query, session_with
from tandem.wire.hosts import checked_url

EXAMPLES = """\
examples:
  tandem top                                   the router of this machine, at port 8000
  tandem top http://10.0.0.2:8000              a different router
  tandem top http://10.0.0.2:8000 --once       print the screen once, for a report or a file

Ctrl-C ends it. The router's URL shows the same and more in a browser; GET /overview has it as JSON.

More: docs/dashboard.md
"""
INTERVAL_S = 1.0
# Each page state has a different character, so that states differ without colours, too.
PAGE_STATES = (
    ("held", "█", "blue"),
    ("granted", "▓", "yellow"),
    ("quarantined", "!", "red"),
    ("cached", "▒", "cyan"),
    ("free", "░", "bright_black"),
)
STYLES = {"up": "green", "down": "red"}
# Narrower terminals have no room for the bars of pages.
WIDTH_WITH_BARS = 72
# Lines outside the rows of the table on a terminal of 80 columns: headline, problem, table header, legend.
FIXED_LINES = 12


class TopConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem top`."""

    url: str
    is_once: Annotated[bool, Flag("--once", help="print the screen once, and exit")] = False
    api_key: Annotated[str, Flag("--api-key", help="key of a router that requires one")] = ""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem top",
        description="Show what a router's cluster does now: nodes and their pages, latencies.",
        epilog=EXAMPLES,
    )
    url = "http://127.0.0.1:8000"
    parser.add_argument("url", nargs="?", default=url, metavar="URL", help="URL of the router")
    add_flags(parser, TopConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command until Ctrl-C; return the exit status.

    Raises:
        QueryFailed: The query of `--once` failed, or the router refuses the API key.
    """
    args = build_parser().parse_args(argv)
    config = read_flags(TopConfig, args, url=checked_url("URL", args.url))
    with suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_watch(config, Console(highlight=False)))
    return 0


async def _watch(config: TopConfig, console: Console) -> None:
    """Draw until Ctrl-C, or once. While the router does not answer, keep its last state and retry."""
    overview: Overview | None = None
    problem = since = ""
    is_live = console.is_terminal and not config.is_once
    live = Live(Text(f"querying {config.url} …"), console=console, screen=True, auto_refresh=False)
    async with session_with(config.api_key) as session:
        with live if is_live else nullcontext():
            while True:
                try:
                    overview, problem, since = await _fetch(session, config.url), "", ""
                except QueryFailed as error:
                    if config.is_once or isinstance(error, KeyRefused):
                        raise
                    since = since or time.strftime("%H:%M:%S")
                    problem = f"{error.message} (since {since}; retrying)"
                num_lines = console.height if is_live else None
                screen = (
                    picture(overview, console.width, num_lines, problem)
                    if overview
                    else Text(problem)
                )
                live.update(screen, refresh=True) if is_live else console.print(screen)
                if config.is_once:
                    return
                await asyncio.sleep(INTERVAL_S)


async def _fetch(session: aiohttp.ClientSession, url: str) -> Overview:
    """Return the router's overview.

    Raises:
        QueryFailed: The router does not answer, rejects the query, or is of a different release.
    """
    try:
        return msgspec.json.decode(
            await query(session, url, "/overview", "router", None), type=Overview
        )
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise QueryFailed(f"{url} does not answer as a router of this release: {error}") from error


def picture(
    overview: Overview, width: int, num_lines: int | None = None, problem: str = ""
) -> RenderableType:
    """Return the screen.

    Args:
        width: The width in characters.
        num_lines: The height in lines; None: all nodes.
        problem: The reason that the overview is outdated; empty if it is current.
    """
    nodes = overview.nodes
    if num_lines is not None:
        nodes = nodes[: max(6, num_lines - FIXED_LINES)]
    num_hidden = len(overview.nodes) - len(nodes)
    more = f", and {num_hidden} more" if num_hidden else ""
    table = Table(title=f"\nnodes{more}", title_justify="left", title_style="bold", box=None)
    table.pad_edge = False
    bar_width = max(8, min(30, width // 6)) if width >= WIDTH_WITH_BARS else 0
    for name in ("role", "node", "state", *(["pages"] if bar_width else [])):
        # On a narrow terminal rich shortens the states, never a number.
        table.add_column(name, no_wrap=name != "state", header_style="bright_black")
    for name in ("run", "wait", "tok/s", "KV"):
        table.add_column(name, justify="right", no_wrap=True, header_style="bright_black")
    for node in nodes:
        # Rich parses the markup of a string, but not of a Text.
        table.add_row(
            *(
                Text(cell) if isinstance(cell, str) else cell
                for cell in _row(node, width, bar_width)
            )
        )
    legend = [Text(f"{char} {state}", style=style) for state, char, style in PAGE_STATES]
    return Group(*_headline(overview, problem), table, Columns(legend, padding=(0, 2)))


def _headline(overview: Overview, problem: str) -> Iterator[RenderableType]:
    if problem:
        yield Text(plain(problem), style="bold red")
    times, rates, totals = overview.latencies, overview.rates, overview.totals
    clock = time.strftime("%H:%M:%S", time.localtime(overview.now_unix_s))
    yield Text.assemble(
        ("● ", "green" if overview.is_serving else "red"),
        ("Tandem ", "bold"),
        (f"{plain(', '.join([overview.model, *overview.other_models]))}  ", "cyan"),
        f"{plain(overview.detail)}  {clock}",
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


def _row(node: NodeView, width: int, bar_width: int) -> Sequence[str | Text]:
    rates, is_prefill = node.rates, node.role == "prefill"
    moved = rates.pushed_bytes if is_prefill else rates.received_bytes
    reason = f": {plain(node.reason)}" if node.reason and node.state == "down" else ""
    style = STYLES.get(node.state, "yellow")
    state = Text(f"{node.state}{reason}", style=style, no_wrap=True, overflow="ellipsis")
    name = Text(plain(node.id))
    name.truncate(width // 3, overflow="ellipsis")
    for tier in node.load.tiers:
        if tier.state != "up":
            words = f", {plain(tier.name)} {plain(tier.state)}".replace("_", " ")
            state.append(words, style="yellow")
    return [
        node.role or "?",
        name,
        state,
        *([page_bar(node, bar_width)] if bar_width else []),
        number(node.load.num_running),
        number(node.load.num_waiting),
        number(rates.prompt_tokens if is_prefill else rates.generated_tokens),
        f"{number(moved)}B/s",
    ]


def page_bar(node: NodeView, width: int) -> Text:
    """Return a bar of a node's pages by state. Each state that has pages gets at least one character, if one is left."""
    load = node.load
    if not load.num_pages or node.state == "down":
        return Text("·" * width, style="bright_black")
    bar, left = Text(), width
    for state, char, style in PAGE_STATES:
        count = getattr(load, f"pages_{state}")
        share = max(1, round(width * count / load.num_pages)) if count else 0
        num_chars = left if state == "free" else min(share, left)
        bar.append(char * num_chars, style=style)
        left -= num_chars
    return bar


def seconds(value: float | None) -> str:
    """Format a time: 1.50 s, 12.3 ms."""
    if value is None:
        return "-"
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
