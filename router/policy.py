"""Which prefill and which decode node take a request: pure functions of a snapshot and of the request.

```
 nodes of a role ──Rating.costs──▶ a cost for each ──▶ the cheapest of each zone ─┐
                                                                                 ├─▶ the cheapest pair
 nodes of the other ─────────────▶ ...             ──▶ the cheapest of each zone ─┘   + crossing, if zones differ
```

Holds no connection and no clock: a node is known by its `NodeSnapshot`, a request by its `Asked`. The table of costs is in
`router/policies.py`. A turn number, one higher with each choice, breaks ties, so that equal nodes are used in rotation.
"""

import random
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from tandem.router.prefixes import NOTHING_CACHED, CachedPrefixes, CachedTier, PromptBlocks
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import NodeLoad

# Of equally many tokens, fewer requests are less work: a thousand count as one token.
_REQUEST_TOKENS = 0.001


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node at one moment.

    Attributes:
        is_aside: It failed several requests in a row: taken only where there is no other.
        fingerprint: Of its model; empty while it was never reached.
        reason: Why it is not up, for people.
        load: As it last reported, up to half a second old.
        in_flight_requests: Started by this edge worker and not ended.
        in_flight_tokens: Prompt tokens of those.
        fresh_tokens: Prompt tokens that it was given since `load` was reported, on prefill without the cached ones.
        zone: As operators name it: KV moves faster within a zone.
        prefixes: What it has cached. It changes as the node reports more.
        tiers: Those behind its cache that save anything now, cheapest first. Their contents change too.
        busy_tokens: How much work it has; see `busy_tokens`.
        room_tokens: For how many more tokens it has pages.
        takes_prompts: A decode node that can compute prompts by itself.
        backlog_tokens: Of a decode node: prompt tokens that wait to be computed there.
    """

    url: str
    role: str
    is_up: bool
    is_aside: bool = False
    fingerprint: str = ""
    reason: str = ""
    load: NodeLoad = field(default_factory=NodeLoad)
    in_flight_requests: int = 0
    in_flight_tokens: int = 0
    fresh_tokens: int = 0
    zone: str = ""
    takes_prompts: bool = False
    backlog_tokens: int = 0
    prefixes: CachedPrefixes = NOTHING_CACHED
    tiers: tuple[CachedTier, ...] = ()
    # Kept, since a choice looks at hundreds of nodes of which few have changed.
    busy_tokens: float = field(init=False)
    room_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy_tokens", busy_tokens(self))
        object.__setattr__(self, "room_tokens", room_tokens(self))


def busy_tokens(node: NodeSnapshot) -> float:
    """Return the work that a node has, in tokens: what it reported and what was started since.

    On prefill these are prompt tokens to compute. On decode they are the tokens of running requests, which each step
    reads, and of queued ones. A report is up to half a second old: what this edge worker's requests that ended since
    had of it is left out, or a prompt would leave the node that cached it a moment ago.
    """
    load = node.load
    num_placed = load.num_running + load.num_transferring
    num_there = num_placed + load.num_waiting
    num_ended = min(num_there, max(0, load.num_own - node.in_flight_requests))
    reported_tokens: float = max(0, load.queued_tokens)
    if load.queued_tokens < 0 or node.role != "prefill":
        placed_tokens = (load.pages_held + load.pages_granted) * load.page_size
        # A waiting request holds no pages yet: count it as one of the average size.
        reported_tokens += placed_tokens * (1 + load.num_waiting / max(1, num_placed))
    reported_tokens *= 1 - num_ended / max(1, num_there)
    num_requests = node.in_flight_requests + num_there - num_ended
    return node.fresh_tokens + reported_tokens + num_requests * _REQUEST_TOKENS


def room_tokens(node: NodeSnapshot) -> float:
    """Return for how many more tokens a node has pages; infinitely many before it reported."""
    load = node.load
    if not load.num_pages:
        return float("inf")
    return (load.pages_free + load.pages_cached) * load.page_size - node.fresh_tokens


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All nodes at one moment."""

    prefills: tuple[NodeSnapshot, ...]
    decodes: tuple[NodeSnapshot, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two nodes of one attempt, by their URLs. Without a prefill, decode computes the prompt."""

    prefill: str
    decode: str

    @property
    def urls(self) -> tuple[str, ...]:
        """The nodes there are."""
        return (self.prefill, self.decode) if self.prefill else (self.decode,)


_NO_BLOCKS = PromptBlocks(())


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before it has a pair: its prompt, and its session if it has one."""

    num_tokens: int = 0
    session: str = ""
    prompt: PromptBlocks = _NO_BLOCKS

    @classmethod
    def of(cls, request: GenerateRequest) -> "Asked":
        """Return what is known of `request`."""
        blocks = PromptBlocks(request.prompt_ids, request.cache_salt)
        return cls(len(request.prompt_ids), request.session, blocks)

    def cached_tokens(self, node: NodeSnapshot) -> int:
        """Return how many tokens at the beginning of the prompt `node` has cached, as far as known."""
        return self.cached_in([node])[0]

    def cached_in(self, nodes: Sequence[NodeSnapshot]) -> list[int]:
        """Return the same of each of several nodes, for little more than of one."""
        return self.prompt.cached_in([node.prefixes for node in nodes])

    def saved_in(self, nodes: Sequence[NodeSnapshot]) -> Sequence[float]:
        """Return how many tokens of work each of several nodes saves by what it has of the prompt.

        A cached token saves all of itself. Behind those, a token in a tier saves the difference between computing
        and fetching it.
        """
        cached = self.cached_in(nodes)
        behind = [index for index, node in enumerate(nodes) if node.tiers]
        if not behind:
            return cached
        saved: list[float] = [*cached]
        for index in behind:
            for tier, count in self.prompt.beyond(cached[index], nodes[index].tiers):
                saved[index] += count * tier.share
        return saved

    def saved_tokens(self, node: NodeSnapshot) -> float:
        """Return the same of one node."""
        return self.saved_in([node])[0]

    def found_in(self, node: NodeSnapshot) -> dict[str, int]:
        """Return how many tokens `node` is thought to find where: on its `device`, or by name of the tier."""
        found = {"device": self.cached_tokens(node)}
        if node.tiers:
            more = self.prompt.beyond(found["device"], node.tiers)
            found |= {tier.name: count for tier, count in more}
        return found


ANYTHING = Asked()
"""A request of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The turn of a choice, and its source of randomness."""

    turn: int
    rng: random.Random


@dataclass(frozen=True, slots=True)
class Rating:
    """How the nodes of one role are compared.

    Attributes:
        costs: Returns that of each node; the cheapest is taken. Infinity: not taken.
        crossing: Returns the cost of a pair from two zones.
    """

    costs: Callable[[Sequence[NodeSnapshot], Asked, Draw], Sequence[float]]
    crossing: Callable[[Asked], float]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a pair is chosen."""

    prefill: Rating
    decode: Rating


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


def in_use(nodes: Iterable[NodeSnapshot], fingerprint: str) -> list[NodeSnapshot]:
    """Return the nodes of one role that take requests on a model: those put aside only where no other is up."""
    up = [node for node in nodes if node.is_up and node.fingerprint == fingerprint]
    return [node for node in up if not node.is_aside] or up


def choose(
    snapshot: ClusterSnapshot,
    fingerprint: str,
    policy: Policy,
    turn: int,
    rng: random.Random,
    *,
    asked: Asked = ANYTHING,
    avoid: Set[str] = frozenset(),
) -> Pair:
    """Return the pair for one attempt at a request on the model of this fingerprint.

    Both nodes are chosen together: of all pairs the one that costs least, what it costs to move KV from
    one zone to another included.

    Args:
        avoid: URLs of nodes that failed this request; taken only where there is no other.

    Raises:
        NoNodeAvailable: A role has no node of that model up; says which and why.
    """
    draw = Draw(turn, rng)
    prefills = _usable(snapshot.prefills, fingerprint, avoid)
    decodes = _usable(snapshot.decodes, fingerprint, avoid)
    prefill_costs = policy.prefill.costs(prefills, asked, draw)
    decode_costs = policy.decode.costs(decodes, asked, draw)
    crossing = max(policy.prefill.crossing(asked), policy.decode.crossing(asked))
    _, prefill, decode = min(
        (
            (
                prefill_cost + decode_cost + (crossing if prefill.zone != decode.zone else 0),
                prefill,
                decode,
            )
            for prefill_cost, prefill in _cheapest_by_zone(prefills, prefill_costs, turn)
            for decode_cost, decode in _cheapest_by_zone(decodes, decode_costs, turn)
        ),
        key=lambda found: found[0],
    )
    return Pair(prefill=prefill.url, decode=decode.url)


def _usable(
    nodes: Sequence[NodeSnapshot], fingerprint: str, avoid: Set[str]
) -> Sequence[NodeSnapshot]:
    usable = in_use(nodes, fingerprint)
    if not usable:
        raise NoNodeAvailable("no pair of nodes can serve this model now; send it again later")
    if not avoid:
        return usable
    return [node for node in usable if node.url not in avoid] or usable


def _cheapest_by_zone(
    nodes: Sequence[NodeSnapshot], costs: Sequence[float], turn: int
) -> list[tuple[float, NodeSnapshot]]:
    """Return the cheapest node of each zone with its cost; of equals, the first from `turn` on."""
    found: dict[str, tuple[float, NodeSnapshot]] = {}
    first = turn % len(nodes)
    in_turn = zip((*costs[first:], *costs[:first]), (*nodes[first:], *nodes[:first]), strict=True)
    for cost, node in in_turn:
        zone = node.zone
        if zone not in found or cost < found[zone][0]:
            found[zone] = (cost, node)
    return list(found.values())


# ── which prompts a decode node computes by itself ───────────────────────────────────────────────
#
# A prompt of which decode has little to compute is done sooner there: beside its answers, without a message to
# another node. That slows the answers beside it, so there is a bound on what waits at a decode node; beyond it
# prompts go to prefill.


def tokens_to_compute(request: GenerateRequest, num_cached: int = 0) -> int:
    """Return how many tokens of a prompt a decode node has to compute by itself, of which it caches some."""
    wanted = request.logprobs
    if wanted is not None and wanted.prompt_start >= 0:
        # Log-probabilities come from computing, so from there on nothing is taken from the cache.
        num_cached = min(num_cached, max(0, wanted.prompt_start - 1))
    # The last token is always computed: its logits give the next one.
    return max(1, len(request.prompt_ids) - num_cached)


def stays_on_decode(
    request: GenerateRequest, decode: NodeSnapshot, threshold: int, num_cached: int = 0
) -> bool:
    """Tell whether a decode node shall compute a prompt by itself.

    Args:
        threshold: Prompt tokens that the node may have to compute at a time, this prompt's included.
    """
    num_new = tokens_to_compute(request, num_cached)
    return decode.takes_prompts and decode.backlog_tokens + num_new <= threshold


def with_stand_ins(snapshot: ClusterSnapshot, threshold: int) -> ClusterSnapshot:
    """Return a cluster in which decode nodes stand in for prefill nodes when none of these is up.

    A pair chosen from it stands for its decode node alone. A prefill node of another model counts as up: nodes
    that do not fit each other are reported, not covered up.

    Args:
        threshold: As for `stays_on_decode`; 0 lets no node stand in.
    """
    if not threshold or any(node.is_up for node in snapshot.prefills):
        return snapshot
    able = tuple(node for node in snapshot.decodes if node.is_up and node.takes_prompts)
    if not able:
        return snapshot
    # Requests that run on the others are still counted.
    decodes = tuple(
        replace(node, is_up=False) if node.is_up and not node.takes_prompts else node
        for node in snapshot.decodes
    )
    return ClusterSnapshot(prefills=able, decodes=decodes)
