"""Snapshots of the nodes: immutable values for admission and pairing, without connections or clocks."""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import force_setattr, replace

from tandem.router.nodes.prefixes import (
    NOTHING_CACHED,
    CachedPrefixes,
    CachedTier,
    PrefixIndex,
)
from tandem.wire.messages import NodeLoad

# Breaks ties between nodes with equal token counts: fewer requests are less work. A thousand count as one token.
_REQUEST_TOKENS = 0.001


class NodeSnapshot(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One node at one moment. Several are made for each request, and a struct is made five times as fast as a dataclass.

    Attributes:
        is_aside: Put aside after several failed requests in a row: used only if there is no other node.
        fingerprint: Fingerprint of its model; empty until the node is reached.
        reason: Why it is not up, for operators.
        load: Its last load report, up to half a second old.
        in_flight_requests: Requests of this edge worker in flight at the node.
        in_flight_tokens: Prompt tokens of these requests.
        fresh_tokens: Prompt tokens sent to it since `load` was reported; for a prefill node, only uncached tokens.
        zone: Zone name; KV moves faster within a zone.
        prefixes: Its cached prefixes. The object changes as the node reports more.
        tiers: Tiers behind its cache that are worth reading from now, cheapest first. Their contents change too.
        busy_tokens: Its work; see `busy_tokens`.
        room_tokens: Tokens that fit into its free pages.
        takes_prompts: Whether a decode node can compute prompts itself.
        backlog_tokens: Prompt tokens that wait to be computed on a decode node.
    """

    url: str
    role: str
    is_up: bool
    is_aside: bool = False
    fingerprint: str = ""
    reason: str = ""
    load: NodeLoad = NodeLoad()
    in_flight_requests: int = 0
    in_flight_tokens: int = 0
    fresh_tokens: int = 0
    zone: str = ""
    takes_prompts: bool = False
    backlog_tokens: int = 0
    prefixes: CachedPrefixes = NOTHING_CACHED
    tiers: tuple[CachedTier, ...] = ()
    # Computed once per snapshot: a choice compares hundreds of nodes, and few of them have changed.
    busy_tokens: float = 0.0
    room_tokens: float = 0.0

    def __post_init__(self) -> None:
        force_setattr(self, "busy_tokens", busy_tokens(self))
        force_setattr(self, "room_tokens", room_tokens(self))


def busy_tokens(node: NodeSnapshot) -> float:
    """Return a node's work in tokens: its last load report, and the requests started since.

    On a prefill node these are prompt tokens to compute; on a decode node, the tokens of queued requests and of running
    requests, which every step reads. A report is up to half a second old. The share of this edge worker's requests that
    have ended since is subtracted; else a prompt would not return to the node that has just cached it.
    """
    load = node.load
    num_placed = load.num_running + load.num_transferring
    num_there = num_placed + load.num_waiting
    num_ended = min(num_there, max(0, load.num_own - node.in_flight_requests))
    reported_tokens: float = max(0, load.queued_tokens)
    if load.queued_tokens < 0 or node.role != "prefill":
        placed_tokens = (load.pages_held + load.pages_granted) * load.page_size
        # A waiting request holds no pages yet: count it with the average size.
        reported_tokens += placed_tokens * (1 + load.num_waiting / max(1, num_placed))
    reported_tokens *= 1 - num_ended / max(1, num_there)
    num_requests = node.in_flight_requests + num_there - num_ended
    return node.fresh_tokens + reported_tokens + num_requests * _REQUEST_TOKENS


def room_tokens(node: NodeSnapshot) -> float:
    """Return the tokens that fit into a node's free pages; infinite before its first report."""
    load = node.load
    if not load.num_pages:
        return float("inf")
    return (load.pages_free + load.pages_cached) * load.page_size - node.fresh_tokens


class Candidates:
    """Nodes of one role to choose from, with the compared fields in columns.

    Columns make a choice among hundreds of nodes a few built-in passes. Reading attributes node by node took as long
    as everything else that a router does for a request.

    Attributes:
        nodes: The nodes; all columns have the same order.
        zones, busy_tokens, room_tokens: Columns of `NodeSnapshot`.
        indexes: Indexes that hold the nodes' cached prefixes.
        tiered: Positions of nodes with tiers.
    """

    def __init__(self, nodes: Iterable[NodeSnapshot]) -> None:
        self.nodes = list(nodes)
        self.zones = [node.zone for node in self.nodes]
        self.busy_tokens = [node.busy_tokens for node in self.nodes]
        self.room_tokens = [node.room_tokens for node in self.nodes]
        self.indexes, self.tiered = set[PrefixIndex](), set[int]()
        self._positions = {node.url: position for position, node in enumerate(self.nodes)}
        self._lives: dict[CachedPrefixes, int] = {}
        for node in self.nodes:
            self.put(node)

    def __len__(self) -> int:
        return len(self.nodes)

    def put(self, node: NodeSnapshot) -> None:
        """Replace a node by its new snapshot, if it is one of the candidates."""
        position = self._positions.get(node.url)
        if position is None:
            return
        self.nodes[position], self.zones[position] = node, node.zone
        self.busy_tokens[position], self.room_tokens[position] = node.busy_tokens, node.room_tokens
        if node.prefixes.index is not None:
            self._lives[node.prefixes] = position
            self.indexes.add(node.prefixes.index)
        if node.tiers:
            self.tiered.add(position)
        else:
            self.tiered.discard(position)

    def by_position(self, found: Mapping[CachedPrefixes, int]) -> dict[int, int]:
        """Convert counts by cache to counts by position of the node that has the cache."""
        positions = ((self._lives.get(life), count) for life, count in found.items())
        return {position: count for position, count in positions if position is not None}


class ClusterSnapshot(msgspec.Struct, frozen=True, eq=False):
    """All nodes at one moment.

    Attributes:
        candidates: Results of `in_use`. The roster passes them on to the next snapshot and keeps them up to date.
        version: The roster's version.
    """

    prefills: tuple[NodeSnapshot, ...]
    decodes: tuple[NodeSnapshot, ...]
    candidates: dict[tuple[str, str, str], Candidates] = {}
    version: int = 0

    def in_use(self, role: str, fingerprint: str, adapter: str = "") -> Candidates:
        """Return the nodes that serve a model or an adapter of it; nodes put aside only if no other node is up."""
        key = role, fingerprint, adapter
        if key not in self.candidates:
            nodes = self.prefills if role == "prefill" else self.decodes
            up = [node for node in nodes if node.is_up and node.fingerprint == fingerprint]
            able = [node for node in up if node.load.has_adapter(adapter)]
            if adapter and len(able) == len(up):
                self.candidates[key] = self.in_use(role, fingerprint)
            else:
                chosen = [node for node in able if not node.is_aside] or able
                self.candidates[key] = Candidates(chosen)
        return self.candidates[key]


def usable_fingerprint(snapshot: ClusterSnapshot, preferred: str = "") -> str | None:
    """Return the fingerprint of the model that a pair can serve now, or None.

    The preferred model is kept while a pair can serve it, so that the cluster does not change its model when one
    node is down. Otherwise it is the model of the first prefill node that has a partner.
    """
    decodes = {node.fingerprint for node in snapshot.decodes if node.is_up}
    prefills = [node.fingerprint for node in snapshot.prefills if node.is_up]
    served = [fingerprint for fingerprint in prefills if fingerprint in decodes]
    if preferred in served:
        return preferred
    return served[0] if served else None


def with_stand_ins(snapshot: ClusterSnapshot, threshold: int) -> ClusterSnapshot:
    """Return a snapshot in which decode nodes replace the prefill nodes, if no prefill node is up.

    If a pair is chosen from it, the pair's decode node serves the request alone. A prefill node that serves a different
    model also prevents the replacement, because a mismatch of models must be reported, not hidden.

    Args:
        threshold: The threshold of `stays_on_decode`; 0 disables the replacement.
    """
    if not threshold or any(node.is_up for node in snapshot.prefills):
        return snapshot
    able = tuple(node for node in snapshot.decodes if node.is_up and node.takes_prompts)
    if not able:
        return snapshot
    # The other decode nodes stay in the snapshot, because their running requests count.
    decodes = tuple(
        replace(node, is_up=False) if node.is_up and not node.takes_prompts else node
        for node in snapshot.decodes
    )
    return ClusterSnapshot(prefills=able, decodes=decodes)
