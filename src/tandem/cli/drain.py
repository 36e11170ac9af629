"""`tandem drain`: stops a node from accepting requests and waits until it is empty.

It imports no node code, so it runs on any machine that reaches the node over HTTP.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec

from tandem.settings.flags import Flag, add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.tools.query import QueryFailed, query, session_with
from tandem.wire.errors import TandemError
from tandem.wire.hosts import checked_url
from tandem.wire.keys import operator_key

POLL_INTERVAL_S = 0.25
# Extra wait after the deadline. A request that is handed over stays on the node until no write to its pages can follow.
GRACE_S = 15.0

EXAMPLES = """\
examples:
  tandem drain http://10.0.0.5:7001                 finish running requests within the node's --drain-timeout-s
  tandem drain http://10.0.0.5:7001 --timeout-s 0   hand all requests over to other nodes now
  tandem drain http://10.0.0.5:7001 --cancel        accept requests again

A drained node stays up and idle. Stop it, change its role with POST /role, or resume it with --cancel. Routers continue
handed-over requests on other nodes, without an error at the client.

More: docs/operations.md
"""


class DrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem drain`."""

    url: str
    timeout_s: Annotated[
        float | None,
        Flag(
            "--timeout-s",
            "--timeout",
            metavar="SECONDS",
            ge=0,
            help="time for running requests to finish before they are handed over to other nodes; "
            "0: hand over at once (default: the node's --drain-timeout-s)",
        ),
    ] = None
    is_cancel: Annotated[
        bool, Flag("--cancel", help="end a drain: the node accepts requests again")
    ] = False
    api_key: Annotated[
        str,
        Flag(
            "--api-key",
            help="the operator key, as `tandem operator-key` prints it (default: derived from TANDEM_CLUSTER_KEY)",
        ),
    ] = ""


class DrainStatus(msgspec.Struct, frozen=True):
    """Drain status reported by the node."""

    state: str
    detail: str
    num_left: int
    remaining_s: float | None = None


class DrainFailed(TandemError, code="drain_failed"):
    """The node cannot be reached, rejects the request, or is not empty in time."""

    topic = "docs/operations.md#draining"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem drain",
        environment={},  # TANDEM_API_KEY is a client's key; this command needs the operator key
        description="Stop a node from accepting requests, and wait until it is empty.",
        epilog=EXAMPLES,
    )
    parser.add_argument("url", metavar="URL", help="URL of the node, such as http://10.0.0.5:7001")
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
        sys.stderr.write(f"{url} is still draining; to stop that: tandem drain {url} --cancel\n")
        return 130
    return 0


async def _run(config: DrainConfig) -> None:
    key = config.api_key or operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
    async with session_with(key) as session:
        if config.is_cancel:
            status = await _query(session, config.url, {"cancel": True})
            sys.stdout.write(f"{config.url} is {status.detail}\n")
            return
        body = {} if config.timeout_s is None else {"timeout_s": config.timeout_s}
        await _watch(session, config.url, await _query(session, config.url, body))


async def _watch(session: aiohttp.ClientSession, url: str, status: DrainStatus) -> None:
    """Print the number of remaining requests until the node is drained."""
    loop, shown = asyncio.get_running_loop(), -1
    give_up_at = loop.time() + (status.remaining_s or 0.0) + GRACE_S
    while status.state != "drained":
        if status.state not in ("draining", "leaving"):
            raise DrainFailed(f"the drain of {url} was cancelled: the node is {status.detail}")
        if loop.time() > give_up_at:
            raise DrainFailed(
                f"{url} still has {status.num_left} requests {GRACE_S:g} s after its deadline: see its log for "
                "what they wait for"
            )
        if status.num_left != shown:
            shown = status.num_left
            left = "1 request" if shown == 1 else f"{shown} requests"
            within = f"{status.remaining_s or 0:.0f} s until the rest is handed over"
            sys.stdout.write(f"{url} is draining: {left} left, {within}\n")
            sys.stdout.flush()
        await asyncio.sleep(POLL_INTERVAL_S)
        try:
            status = await _query(session, url)
        except DrainFailed:
            if status.state != "leaving":
                raise
            sys.stdout.write(f"{url} has exited after its drain: nothing runs on it\n")
            return
    sys.stdout.write(f"{url} is drained: nothing runs on it\n")


async def _query(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None
) -> DrainStatus:
    """Query the node's drain status, or post `body` to change it."""
    try:
        data = await query(session, url, "/drain", "node", body)
        return msgspec.json.decode(data, type=DrainStatus)
    except QueryFailed as error:
        raise DrainFailed(error.message) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DrainFailed(f"{url} does not answer as a node: {error}") from error
