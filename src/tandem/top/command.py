"""`tandem top`: asks a router for its overview again and again, and draws it."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

import aiohttp
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tandem.router.overview import Overview
from tandem.top.picture import picture, plain
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.hosts import checked_url, reason_of

EXAMPLES = """\
examples:
  tandem top                                   the router of this machine, at port 8000
  tandem top http://10.0.0.2:8000              another one
  tandem top http://10.0.0.2:8000 --once       one picture, for a report or a file
  tandem top --once --json | jq .nodes         the same as data, as GET /overview returns it

Ctrl-C ends it. A browser shows the same and more at the router's own URL.

More: tandem docs dashboard
"""
ANSWER_TIMEOUT_S = 5.0


class RouterAway(TandemError, code="router_away"):
    """The router does not answer, or not as one."""


class KeyRefused(RouterAway, code="key_refused"):
    """It wants another API key: asking again does not help."""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem top",
        description="Show what a router's cluster does now: nodes and their pages, pairs, latencies, recent "
        "requests, events.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the router")
    add("--once", action="store_true", help="print one picture, and end")
    add("--json", action="store_true", help="print the state itself, a line each time")
    add("--interval", type=float, default=1.0, metavar="SECONDS", help="between two pictures; 1")
    add("--api-key", default="", metavar="KEY", help="for a router that asks for one")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the user ended it, and 1 when there was nothing to show."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        args.url = checked_url("URL", args.url)
    except ConfigInvalid as error:
        parser.error(error.message)
    if args.interval < 0.1:
        parser.error(
            "--interval: give 0.1 or more: the router itself looks anew four times a second"
        )
    try:
        asyncio.run((_once if args.once else _watch)(args, Console(highlight=False)))
    except RouterAway as error:
        sys.stderr.write(f"tandem top: error: {plain(error.message)}\n")
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    return 0


async def _once(args: argparse.Namespace, console: Console) -> None:
    async with _session(args.api_key) as session:
        body = await _fetch(session, args.url)
    if args.json:
        _write(body)
    else:
        console.print(picture(_decoded(args.url, body), console.width))


async def _watch(args: argparse.Namespace, console: Console) -> None:
    """Draw until Ctrl-C. A router that is away is waited for, and its last state stays."""
    shown: Overview | None = None
    away_since = 0.0
    # Without a terminal, pictures follow one another.
    is_live = console.is_terminal and not args.json
    live = Live(Text(f"asking {args.url} …"), console=console, screen=True, auto_refresh=False)
    async with _session(args.api_key) as session:
        with live if is_live else nullcontext():
            while True:
                body, problem = b"", ""
                try:
                    body = await _fetch(session, args.url)
                    shown, away_since = _decoded(args.url, body), 0.0
                except KeyRefused:
                    raise
                except RouterAway as error:
                    away_since = away_since or time.time()
                    since = time.strftime("%H:%M:%S", time.localtime(away_since))
                    problem = plain(f"{error.message} (since {since}; trying again)")
                if args.json and problem:
                    sys.stderr.write(f"tandem top: {problem}\n")
                elif args.json:
                    _write(body)
                elif shown is not None or problem:
                    num_lines = console.height if is_live else None
                    drawn = (
                        Text(problem)
                        if shown is None
                        else picture(shown, console.width, num_lines, problem)
                    )
                    live.update(drawn, refresh=True) if is_live else console.print(drawn, "")
                await asyncio.sleep(args.interval)


def _write(body: bytes) -> None:
    sys.stdout.write(body.decode() + "\n")
    sys.stdout.flush()


def _session(key: str) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    )


async def _fetch(session: aiohttp.ClientSession, url: str) -> bytes:
    """Return the overview as the router wrote it.

    Raises:
        RouterAway: It cannot be had, and why.
    """
    try:
        async with session.get(f"{url}/overview") as response:
            body, status = await response.read(), response.status
    except aiohttp.ClientConnectorError as error:
        raise RouterAway(
            f"{url} cannot be reached ({reason_of(error.os_error)}): is it the router's URL, and the router up?"
        ) from error
    except TimeoutError as error:
        raise RouterAway(f"{url} does not answer within {ANSWER_TIMEOUT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise RouterAway(f"{url} does not answer as a router: {error}") from error
    if status == 401:
        raise KeyRefused(f"{url} asks for an API key: give one that it takes with --api-key")
    if status == 404:
        raise RouterAway(
            f"{url} has no /overview: is it a router, and no node, and of this release?"
        )
    if status != 200:
        raise RouterAway(f"{url} answers with status {status}")
    return body


def _decoded(url: str, body: bytes) -> Overview:
    try:
        return msgspec.json.decode(body, type=Overview)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RouterAway(f"{url} does not answer as a router of this release: {error}") from error
