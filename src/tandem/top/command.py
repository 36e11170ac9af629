"""`tandem top`: asks a router for its overview again and again, and draws it."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import aiohttp
import msgspec
from rich.console import Console
from rich.live import Live

from tandem.router.overview import Overview
from tandem.top.flags import build_parser
from tandem.top.frame import Look, frame
from tandem.top.words import plain
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.hosts import checked_url, reason_of

ANSWER_TIMEOUT_S = 5.0


class RouterAway(TandemError):
    """The router does not answer, or not as one."""

    code = "router_away"


class KeyRefused(RouterAway):
    """It wants another API key: asking again does not help."""

    code = "key_refused"


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the user ended it, and 1 when there was nothing to show."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        url = checked_url("URL", args.url)
    except ConfigInvalid as error:
        parser.error(error.message)
    if args.interval < 0.1:
        parser.error(
            "--interval: give 0.1 or more: the router itself looks anew four times a second"
        )
    console = Console(highlight=False)

    def look(problem: str = "") -> Look:
        return Look(
            width=console.width,
            num_lines=console.height if console.is_terminal and not args.once else None,
            slo_ttft_s=args.slo_ttft_ms / 1e3,
            slo_itl_s=args.slo_itl_ms / 1e3,
            url=url,
            problem=problem,
        )

    try:
        if args.once:
            asyncio.run(_once(console, url, args.api_key, look, is_json=args.json))
        else:
            asyncio.run(_watch(console, url, args.api_key, look, args.interval, is_json=args.json))
    except RouterAway as error:
        sys.stderr.write(f"tandem top: error: {plain(error.message)}\n")
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    return 0


Looking = Callable[..., Look]


async def _once(console: Console, url: str, key: str, look: Looking, *, is_json: bool) -> None:
    async with _session(key) as session:
        body = await _fetch(session, url)
    if is_json:
        _write(body)
    else:
        console.print(frame(_decoded(url, body), look()))


async def _watch(
    console: Console, url: str, key: str, look: Looking, interval_s: float, *, is_json: bool
) -> None:
    """Draw until Ctrl-C. A router that is away is waited for, and what it last said stays."""
    last: Overview | None = None
    away_since = 0.0
    # Without a terminal, pictures follow one another.
    is_live = console.is_terminal and not is_json
    live = Live(frame(None, look()), console=console, screen=True, auto_refresh=False)
    async with _session(key) as session:
        with live if is_live else nullcontext():
            while True:
                problem = ""
                try:
                    body = await _fetch(session, url)
                    last, away_since = _decoded(url, body), 0.0
                except KeyRefused:
                    raise
                except RouterAway as error:
                    away_since = away_since or time.time()
                    since = time.strftime("%H:%M:%S", time.localtime(away_since))
                    problem = f"{error.message} (since {since}; trying again)"
                    body = b""
                if is_live:
                    live.update(frame(last, look(problem)), refresh=True)
                elif is_json:
                    _tell(body, problem)
                else:
                    console.print(frame(last, look(problem)), "")
                await asyncio.sleep(interval_s)


def _tell(body: bytes, problem: str) -> None:
    """Write a line of data; a problem goes beside it."""
    if problem:
        sys.stderr.write(f"tandem top: {plain(problem)}\n")
    else:
        _write(body)


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
