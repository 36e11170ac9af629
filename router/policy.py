"""What is known of nodes and of a request, and what a node costs a request by each policy: pure.

Holds no connection and no clock: a node is known by its `NodeSnapshot`, a request by its `Asked`. `pairing.py` takes the
pair that costs least.

Most costs are in tokens to be computed before the request's turn comes, so that a cached prefix, a queue and KV that has
to travel weigh against each other. `random`, `round_robin` and `session` rank the nodes instead: their ranks are so far
apart that no number of tokens changes the order.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import xxhash

from tandem.router.prefixes import (
    NOTHING_CACHED,
    CachedPrefixes,
    CachedTier,
    PrefixIndex,
    PromptBlocks,
)
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import NodeLoad

# Of equally many tokens, fewer requests are less work: a thousand count as one token.
_REQUEST_TOKENS = 0.001
# More tokens than all nodes of a cluster can hold: 100 times 512 nodes of 20 million.
_PLACE = 1e12
# Of what is far more, places keep a thousandth apart: prefill's place decides, then decode's.
_MINOR = 1e-3
# A node without pages for the prompt makes it wait until answers end: about as long as computing so many tokens.
_NO_ROOM_TOKENS = 100_000
# KV that leaves a zone: a 70B model's 320 KiB a token at 10 GB/s take as long as computing the token on
# eight H100.
_CROSSING_TOKENS = 1.0
# On a decode, a token that is there already is one that need not travel, a token held makes steps a little
# longer: 12,000 more slow a 70B model on eight H100 by 2 %.
_KEPT_TOKENS = 4.0
# A session's node is passed over when it has more than this many times the average work. Consistent
# hashing with bounded loads (Mirrokni et al. 2016) has 1 + epsilon; at 2 hardly a session moves.
_OVERLOAD = 2.0


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


class Candidates:
    """Nodes of one role that may be given a request, and in columns what a choice compares in all of them.

    A choice among hundreds of nodes is a few built-in passes over columns: looking at each node took as long as
    all else that a router does for a request.

    Attributes:
        nodes: In their order; all columns have the same.
        zones, busy_tokens, room_tokens: Columns of `NodeSnapshot`.
        indexes: Where what they have cached is found.
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
        """Take a node as it is now, in place of the same node before, if it is one of these."""
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
        """Return what was found of the nodes' caches by their positions."""
        positions = ((self._lives.get(life), count) for life, count in found.items())
        return {position: count for position, count in positions if position is not None}


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All nodes at one moment.

    Attributes:
        kept: What `in_use` has returned. One that is passed on to the next snapshot follows the nodes from there on.
    """

    prefills: tuple[NodeSnapshot, ...]
    decodes: tuple[NodeSnapshot, ...]
    kept: dict[tuple[str, str], Candidates] = field(default_factory=dict, compare=False, repr=False)

    def in_use(self, role: str, fingerprint: str) -> Candidates:
        """Return the nodes that take requests on a model: those put aside only where no other is up."""
        if (role, fingerprint) not in self.kept:
            nodes = self.prefills if role == "prefill" else self.decodes
            up = [node for node in nodes if node.is_up and node.fingerprint == fingerprint]
            chosen = [node for node in up if not node.is_aside] or up
            self.kept[role, fingerprint] = Candidates(chosen)
        return self.kept[role, fingerprint]


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
        blocks = PromptBlocks(request.prompt_ids, request.prefix_scope)
        return cls(len(request.prompt_ids), request.session, blocks)

    def cached_tokens(self, node: NodeSnapshot) -> int:
        """Return how many tokens at the beginning of the prompt `node` has cached, as far as known."""
        return self.prompt.cached_in(node.prefixes)

    def cached_in(self, nodes: Candidates) -> dict[int, int]:
        """Return the same of several nodes, by the positions of those that have any."""
        return nodes.by_position(self.prompt.found_in(nodes.indexes))

    def saved_in(self, nodes: Candidates) -> Mapping[int, float]:
        """Return how many tokens of work nodes save by what they have of the prompt, by the positions of those.

        A cached token saves all of itself. Behind those, a token in a tier saves the difference between computing
        and fetching it.
        """
        cached = self.cached_in(nodes)
        saved: dict[int, float] = {**cached}
        for position in nodes.tiered:
            num_cached = cached.get(position, 0)
            for tier, count in self.prompt.beyond(num_cached, nodes.nodes[position].tiers):
                saved[position] = saved.get(position, 0) + count * tier.share
        return saved

    def saved_tokens(self, node: NodeSnapshot) -> float:
        """Return the same of one node."""
        return self.saved_in(Candidates([node])).get(0, 0)

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

    costs: Callable[[Candidates, Asked, Draw], list[float]]
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


def tokens_to_compute(request: GenerateRequest, num_cached: int = 0) -> int:
    """Return how many tokens of a prompt a decode node has to compute by itself, of which it caches some."""
    wanted = request.logprobs
    if wanted is not None and wanted.prompt_start >= 0:
        # Log-probabilities come from computing, so from there on nothing is taken from the cache.
        num_cached = min(num_cached, max(0, wanted.prompt_start - 1))
    # The last token is always computed: its logits give the next one.
    return max(1, len(request.prompt_ids) - num_cached)


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


# ── the policies ─────────────────────────────────────────────────────────────────────────────────


def _least_load(nodes: Candidates, asked: Asked, _draw: Draw) -> list[float]:
    wanted = asked.num_tokens
    if min(nodes.room_tokens) >= wanted:
        return nodes.busy_tokens.copy()
    return [
        busy + (_NO_ROOM_TOKENS if room < wanted else 0)
        for busy, room in zip(nodes.busy_tokens, nodes.room_tokens, strict=True)
    ]


def _cache_aware(nodes: Candidates, asked: Asked, draw: Draw) -> list[float]:
    """Rate by what there is to do until the prompt is done, less what having some of it saves.

    A node with a popular prefix is taken until its queue is longer by as much as the prefix saves. Of what
    is in a store that all nodes read, only what another node has on its device beyond that decides.
    """
    costs = _least_load(nodes, asked, draw)
    for position, saved in asked.saved_in(nodes).items():
        costs[position] -= saved
    return costs


def _cache_aware_decode(nodes: Candidates, asked: Asked, draw: Draw) -> list[float]:
    """Rate by what decode holds, less what of the prompt's KV need not travel: what is on its device.

    What is in its tiers saves nothing here. Prefill computes or fetches the prompt in any case, and pushes
    all that is not in decode's pool; decode fetches only prompts that it computes by itself.
    """
    costs = _least_load(nodes, asked, draw)
    for position, cached in asked.cached_in(nodes).items():
        costs[position] -= _KEPT_TOKENS * cached
    return costs


def _power_of_two(nodes: Candidates, asked: Asked, draw: Draw) -> list[float]:
    """Rate two nodes of each zone by load and leave out the others: many routers do not herd.

    Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """
    zones: dict[str, list[int]] = {}
    for index, zone in enumerate(nodes.zones):
        zones.setdefault(zone, []).append(index)
    costs, loads = [float("inf")] * len(nodes), _least_load(nodes, asked, draw)
    for indexes in zones.values():
        for index in draw.rng.sample(indexes, min(2, len(indexes))):
            costs[index] = loads[index]
    return costs


def _round_robin(nodes: Candidates, _asked: Asked, draw: Draw) -> list[float]:
    count = len(nodes)
    return [(index - draw.turn) % count / count * _PLACE for index in range(count)]


def _random(nodes: Candidates, _asked: Asked, draw: Draw) -> list[float]:
    return [draw.rng.random() * _PLACE for _ in nodes.nodes]


def _session(nodes: Candidates, asked: Asked, draw: Draw) -> list[float]:
    """Give every session an order of the nodes; the first that is not overloaded is taken.

    The order of two nodes depends on nothing else, so a node that comes or goes moves only the sessions
    that have it first. Requests without a session are rated by what is cached.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.
    """
    if not asked.session:
        return _cache_aware(nodes, asked, draw)
    seed = xxhash.xxh3_64_intdigest(asked.session.encode())
    average = sum(nodes.busy_tokens) / len(nodes)
    limit = _OVERLOAD * average + asked.num_tokens
    return [
        xxhash.xxh3_64_intdigest(node.url.encode(), seed) / 2**64 * _PLACE
        + (0 if node.busy_tokens <= limit and node.room_tokens >= asked.num_tokens else 4 * _PLACE)
        for node in nodes.nodes
    ]


def _session_decode(nodes: Candidates, asked: Asked, draw: Draw) -> list[float]:
    """Rate as `_session`, but for second place: a decode that goes does not move the prefill."""
    if not asked.session:
        return _cache_aware_decode(nodes, asked, draw)
    return [cost * _MINOR for cost in _session(nodes, asked, draw)]


def _by_tokens(asked: Asked) -> float:
    return max(1.0, asked.num_tokens * _CROSSING_TOKENS)


def _by_places(_asked: Asked) -> float:
    """Cross only when it spares a node that is overloaded: the places of a pair are less apart."""
    return 2 * _PLACE


def _by_session(asked: Asked) -> float:
    return _by_places(asked) if asked.session else _by_tokens(asked)


def _both(rating: Rating) -> Policy:
    return Policy(rating, rating)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "least_load": _both(Rating(_least_load, _by_tokens)),
        "cache_aware": Policy(
            Rating(_cache_aware, _by_tokens), Rating(_cache_aware_decode, _by_tokens)
        ),
        "session": Policy(Rating(_session, _by_session), Rating(_session_decode, _by_session)),
        "power_of_two": _both(Rating(_power_of_two, _by_tokens)),
        "round_robin": _both(Rating(_round_robin, _by_places)),
        "random": _both(Rating(_random, _by_places)),
    }
)


def policy_of(name: str, prefill: str = "", decode: str = "") -> Policy:
    """Return the policy of this name, or with one or both roles rated as by another."""
    return Policy(POLICIES[prefill or name].prefill, POLICIES[decode or name].decode)
