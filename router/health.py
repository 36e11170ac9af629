"""Whether the cluster can serve, and what is missing, in a sentence an operator can act on. Pure."""

from collections.abc import Sequence

from tandem.frontend.backend import Health
from tandem.router.policy import ClusterSnapshot, NodeSnapshot
from tandem.wire.errors import LayoutMismatch


def explain(snapshot: ClusterSnapshot, fingerprint: str | None) -> Health:
    """Tell the state of a cluster.

    Args:
        fingerprint: Of the model that a pair can serve now; None when no pair can.
    """
    if fingerprint is None:
        return Health(is_serving=False, detail="; ".join(_missing(snapshot)) + "; retrying")
    counts = [
        f"{sum(_is_used(node, fingerprint) for node in nodes)} of {len(nodes)} {role} nodes"
        for role, nodes in (("prefill", snapshot.prefills), ("decode", snapshot.decodes))
    ]
    unused = [
        f"{node.role} {node.url} {_why_unused(node)}"
        for node in (*snapshot.prefills, *snapshot.decodes)
        if node.is_aside or not _is_used(node, fingerprint)
    ]
    return Health(is_serving=True, detail="; ".join([f"{' and '.join(counts)} serve", *unused]))


def _is_used(node: NodeSnapshot, fingerprint: str) -> bool:
    return node.is_up and node.fingerprint == fingerprint


def _why_unused(node: NodeSnapshot) -> str:
    if not node.is_up:
        return node.reason
    if node.is_aside:
        return "is put aside: it failed several requests in a row"
    return f"serves another model: {node.fingerprint}"


def _missing(snapshot: ClusterSnapshot) -> list[str]:
    """Return what keeps every pair from serving: roles without a node, or models that differ."""
    roles = (("prefill", snapshot.prefills), ("decode", snapshot.decodes))
    absent = [
        f"no {role} node reachable: " + ", ".join(f"{node.url} {node.reason}" for node in nodes)
        if nodes
        else f"no {role} node is known"
        for role, nodes in roles
        if not any(node.is_up for node in nodes)
    ]
    if absent:
        return absent
    return [LayoutMismatch(_models(snapshot.prefills), _models(snapshot.decodes)).message]


def _models(nodes: Sequence[NodeSnapshot]) -> str:
    return ", ".join(sorted({node.fingerprint for node in nodes if node.is_up}))
