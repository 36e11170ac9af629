"""The nodes as admission and pairing see them: data without connections or clocks."""

from collections.abc import Iterable, Mapping

import msgspec

from tandem.router.nodes.prefixes import (
    NOTHING_CACHED,
    CachedPrefixes,
    CachedTier,
    PrefixIndex,
)
from tandem.wire.messages import NodeLoad

# Breaks ties between nodes with equal token counts: fewer requests are less work. A thousand count as one token.
_REQUEST_TOKENS = 0.001


class RosterEntry(msgspec.Struct, eq=False):
    """One node as admission and pairing see it. Its `Node` updates it in place.

    Attributes:
        is_aside: Put aside after several failed requests in a row: used only if there is no other node.
        fingerprint: Fingerprint of its model; empty until the node is reached.
        reason: Why it is not up, for operators.
        load: Its last load report, up to half a second old.
        in_flight_requests: Requests of this edge worker in flight at the node.
        in_flight_tokens: Prompt tokens of these requests.
        fresh_tokens: Prompt tokens sent to it since `load` was reported; for a prefill node, only uncached tokens.
        zone: Zone name; KV moves faster within a zone.
        takes_prompts: Whether a decode node can compute prompts itself.
        backlog_tokens: Prompt tokens that wait to be computed on a decode node.
        prefixes: Its cached prefixes. The object changes as the node reports more.
        tiers: Tiers behind its cache that are worth reading from now, cheapest first. Their contents change too.
        busy_tokens, room_tokens: Results of these functions at the last `weigh`.
    """

    url: str
    role: str
    is_up: bool = False
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
    # Computed once per change: a choice compares hundreds of nodes, and few of them have changed.
    busy_tokens: float = 0.0
    room_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.weigh()

    def weigh(self) -> None:
        """Compute its work and its room from the other fields."""
        self.busy_tokens, self.room_tokens = busy_tokens(self), room_tokens(self)


def busy_tokens(node: RosterEntry) -> float:
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


def room_tokens(node: RosterEntry) -> float:
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
        zones, busy_tokens, room_tokens: Columns of `RosterEntry`.
        indexes: Indexes that hold the nodes' cached prefixes.
        tiered: Positions of nodes with tiers.
    """

    def __init__(self, nodes: Iterable[RosterEntry]) -> None:
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

    def put(self, node: RosterEntry) -> None:
        """Copy a changed node into the columns, if it is one of the candidates."""
        position = self._positions.get(node.url)
        if position is None:
            return
        self.zones[position] = node.zone
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


class ClusterState(msgspec.Struct, frozen=True, eq=False):
    """All nodes, by role. Their entries change in place; the roster makes a new state when its version increases.

    Attributes:
        candidates: Results of `in_use`. The roster keeps them up to date.
        version: The roster's version.
        stands_in: Whether decode nodes replace the prefill nodes. Each then serves requests alone.
    """

    prefills: tuple[RosterEntry, ...]
    decodes: tuple[RosterEntry, ...]
    candidates: dict[tuple[str, str, str], Candidates] = {}
    version: int = 0
    stands_in: bool = False

    def up(self, role: str) -> list[RosterEntry]:
        """Return the nodes that can serve as this role."""
        nodes = self.prefills if role == "prefill" else self.decodes
        return [node for node in nodes if node.is_up and (node.takes_prompts or not self.stands_in)]

    def in_use(self, role: str, fingerprint: str, adapter: str = "") -> Candidates:
        """Return the nodes that serve a model or an adapter of it; nodes put aside only if no other node is up."""
        key = role, fingerprint, adapter
        if key not in self.candidates:
            up = [node for node in self.up(role) if node.fingerprint == fingerprint]
            able = [node for node in up if node.load.has_adapter(adapter)]
            if adapter and len(able) == len(up):
                self.candidates[key] = self.in_use(role, fingerprint)
            else:
                chosen = [node for node in able if not node.is_aside] or able
                self.candidates[key] = Candidates(chosen)
        return self.candidates[key]


def usable_fingerprint(state: ClusterState, preferred: str = "") -> str | None:
    """Return the fingerprint of the model that a pair can serve now, or None.

    The preferred model is kept while a pair can serve it, so that the cluster does not change its model when one
    node is down. Otherwise it is the model of the first prefill node that has a partner.
    """
    decodes = {node.fingerprint for node in state.up("decode")}
    served = [node.fingerprint for node in state.up("prefill") if node.fingerprint in decodes]
    if preferred in served:
        return preferred
    return served[0] if served else None


def with_stand_ins(state: ClusterState, threshold: int) -> ClusterState:
    """Return the nodes with decode nodes in place of the prefill nodes, if no prefill node is up.

    Use the result at once: the roster does not keep its candidates up to date.
    A prefill node that serves a different model also prevents the replacement, because a mismatch of models must be
    reported, not hidden.

    Args:
        threshold: The threshold of `stays_on_decode`; 0 disables the replacement.
    """
    if not threshold or any(node.is_up for node in state.prefills):
        return state
    able = tuple(node for node in state.decodes if node.is_up and node.takes_prompts)
    # The other decode nodes stay, because their running requests count.
    return ClusterState(able, state.decodes, stands_in=True) if able else state
