"""The policies: each rates the cost of every node for a request. No I/O.

A policy gets nodes as `RosterEntry` and a request as `RoutingRequest`. `pairing.py` chooses the pair with the lowest cost.

Most costs are numbers of tokens to compute before the request starts, so that cached prefixes, queues and KV transfers can
be weighed against each other. `random`, `round_robin` and `session` rank the nodes instead: their ranks are so far apart
that no number of tokens changes the order.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import xxhash

from tandem.router.nodes.prefixes import PromptBlocks
from tandem.router.nodes.state import Candidates, RosterEntry
from tandem.wire.generation import GenerateRequest

# Distance of ranks: 100 times the tokens that a cluster can hold (512 nodes with 20 million tokens each).
_RANK = 1e12
# Factor for the ranks of decode nodes, so that the prefill node's rank decides first.
_MINOR = 1e-3
# Cost of a node without pages for the prompt: the prompt waits until answers end, which takes about as long as computing
# this many tokens.
_NO_ROOM_TOKENS = 100_000
# Cost per token of KV that crosses zones: for a 70B model, sending 320 KiB at 10 GB/s takes as long as computing the
# token on eight H100.
_CROSSING_TOKENS = 1.0
# One token of the prompt cached at decode outweighs this many tokens that the node holds for requests. A cached token
# saves a transfer; a held one only makes steps slightly longer: 12,000 of them slow a 70B model on eight H100 by 2 %.
_CACHED_TOKENS = 4.0
# A session leaves a node with more than this many times the average work. Consistent hashing with bounded loads
# (Mirrokni et al. 2016) uses 1 + epsilon; at 2 hardly any session moves.
_OVERLOAD = 2.0


@dataclass(frozen=True, slots=True)
class Pair:
    """URLs of the two nodes of an attempt. If `prefill` is empty, decode computes the prompt."""

    prefill: str
    decode: str

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the pair: one if decode computes the prompt itself, else two."""
        return (self.prefill, self.decode) if self.prefill else (self.decode,)


_NO_BLOCKS = PromptBlocks(())


class RoutingRequest(msgspec.Struct, frozen=True):
    """The properties of a request that policies use: its prompt, and its session if it has one."""

    num_tokens: int = 0
    session: str = ""
    prompt: PromptBlocks = _NO_BLOCKS

    @classmethod
    def of(cls, request: GenerateRequest) -> "RoutingRequest":
        """Return the routing properties of `request`."""
        blocks = PromptBlocks(request.prompt_ids, request.prefix_scope)
        return cls(len(request.prompt_ids), request.session, blocks)

    def cached_tokens(self, node: RosterEntry) -> int:
        """Return the number of leading prompt tokens that the node is known to cache."""
        return self.prompt.cached_in(node.prefixes)

    def cached_in(self, nodes: Candidates) -> dict[int, int]:
        """Return the cached tokens of several nodes, by position, without nodes that cache none."""
        return nodes.by_position(self.prompt.found_in(nodes.indexes))

    def saved_in(self, nodes: Candidates) -> Mapping[int, float]:
        """Return the tokens of work that nodes save with cached parts of the prompt, by position.

        A cached token saves its whole computation. After the cached prefix, a token in a tier saves the difference
        between computing and fetching it.
        """
        cached = self.cached_in(nodes)
        saved: dict[int, float] = {**cached}
        for position in nodes.tiered:
            num_cached = cached.get(position, 0)
            for tier, count in self.prompt.beyond(num_cached, nodes.nodes[position].tiers):
                saved[position] = saved.get(position, 0) + count * tier.share
        return saved

    def saved_tokens(self, node: RosterEntry) -> float:
        """Return the tokens of work that one node saves."""
        return self.saved_in(Candidates([node])).get(0, 0)

    def found_in(self, node: RosterEntry) -> dict[str, int]:
        """Return the prompt tokens that the node is expected to find, by place: `device`, or the name of a tier."""
        found = {"device": self.cached_tokens(node)}
        if node.tiers:
            more = self.prompt.beyond(found["device"], node.tiers)
            found |= {tier.name: count for tier, count in more}
        return found


ANYTHING = RoutingRequest()
"""A request without known properties."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The sequence number of a choice, for round robin, and its source of randomness."""

    turn: int
    rng: random.Random


@dataclass(frozen=True, slots=True)
class Rating:
    """How a policy rates the nodes of one role.

    Attributes:
        costs: Returns the cost of each node; infinity excludes a node.
        crossing: Returns the extra cost of a pair in two zones.
    """

    costs: Callable[[Candidates, RoutingRequest, Draw], list[float]]
    crossing: Callable[[RoutingRequest], float]


@dataclass(frozen=True, slots=True)
class Policy:
    """The ratings that choose a pair."""

    prefill: Rating
    decode: Rating


