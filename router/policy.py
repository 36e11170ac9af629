"""Which prefill and which decode node take a request: pure functions of a snapshot.

Holds no connection and no clock: what a policy knows of a node is in its `NodeSnapshot`. A turn
number, one higher with each choice, breaks ties, so that equal nodes are used in rotation.
"""

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from wire.errors import NoNodeAvailable
from wire.messages import NodeLoad


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node at one moment.

    Attributes:
        fingerprint: Of its model; empty while it was never reached.
        reason: Why it is not up, for people.
        load: What it last said of itself, up to half a second old.
        in_flight_requests: Started by this edge worker and not ended.
        in_flight_tokens: Prompt tokens of those.
        takes_prompts: A decode node that can compute prompts by itself.
        backlog_tokens: Of a decode node: prompt tokens that wait to be computed there.
    """

    url: str
    role: str
    is_up: bool
    fingerprint: str = ""
    reason: str = ""
    load: NodeLoad = field(default_factory=NodeLoad)
    in_flight_requests: int = 0
    in_flight_tokens: int = 0
    takes_prompts: bool = False
    backlog_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All nodes at one moment, in the order they were given in."""

    prefills: tuple[NodeSnapshot, ...]
    decodes: tuple[NodeSnapshot, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two nodes of one attempt, by their URLs.

    Attributes:
        prefill: Empty when decode computes the prompt by itself.
    """

    prefill: str
    decode: str

    @property
    def urls(self) -> tuple[str, ...]:
        """The nodes there are."""
        return (self.prefill, self.decode) if self.prefill else (self.decode,)


Policy = Callable[[Sequence[NodeSnapshot], int, random.Random], NodeSnapshot]
"""Picks one of at least one node, given the turn and a source of randomness."""


def load_of(node: NodeSnapshot) -> tuple[float, int]:
    """Return how busy a node is, to be compared: tokens in flight, then requests.

    Own counts are exact but know this edge worker only; the report knows everyone and is late. Their
    sum counts some tokens twice, on every node alike, which keeps the order.
    """
    load = node.load
    num_placed = load.num_running + load.num_transferring
    placed_tokens = (load.pages_held + load.pages_granted) * load.page_size
    # A waiting request holds no pages yet: count it as one of the average size.
    reported_tokens = placed_tokens * (1 + load.num_waiting / max(1, num_placed))
    num_requests = node.in_flight_requests + num_placed + load.num_waiting
    return node.in_flight_tokens + reported_tokens, num_requests


def round_robin(nodes: Sequence[NodeSnapshot], turn: int, rng: random.Random) -> NodeSnapshot:
    """Return each node in turn."""
    return nodes[turn % len(nodes)]


def least_load(nodes: Sequence[NodeSnapshot], turn: int, rng: random.Random) -> NodeSnapshot:
    """Return the least busy node; equally busy ones in turn."""
    first = turn % len(nodes)
    return min([*nodes[first:], *nodes[:first]], key=load_of)


def uniform(nodes: Sequence[NodeSnapshot], turn: int, rng: random.Random) -> NodeSnapshot:
    """Return any node, each as likely."""
    return rng.choice(nodes)


def power_of_two(nodes: Sequence[NodeSnapshot], turn: int, rng: random.Random) -> NodeSnapshot:
    """Return the less busy of two drawn at random: many routers then do not herd to one node.

    Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """
    return min(rng.sample(nodes, min(2, len(nodes))), key=load_of)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "least_load": least_load,
        "round_robin": round_robin,
        "random": uniform,
        "power_of_two": power_of_two,
    }
)


def usable_fingerprint(snapshot: ClusterSnapshot, preferred: str = "") -> str | None:
    """Return the model that a pair can serve now, or None.

    It is the preferred one while a pair has it, so that a cluster does not change its model because
    one node is away; else that of the first prefill that has a partner.
    """
    decodes = {node.fingerprint for node in snapshot.decodes if node.is_up}
    prefills = [node.fingerprint for node in snapshot.prefills if node.is_up]
    served = [fingerprint for fingerprint in prefills if fingerprint in decodes]
    if preferred in served:
        return preferred
    return served[0] if served else None


def choose(
    snapshot: ClusterSnapshot,
    fingerprint: str,
    policy: Policy,
    turn: int,
    rng: random.Random,
    *,
    avoid: Set[str] = frozenset(),
) -> Pair:
    """Return the pair for one attempt at a request on the model of this fingerprint.

    Args:
        avoid: URLs of nodes that failed this request; taken only where there is no other.

    Raises:
        NoNodeAvailable: A role has no node of that model up; says which and why.
    """

    def pick(nodes: Sequence[NodeSnapshot]) -> NodeSnapshot:
        usable = [node for node in nodes if node.is_up and node.fingerprint == fingerprint]
        if not usable:
            raise NoNodeAvailable("no pair of nodes can serve this model now; send it again later")
        return policy([node for node in usable if node.url not in avoid] or usable, turn, rng)

    return Pair(prefill=pick(snapshot.prefills).url, decode=pick(snapshot.decodes).url)
