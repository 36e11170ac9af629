"""Queries running nodes, and checks which prefill nodes can hand off to which decode nodes."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from tandem.doctor.report import Finding
from tandem.router.config import host_of
from tandem.router.node import NodeUnusable
from tandem.router.node_watch import INFO_TIMEOUT_S, fetch_info
from tandem.wire.hosts import reason_of
from tandem.wire.messages import NodeInfo


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The result of querying one URL.

    Attributes:
        problem: The reason if `info` is missing.
        health: The status of `GET /health`; 0 without an answer.
        unreachable: A message for each port that this machine cannot connect to.
    """

    url: str
    info: NodeInfo | None = None
    problem: str = ""
    health: int = 0
    unreachable: tuple[str, ...] = ()


async def ask(urls: Sequence[str]) -> list[NodeAnswer]:
    """Query all nodes concurrently; return the answers in the order of `urls`."""
    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(_ask(session, url) for url in urls)))


async def _ask(session: aiohttp.ClientSession, url: str) -> NodeAnswer:
    try:
        info = await fetch_info(session, url)
    except NodeUnusable as error:
        return NodeAnswer(url, problem=str(error))
    ports = {"engine port": info.engine_port, "bootstrap port": info.bootstrap_port}
    problems = [
        await _connect(host_of(url), what, port) for what, port in ports.items() if port is not None
    ]
    health = await _health(session, url)
    return NodeAnswer(url, info, health=health, unreachable=tuple(filter(None, problems)))


async def _health(session: aiohttp.ClientSession, url: str) -> int:
    timeout = aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


async def _connect(host: str, what: str, port: int) -> str:
    """Open and close a connection; return the failure, or an empty string."""
    try:
        async with asyncio.timeout(INFO_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        reason = f"no answer within {INFO_TIMEOUT_S:g} s"
    except OSError as error:
        reason = reason_of(error)
    else:
        writer.close()
        return ""
    return f"{what} {port} cannot be reached from here ({reason})"


def check_nodes(answers: Sequence[NodeAnswer]) -> list[Finding]:
    """Return a finding for each node, then one for each pair of a prefill and a decode node."""
    known = [(answer.url, answer.info) for answer in answers if answer.info is not None]
    prefills = [each for each in known if each[1].role == "prefill"]
    decodes = [each for each in known if each[1].role == "decode"]
    return [
        *map(_node, answers),
        *(_pair(prefill, decode) for prefill, decode in itertools.product(prefills, decodes)),
    ]


def _node(answer: NodeAnswer) -> Finding:
    if (info := answer.info) is None:
        return Finding(
            area="nodes",
            name=answer.url,
            status="failed",
            found=answer.problem,
            advice="is the node running and done with loading, its port open, and the URL not the router's?",
        )
    problems, advice = list(answer.unreachable), []
    if answer.health != 200 or not info.is_healthy:
        answers = f"answers {answer.health}" if answer.health else "does not answer"
        problems.append(f"/health {answers}")
        advice.append("look at the node's log")
    if answer.unreachable:
        advice.append("open the ports to routers and nodes, and start the node with --host ADDRESS")
    tp = f", --tp {info.tp_size}" if info.tp_size > 1 else ""
    what = f"{info.role}, {info.model.name}, version {info.version}{tp}"
    return Finding(
        area="nodes",
        name=answer.url,
        status="failed" if problems else "ok",
        found="; ".join([what, *problems]),
        advice="; ".join(advice),
    )


def _pair(prefill: tuple[str, NodeInfo], decode: tuple[str, NodeInfo]) -> Finding:
    reasons = list(_reasons(prefill[1], decode[1]))
    warnings = list(_warnings(prefill[1], decode[1]))
    common = [name for name in decode[1].transports if name in prefill[1].transports]
    can_pair = "can pair" + (f" by {', '.join(common)}" if common else "")
    return Finding(
        area="pairs",
        name=f"{prefill[0]} to {decode[0]}",
        status="failed" if reasons else "warning" if warnings else "ok",
        found="cannot pair" if reasons else can_pair,
        advice="; ".join(reasons + warnings),
    )


def _reasons(prefill: NodeInfo, decode: NodeInfo) -> Iterator[str]:
    """Yield the reasons that keep the two nodes from pairing."""
    if prefill.model.fingerprint != decode.model.fingerprint:
        yield (
            f"different models, {prefill.model.fingerprint} and {decode.model.fingerprint}: give both the same "
            "--model, --dtype, --kv-cache-dtype, --load-format and --random-seed"
        )
    ours, theirs = prefill.transports, decode.transports
    if ours and theirs and not set(ours) & set(theirs):
        yield (
            f"no transport in common: prefill has {', '.join(ours)} and decode {', '.join(theirs)}; give both "
            "the same --transfer-backend"
        )


def _warnings(prefill: NodeInfo, decode: NodeInfo) -> Iterator[str]:
    if prefill.version != decode.version:
        yield (
            f"versions {prefill.version} and {decode.version}: one release apart is safe, more is not"
        )
    if prefill.model.name != decode.model.name:
        yield (
            f"clients know them as {prefill.model.name} and {decode.model.name}: give both the same "
            "--served-model-name"
        )
