"""`tandem top`: polls a router's overview, and draws it."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Annotated

import aiohttp
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tandem.asking import Unanswered, ask, plain, session_with
from tandem.router.overview import Overview
from tandem.top.picture import picture
from tandem.wire.command_line import Parser
from tandem.wire.errors import TandemError
from tandem.wire.hosts import checked_url
from tandem.wire.options import Flag, add_flags, read_flags

EXAMPLES = """\
examples:
  tandem top                                   the router of this machine, at port 8000
  tandem top http://10.0.0.2:8000              another one
  tandem top http://10.0.0.2:8000 --once       one picture, for a report or a file
  tandem top --once --json | jq .nodes         the same as data, as GET /overview returns it

Ctrl-C ends it. A browser shows the same and more at the router's own URL.

More: tandem docs dashboard
"""


class RouterAway(TandemError, code="router_away"):
    """The router does not answer, or not as one."""


class KeyRefused(RouterAway, code="key_refused"):
    """It wants another API key: asking again does not help."""


class TopConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem top`."""

    url: str
    is_once: Annotated[bool, Flag("--once", help="print one picture, and end")] = False
    is_json: Annotated[bool, Flag("--json", help="print the state itself, a line each time")] = (
        False
    )
    interval_s: Annotated[
        float,
        # The router refreshes its overview four times a second.
        Flag("--interval", metavar="SECONDS", ge=0.1, help="time between two pictures"),
    ] = 1.0
    api_key: Annotated[str, Flag("--api-key", help="for a router that asks for one")] = ""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem top",
        description="Show what a router's cluster does now: nodes and their pages, pairs, latencies.",
        epilog=EXAMPLES,
    )
    url = "http://127.0.0.1:8000"
    parser.add_argument("url", nargs="?", default=url, metavar="URL", help="of the router")
    add_flags(parser, TopConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command until Ctrl-C; return the exit status.

    Raises:
        RouterAway: A `--once` query failed, or the router rejects the API key.
    """
    args = build_parser().parse_args(argv)
    config = read_flags(TopConfig, args, url=checked_url("URL", args.url))
    with suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_watch(config, Console(highlight=False)))
    return 0


async def _watch(config: TopConfig, console: Console) -> None:
    """Draw until Ctrl-C, or once. While the router does not answer, keep its last state and retry."""
    shown: Overview | None = None
    problem = since = ""
    # Without a terminal, each picture is printed after the previous picture.
    is_live = console.is_terminal and not config.is_json and not config.is_once
    live = Live(Text(f"asking {config.url} …"), console=console, screen=True, auto_refresh=False)
    async with session_with(config.api_key) as session:
        with live if is_live else nullcontext():
            while True:
                try:
                    body = await _fetch(session, config.url)
                    shown, problem, since = _decoded(config.url, body), "", ""
                    if config.is_json:
                        sys.stdout.write(body.decode() + "\n")
                        sys.stdout.flush()
                except RouterAway as error:
                    if config.is_once or isinstance(error, KeyRefused):
                        raise
                    since = since or time.strftime("%H:%M:%S")
                    problem = f"{error.message} (since {since}; trying again)"
                    if config.is_json:
                        sys.stderr.write(f"tandem top: {problem}\n")
                if not config.is_json:
                    num_lines = console.height if is_live else None
                    drawn = (
                        picture(shown, console.width, num_lines, problem)
                        if shown
                        else Text(problem)
                    )
                    live.update(drawn, refresh=True) if is_live else console.print(drawn)
                if config.is_once:
                    return
                await asyncio.sleep(config.interval_s)


async def _fetch(session: aiohttp.ClientSession, url: str) -> bytes:
    """Return the router's overview as JSON.

    Raises:
        RouterAway: The router does not answer, or rejects the query.
    """
    try:
        return await ask(session, url, "/overview", "router", None)
    except Unanswered as error:
        if error.answered == 401:
            raise KeyRefused(
                f"{url} asks for an API key: give one that it takes with --api-key"
            ) from error
        if error.answered == 404:
            raise RouterAway(
                f"{url} has no /overview: is it a router, and no node, and of this release?"
            ) from error
        raise RouterAway(error.message) from error


def _decoded(url: str, body: bytes) -> Overview:
    try:
        return msgspec.json.decode(body, type=Overview)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        sentence = f"{url} does not answer as a router of this release: {error}"
        raise RouterAway(plain(sentence)) from error
