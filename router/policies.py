"""The policies by name, as a table of costs: what a node costs a request.

Most costs are in tokens to be computed before the request's turn comes, so that a cached prefix, a queue and KV that has
to travel weigh against each other. `random`, `round_robin` and `session` rank the nodes instead: their ranks are so far
apart that no number of tokens changes the order.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import xxhash

from tandem.router.policy import Asked, Draw, NodeSnapshot, Policy, Rating

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


def _least_load(nodes: Sequence[NodeSnapshot], asked: Asked, _draw: Draw) -> list[float]:
    wanted = asked.num_tokens
    return [
        node.busy_tokens + (_NO_ROOM_TOKENS if node.room_tokens < wanted else 0) for node in nodes
    ]


def _cache_aware(nodes: Sequence[NodeSnapshot], asked: Asked, draw: Draw) -> list[float]:
    """Rate by what there is to do until the prompt is done, less what having some of it saves.

    A node with a popular prefix is taken until its queue is longer by as much as the prefix saves. Of what
    is in a store that all nodes read, only what another node has on its device beyond that decides.
    """
    loads = _least_load(nodes, asked, draw)
    return [load - saved for load, saved in zip(loads, asked.saved_in(nodes), strict=True)]


def _cache_aware_decode(nodes: Sequence[NodeSnapshot], asked: Asked, draw: Draw) -> list[float]:
    """Rate by what decode holds, less what of the prompt's KV need not travel: what is on its device.

    What is in its tiers saves nothing here. Prefill computes or fetches the prompt in any case, and pushes
    all that is not in decode's pool; decode fetches only prompts that it computes by itself.
    """
    loads = _least_load(nodes, asked, draw)
    return [
        load - _KEPT_TOKENS * cached
        for load, cached in zip(loads, asked.cached_in(nodes), strict=True)
    ]


def _power_of_two(nodes: Sequence[NodeSnapshot], asked: Asked, draw: Draw) -> list[float]:
    """Rate two nodes of each zone by load and leave out the others: many routers do not herd.

    Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """
    zones: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        zones.setdefault(node.zone, []).append(index)
    costs = [float("inf")] * len(nodes)
    for indexes in zones.values():
        drawn = draw.rng.sample(indexes, min(2, len(indexes)))
        loads = _least_load([nodes[index] for index in drawn], asked, draw)
        for index, load in zip(drawn, loads, strict=True):
            costs[index] = load
    return costs


def _round_robin(nodes: Sequence[NodeSnapshot], _asked: Asked, draw: Draw) -> list[float]:
    count = len(nodes)
    return [(index - draw.turn) % count / count * _PLACE for index in range(count)]


def _random(nodes: Sequence[NodeSnapshot], _asked: Asked, draw: Draw) -> list[float]:
    return [draw.rng.random() * _PLACE for _ in nodes]


def _session(nodes: Sequence[NodeSnapshot], asked: Asked, draw: Draw) -> list[float]:
    """Give every session an order of the nodes; the first that is not overloaded is taken.

    The order of two nodes depends on nothing else, so a node that comes or goes moves only the sessions
    that have it first. Requests without a session are rated by what is cached.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.
    """
    if not asked.session:
        return _cache_aware(nodes, asked, draw)
    seed = xxhash.xxh3_64_intdigest(asked.session.encode())
    average = sum(node.busy_tokens for node in nodes) / len(nodes)
    limit = _OVERLOAD * average + asked.num_tokens
    return [
        xxhash.xxh3_64_intdigest(node.url.encode(), seed) / 2**64 * _PLACE
        + (0 if node.busy_tokens <= limit and node.room_tokens >= asked.num_tokens else 4 * _PLACE)
        for node in nodes
    ]


def _session_decode(nodes: Sequence[NodeSnapshot], asked: Asked, draw: Draw) -> list[float]:
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
