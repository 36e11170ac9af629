"""Asks running nodes what they are, and whether their ports can be reached from here. Judges nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from tandem.router.config import host_of
from tandem.router.node_http import INFO_TIMEOUT_S, NodeUnusable, fetch_info
from tandem.wire.node_info import NodeInfo


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What one URL gave.

    Attributes:
        problem: Why there is no `info`.
        health: Status of `GET /health`; 0 where there was no answer.
        unreachable: Ports of the node that nobody can connect to from here, by what they are for.
    """

    url: str
    info: NodeInfo | None = None
    problem: str = ""
    health: int = 0
    unreachable: tuple[tuple[str, int, str], ...] = ()


async def ask(urls: Sequence[str]) -> list[NodeAnswer]:
    """Ask all nodes at once; the answers are in the order of `urls`."""
    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(_ask(session, url) for url in urls)))


async def _ask(session: aiohttp.ClientSession, url: str) -> NodeAnswer:
    try:
        info = await fetch_info(session, url)
    except NodeUnusable as error:
        return NodeAnswer(url, problem=str(error))
    ports = [("engine port", info.engine_port)]
    if info.bootstrap_port is not None:
        ports.append(("bootstrap port", info.bootstrap_port))
    problems = [(what, port, await _connect(host_of(url), port)) for what, port in ports]
    return NodeAnswer(
        url,
        info,
        health=await _health(session, url),
        unreachable=tuple(each for each in problems if each[2]),
    )


async def _health(session: aiohttp.ClientSession, url: str) -> int:
    timeout = aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


async def _connect(host: str, port: int) -> str:
    """Connect and hang up; return what went wrong, empty where nothing did."""
    try:
        async with asyncio.timeout(INFO_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {INFO_TIMEOUT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""
