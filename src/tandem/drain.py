"""`tandem drain`: stops a node from accepting requests, and waits until the node is empty.

It imports no node code, so it runs on any machine that reaches the node over HTTP.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec

from tandem.asking import Unanswered, ask, session_with
from tandem.wire.command_line import Parser
from tandem.wire.errors import TandemError
from tandem.wire.hosts import checked_url
from tandem.wire.keys import operator_key
from tandem.wire.options import Flag, add_flags, read_flags

ASK_INTERVAL_S = 0.25
# Wait after the deadline: a handed-over request leaves the node once none of its pages can be written.
GRACE_S = 15.0

EXAMPLES = """\
examples:
  tandem drain http://10.0.0.5:7001                 finish what runs there, in the node's --drain-timeout-s
  tandem drain http://10.0.0.5:7001 --timeout 0     hand everything over to other nodes now
  tandem drain http://10.0.0.5:7001 --cancel        take requests again

A drained node stays up and idle. End it, turn it with POST /role, or have it serve again. Routers go on with
what it hands over: their clients notice nothing.

More: tandem docs operations
"""


class DrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem drain`."""

    url: str
    timeout_s: Annotated[
        float | None,
        Flag(
            "--timeout",
            metavar="SECONDS",
            ge=0,
            help="how long running requests may take to finish before they are handed over to other nodes; "
            "0 hands over at once (default: the node's own --drain-timeout-s)",
        ),
    ] = None
    is_cancel: Annotated[
        bool, Flag("--cancel", help="end a drain: the node takes requests again")
    ] = False
    api_key: Annotated[
        str,
        Flag(
            "--api-key",
            help="the operator key, as `tandem operator-key` prints it (default: derived from TANDEM_CLUSTER_KEY)",
        ),
    ] = ""


class DrainStatus(msgspec.Struct, frozen=True):
    """The node's report on its drain."""

    state: str
    detail: str
    num_left: int
    remaining_s: float | None = None


class DrainFailed(TandemError, code="drain_failed"):
    """The node cannot be asked, rejects the order, or is not empty in time."""

    topic = "operations#draining"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem drain",
        environment={},  # TANDEM_API_KEY is a client's key; this command requires the operator key
        description="Have a node take nothing new, wait for what it has, and say when it is empty.",
        epilog=EXAMPLES,
    )
    parser.add_argument("url", metavar="URL", help="of the node, such as http://10.0.0.5:7001")
    add_flags(parser, DrainConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status.

    Raises:
        DrainFailed: The node is not drained.
    """
    args = build_parser().parse_args(argv)
    config = read_flags(DrainConfig, args, url=checked_url("URL", args.url))
    try:
        asyncio.run(_run(config))
    except KeyboardInterrupt:
        url = config.url
        sys.stderr.write(f"{url} goes on draining; `tandem drain {url} --cancel` ends that\n")
        return 130
    return 0


async def _run(config: DrainConfig) -> None:
    key = config.api_key or operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
    async with session_with(key) as session:
        if config.is_cancel:
            status = await _ask(session, config.url, {"cancel": True})
            sys.stdout.write(f"{config.url} is {status.detail}\n")
            return
        order = {} if config.timeout_s is None else {"timeout_s": config.timeout_s}
        await _watch(session, config.url, await _ask(session, config.url, order))


async def _watch(session: aiohttp.ClientSession, url: str, status: DrainStatus) -> None:
    """Print the number of remaining requests until the node is drained."""
    loop, shown = asyncio.get_running_loop(), -1
    give_up_at = loop.time() + (status.remaining_s or 0.0) + GRACE_S
    while status.state != "drained":
        if status.state not in ("draining", "leaving"):
            raise DrainFailed(f"the drain of {url} was ended: it is {status.detail}")
        if loop.time() > give_up_at:
            raise DrainFailed(
                f"{url} still has {status.num_left} requests {GRACE_S:g} s after its deadline: its log says "
                "what they wait for"
            )
        if status.num_left != shown:
            shown = status.num_left
            left = "1 request" if shown == 1 else f"{shown} requests"
            within = f"{status.remaining_s or 0:.0f} s until the rest is handed over"
            sys.stdout.write(f"{url} is draining: {left} left, {within}\n")
            sys.stdout.flush()
        await asyncio.sleep(ASK_INTERVAL_S)
        try:
            status = await _ask(session, url)
        except DrainFailed:
            if status.state != "leaving":
                raise
            sys.stdout.write(f"{url} has ended, as it was told to: nothing runs on it\n")
            return
    sys.stdout.write(f"{url} is drained: nothing runs on it\n")


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None
) -> DrainStatus:
    """Query the node's drain status, or post `body` to change it."""
    try:
        data = await ask(session, url, "/drain", "node", body)
        return msgspec.json.decode(data, type=DrainStatus)
    except Unanswered as error:
        raise DrainFailed(error.message) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DrainFailed(f"{url} does not answer as a node: {error}") from error
