"""`tandem drain`: have a node take nothing new, and wait until nothing is left on it.

Imports nothing of the node: it runs wherever the node's HTTP can be reached.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.hosts import checked_url, reason_of
from tandem.wire.keys import operator_key

ASK_INTERVAL_S = 0.25
ANSWER_TIMEOUT_S = 5.0
# After the deadline: what was handed over is off the node when no page of it can be written any more.
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


class DrainStatus(msgspec.Struct, frozen=True):
    """What the node says of its drain."""

    state: str
    detail: str
    num_left: int
    remaining_s: float | None = None


class DrainFailed(TandemError, code="drain_failed"):
    """The node cannot be asked, refuses, or is not empty in time."""

    topic = "operations#draining"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem drain",
        environment={},  # TANDEM_API_KEY is a client's key, and this command needs the operator's
        description="Have a node take nothing new, wait for what it has, and say when it is empty.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("url", metavar="URL", help="of the node, such as http://10.0.0.5:7001")
    add(
        "--timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long running requests may take to finish before they are handed over to other nodes; "
        "nothing: the node's own --drain-timeout-s",
    )
    add("--cancel", action="store_true", help="end a drain: the node takes requests again")
    add(
        "--api-key",
        default="",
        metavar="KEY",
        help="the operator key, as `tandem operator-key` prints it (default: derived from TANDEM_CLUSTER_KEY)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the node is drained, or serves again, and 1 when it is not."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        url = checked_url("URL", args.url)
    except ConfigInvalid as error:
        parser.error(error.message)
    if args.timeout is not None and args.timeout < 0:
        parser.error("--timeout: give 0, which hands over at once, or more")
    key = args.api_key or operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
    try:
        asyncio.run(_run(url, key, args.timeout, is_cancel=args.cancel))
    except DrainFailed as error:
        sys.stderr.write(f"tandem drain: error: {error.for_operators}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{url} goes on draining; `tandem drain {url} --cancel` ends that\n")
        return 130
    return 0


async def _run(url: str, key: str, timeout_s: float | None, *, is_cancel: bool) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        if is_cancel:
            status = await _ask(session, url, {"cancel": True})
            sys.stdout.write(f"{url} is {status.detail}\n")
            return
        status = await _ask(session, url, {} if timeout_s is None else {"timeout_s": timeout_s})
        await _watch(session, url, status)


async def _watch(session: aiohttp.ClientSession, url: str, status: DrainStatus) -> None:
    """Show how many requests are left until none is."""
    console, shown = Console(highlight=False), None
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + (status.remaining_s or 0.0) + GRACE_S
    with console.status("") as line:
        while status.state != "drained":
            if status.state not in ("draining", "leaving"):
                raise DrainFailed(f"the drain of {url} was ended: it is {status.detail}")
            if loop.time() > give_up_at:
                raise DrainFailed(
                    f"{url} still has {status.num_left} requests {GRACE_S:g} s after its deadline: its log says "
                    "what they wait for"
                )
            told = f"{url} is draining: {_requests(status.num_left)} left"
            line.update(f"{told}, {status.remaining_s or 0:.0f} s until the rest is handed over")
            if told != shown and not console.is_terminal:
                console.print(told, soft_wrap=True)
            shown = told
            await asyncio.sleep(ASK_INTERVAL_S)
            status = await _ask(session, url)
    console.print(f"{url} is drained: nothing runs on it", soft_wrap=True)


def _requests(num: int) -> str:
    return "1 request" if num == 1 else f"{num} requests"


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None
) -> DrainStatus:
    """Ask the node how far it is, or give it an order.

    Raises:
        DrainFailed: It cannot be reached, or refuses.
    """
    try:
        method = "GET" if body is None else "POST"
        async with session.request(method, f"{url}/drain", json=body) as response:
            data = await response.read()
            if response.status != 200:
                raise DrainFailed(f"{url} refuses: {_refusal(response.status, data)}")
            return msgspec.json.decode(data, type=DrainStatus)
    except aiohttp.ClientConnectorError as error:
        raise DrainFailed(
            f"{url} cannot be reached ({reason_of(error.os_error)}): is it a node's URL, and the node up?"
        ) from error
    except TimeoutError as error:
        raise DrainFailed(f"{url} does not answer within {ANSWER_TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DrainFailed(f"{url} does not answer as a node: {error}") from error


def _refusal(status: int, body: bytes) -> str:
    """Return the node's own sentence where it gave one."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return f"it answers with status {status}"