def tokens_to_compute(request: GenerateRequest, num_cached: int = 0) -> int:
    """Return the prompt tokens that a decode node must compute itself, given its cached tokens."""
    logprobs = request.logprobs
    if logprobs is not None and logprobs.prompt_start >= 0:
        # Log-probabilities must be computed, so the cache is not used from their start on.
        num_cached = min(num_cached, max(0, logprobs.prompt_start - 1))
    # The last token is always computed, because its logits give the next token.
    return max(1, len(request.prompt_ids) - num_cached)


# ── the policies ─────────────────────────────────────────────────────────────────────────────────


def _least_load(nodes: Candidates, routing: RoutingRequest, _draw: Draw) -> list[float]:
    num_tokens = routing.num_tokens
    if min(nodes.room_tokens) >= num_tokens:
        return nodes.busy_tokens.copy()
    return [
        busy + (_NO_ROOM_TOKENS if room < num_tokens else 0)
        for busy, room in zip(nodes.busy_tokens, nodes.room_tokens, strict=True)
    ]


def _cache_aware(nodes: Candidates, routing: RoutingRequest, draw: Draw) -> list[float]:
    """Rate by the node's work minus the work that its cached part of the prompt saves.

    A node with a popular prefix is preferred until its extra queued work exceeds what the prefix saves. Blocks in a store
    that all nodes read do not favour any node; only longer prefixes in a node's own cache do.
    """
    costs = _least_load(nodes, routing, draw)
    for position, saved in routing.saved_in(nodes).items():
        costs[position] -= saved
    return costs


def _cache_aware_decode(nodes: Candidates, routing: RoutingRequest, draw: Draw) -> list[float]:
    """Rate by the tokens that decode holds, minus a bonus for cached KV, which need not be transferred.

    KV in decode's tiers gets no bonus. Prefill computes or fetches the prompt in any case, and pushes all KV that is not
    in decode's pool. Decode reads its tiers only for prompts that it computes itself.
    """
    costs = _least_load(nodes, routing, draw)
    for position, cached in routing.cached_in(nodes).items():
        costs[position] -= _CACHED_TOKENS * cached
    return costs


def _power_of_two(nodes: Candidates, routing: RoutingRequest, draw: Draw) -> list[float]:
    """Rate two random nodes of each zone by load and exclude the others, so that many routers do not herd.

    Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """
    zones: dict[str, list[int]] = {}
    for index, zone in enumerate(nodes.zones):
        zones.setdefault(zone, []).append(index)
    costs, loads = [float("inf")] * len(nodes), _least_load(nodes, routing, draw)
    for indexes in zones.values():
        for index in draw.rng.sample(indexes, min(2, len(indexes))):
            costs[index] = loads[index]
    return costs


def _round_robin(nodes: Candidates, _routing: RoutingRequest, draw: Draw) -> list[float]:
    count = len(nodes)
    return [(index - draw.turn) % count / count * _RANK for index in range(count)]


def _random(nodes: Candidates, _routing: RoutingRequest, draw: Draw) -> list[float]:
    return [draw.rng.random() * _RANK for _ in nodes.nodes]


def _session(nodes: Candidates, routing: RoutingRequest, draw: Draw) -> list[float]:
    """Order the nodes for each session by hashing (rendezvous hashing), with overloaded nodes last.

    The order of two nodes does not depend on other nodes, so adding or removing a node moves only the sessions that
    rank it first. Requests without a session are rated as by `cache_aware`.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.
    """
    if not routing.session:
        return _cache_aware(nodes, routing, draw)
    seed = xxhash.xxh3_64_intdigest(routing.session.encode())
    average = sum(nodes.busy_tokens) / len(nodes)
    limit = _OVERLOAD * average + routing.num_tokens
    return [
        xxhash.xxh3_64_intdigest(node.url.encode(), seed) / 2**64 * _RANK
        + (0 if node.busy_tokens <= limit and node.room_tokens >= routing.num_tokens else 4 * _RANK)
        for node in nodes.nodes
    ]


def _session_decode(nodes: Candidates, routing: RoutingRequest, draw: Draw) -> list[float]:
    """Rate as `_session`, with smaller ranks: losing a decode node must not move a session's prefill node."""
    if not routing.session:
        return _cache_aware_decode(nodes, routing, draw)
    return [cost * _MINOR for cost in _session(nodes, routing, draw)]


def _by_tokens(routing: RoutingRequest) -> float:
    return max(1.0, routing.num_tokens * _CROSSING_TOKENS)


def _by_ranks(_routing: RoutingRequest) -> float:
    """Return more than any difference between ranks, so that only an overloaded node makes a pair cross zones."""
    return 2 * _RANK


def _by_session(routing: RoutingRequest) -> float:
    return _by_ranks(routing) if routing.session else _by_tokens(routing)


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
        "round_robin": _both(Rating(_round_robin, _by_ranks)),
        "random": _both(Rating(_random, _by_ranks)),
    }
)


def policy_of(name: str, prefill: str = "", decode: str = "") -> Policy:
    """Return the policy of this name. `prefill` and `decode` name a different policy for one role."""
    return Policy(POLICIES[prefill or name].prefill, POLICIES[decode or name].decode)
