"""Whether nodes are well, and which prefill can hand off to which decode. Pure."""

import itertools
import re
from collections.abc import Iterator, Sequence

from tandem.doctor.nodes import NodeAnswer
from tandem.doctor.report import Finding
from tandem.wire.node_info import NodeInfo

# As `tandem.engine.model` makes it: kind, layers, type of the weights, digest.
FINGERPRINT = re.compile(
    r"(?P<kind>.+)-(?P<layers>\d+)layers-(?P<dtype>\w+)-(?P<digest>[0-9a-f]{16})"
)


def check_nodes(answers: Sequence[NodeAnswer]) -> list[Finding]:
    """Return a finding for each node, then one for each prefill with each decode."""
    findings = [_node(answer) for answer in answers]
    known = [(answer.url, answer.info) for answer in answers if answer.info is not None]
    prefills = [each for each in known if each[1].role == "prefill"]
    decodes = [each for each in known if each[1].role == "decode"]
    findings += [_pair(prefill, decode) for prefill, decode in itertools.product(prefills, decodes)]
    return findings


def _node(answer: NodeAnswer) -> Finding:
    info = answer.info
    if info is None:
        return Finding(
            area="nodes",
            name=answer.url,
            status="failed",
            found=answer.problem,
            advice="is the node running and done with loading, its port open, and the URL not the router's?",
        )
    problems = [
        f"{what} {port} cannot be reached from here ({why})"
        for what, port, why in answer.unreachable
    ]
    is_healthy = answer.health == 200 and info.is_healthy
    advice = []
    if not is_healthy:
        problems.append(
            f"/health answers {answer.health}" if answer.health else "/health does not answer"
        )
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
    return Finding(
        area="pairs",
        name=f"{prefill[0]} to {decode[0]}",
        status="failed" if reasons else "warning" if warnings else "ok",
        found="cannot pair"
        if reasons
        else "can pair" + (f" by {', '.join(common)}" if common else ""),
        advice="; ".join(reasons + warnings),
    )


def _reasons(prefill: NodeInfo, decode: NodeInfo) -> Iterator[str]:
    """Yield why the two cannot pair."""
    if prefill.model.fingerprint != decode.model.fingerprint:
        yield _difference(prefill.model.fingerprint, decode.model.fingerprint)
    told = prefill.transports and decode.transports
    if told and not set(prefill.transports) & set(decode.transports):
        yield (
            f"no transport in common: prefill has {', '.join(prefill.transports)} and decode "
            f"{', '.join(decode.transports)}; give both the same --transfer-backend"
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


def _difference(prefill: str, decode: str) -> str:
    """Say in words how two fingerprints differ."""
    ours, theirs = FINGERPRINT.fullmatch(prefill), FINGERPRINT.fullmatch(decode)
    if ours is None or theirs is None:
        return f"different models: {prefill} and {decode}"
    for group, advice in (
        ("kind", "different models ({} and {}): give both the same --model"),
        ("layers", "different models ({} and {} layers): give both the same --model"),
        ("dtype", "weights of different types ({} and {}): give both the same --dtype"),
    ):
        values = ours[group], theirs[group]
        if values[0] != values[1]:
            return advice.format(*values)
    return (
        "models of the same shape with other weights, configuration or type of KV: compare the "
        "checkpoints, --kv-cache-dtype, --load-format and --random-seed"
    )
