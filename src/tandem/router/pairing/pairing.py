"""Chooses the pair of a request's next attempt: the pair of its group, or the cheapest pair by the policy.

```
 prefill nodes ──Rating.costs──▶ cost of each ──▶ the cheapest of each zone ─┐
                                                                            ├─▶ the cheapest pair
 decode nodes ──────────────────▶ ...         ──▶ the cheapest of each zone ─┘   + crossing, if zones differ


 a group: first request ──▶ no pair ──▶ a pair ──▶ ... ──▶ last request ends: forgotten
                                         │  ▲
                                         └──┘ a new pair, if the pair fails or is removed
```
"""

import itertools
import math
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass

from tandem.router.metrics import RouterMetrics
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.fleet import Fleet
from tandem.router.nodes.state import Candidates, ClusterState, RosterEntry
from tandem.router.pairing.policy import (
    ANYTHING,
    Draw,
    Pair,
    Policy,
    RoutingRequest,
    tokens_to_compute,
)
from tandem.wire.errors import AdapterGone, NoNodeAvailable, TandemError
from tandem.wire.generation import GenerateRequest

# Hundreds of nodes form tens of thousands of pairs. The console shows those in use.
MAX_PAIRS = 256


@dataclass(slots=True, eq=False)
class PairGroup:
    """Requests with the same prompt, which run on one pair; `pair` is None until it is chosen."""

    pair: Pair | None = None
    num_running: int = 0


class PairGroups:
    """The groups with running requests. A group is forgotten when its last request ends."""

    def __init__(self) -> None:
        self._groups: dict[str, PairGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, name: str) -> PairGroup:
        """Count a request of a group and return the group. An empty name returns a new, unshared group."""
        if not name:
            return PairGroup()
        group = self._groups.setdefault(name, PairGroup())
        group.num_running += 1
        return group

    def leave(self, name: str) -> None:
        """Count the end of a request of a group."""
        if name:
            self._groups[name].num_running -= 1
            if not self._groups[name].num_running:
                del self._groups[name]


@dataclass(slots=True, eq=False)
class PairUse:
    """Attempts of one edge worker on one pair.

    Attributes:
        num_running, num_started: Attempts running now, and started since the pair was first used.
        num_tokens: Prompt tokens of all attempts.
    """

    num_running: int = 0
    num_started: int = 0
    num_tokens: int = 0


class Pairing:
    """Chooses pairs, and counts the attempts on each.

    Args:
        rng: Source of randomness for policies that need one.
    """

    def __init__(
        self, cluster: Cluster, policy: Policy, rng: random.Random, metrics: RouterMetrics
    ) -> None:
        self._cluster, self._metrics = cluster, metrics
        self._policy, self._rng = policy, rng
        self._turns = itertools.count()
        # In the order of the last attempt.
        self.uses: dict[Pair, PairUse] = {}

    def begin(self, pair: Pair, num_tokens: int) -> PairUse:
        """Count an attempt with a prompt of `num_tokens`. Its owner counts its end in the returned object."""
        use = self.uses[pair] = self.uses.pop(pair, PairUse())
        use.num_running += 1
        use.num_started += 1
        use.num_tokens += num_tokens
        return use

    def forget(self, urls: set[str]) -> None:
        """Forget idle pairs with a node not in `urls`, and the least recently used idle pairs beyond `MAX_PAIRS`."""
        num_over = len(self.uses) - MAX_PAIRS
        self.uses = {
            pair: use
            for position, (pair, use) in enumerate(self.uses.items())
            if use.num_running or (position >= num_over and urls.issuperset(pair.urls))
        }

    def pair_for(
        self,
        fleet: Fleet,
        group: PairGroup,
        request: GenerateRequest,
        fingerprint: str,
        failed: Set[Pair],
        *,
        after: TandemError | None = None,
    ) -> Pair:
        """Return the group's pair if it can serve and has not failed this request, else a new pair.

        Args:
            fleet: The nodes of the request's model.
            failed: Pairs that failed this request.
            after: Error of the last attempt, if there was one.

        Raises:
            NoNodeAvailable: A role has no node. The message includes `after`.
            AdapterGone: No pair of the nodes has the request's adapter.
        """
        pair = group.pair
        if pair is None or pair in failed or not self._serves(pair, fingerprint, request.adapter):
            with self._metrics.pairing.time():
                group.pair = pair = self._choose(fleet, request, fingerprint, failed, after)
        return pair

    def _serves(self, pair: Pair, fingerprint: str, adapter: str) -> bool:
        nodes = [self._cluster.node(url).entry for url in pair.urls]
        return all(
            node.is_up
            and not node.is_aside
            and node.fingerprint == fingerprint
            and node.load.has_adapter(adapter)
            for node in nodes
        )

    def _choose(
        self,
        fleet: Fleet,
        request: GenerateRequest,
        fingerprint: str,
        failed: Set[Pair],
        after: TandemError | None,
    ) -> Pair:
        routing = RoutingRequest.of(request)
        try:
            pair = choose(
                fleet.servable(),
                fingerprint,
                self._policy,
                next(self._turns),
                self._rng,
                routing=routing,
                adapter=request.adapter,
                avoid={url for pair in failed for url in pair.urls},
            )
        except NoNodeAvailable as error:
            if after is None:
                raise
            raise NoNodeAvailable(f"{after.message}; {error.message}") from after
        pair = self._without_prefill(pair, request, routing)
        self._count_fresh(pair, routing)
        return pair

    def _without_prefill(
        self, pair: Pair, request: GenerateRequest, routing: RoutingRequest
    ) -> Pair:
        """Return the pair, or its decode node alone if that computes the prompt itself.

        Tokens in decode's tiers do not count as cached. The threshold limits how much a prompt slows other answers on
        the node, and if reading a tier fails or is late, the node must compute these tokens after all.
        """
        decode = self._cluster.node(pair.decode).entry
        threshold, num_cached = self._cluster.local_prefill_threshold, routing.cached_tokens(decode)
        if self._cluster.node(pair.prefill).role == "decode":
            reason = "no_prefill"
        elif stays_on_decode(request, decode, threshold, num_cached):
            reason = "little_to_compute"
        elif threshold and decode.takes_prompts and not self._fits(pair.prefill, request):
            reason = "prefill_too_small"
        else:
            return pair
        self._metrics.local_prompts.labels(reason).inc()
        return Pair(prefill="", decode=pair.decode)

    def _fits(self, url: str, request: GenerateRequest) -> bool:
        """Whether a node's pool can hold the prompt. In a replay, the answer so far is part of the prompt."""
        info = self._cluster.node(url).info
        return not info or len(request.prompt_ids) <= (info.max_prompt_tokens or math.inf)

    def _count_fresh(self, pair: Pair, routing: RoutingRequest) -> None:
        """Add this prompt to the expected work of its nodes until their next load report includes it."""
        computing = self._cluster.node(pair.prefill or pair.decode)
        self._cluster.node(pair.decode).count_fresh(routing.num_tokens)
        found = routing.found_in(computing.entry)
        self._metrics.count_prompt(routing.num_tokens, found)
        if pair.prefill:
            # The same cost as in the rating: a fetched token costs a share of computing it.
            entry = computing.entry
            saved = routing.saved_tokens(entry) if entry.tiers else found["device"]
            computing.count_fresh(routing.num_tokens - round(saved))


def choose(
    state: ClusterState,
    fingerprint: str,
    policy: Policy,
    turn: int,
    rng: random.Random,
    *,
    routing: RoutingRequest = ANYTHING,
    adapter: str = "",
    avoid: Set[str] = frozenset(),
) -> Pair:
    """Return the pair for one attempt at a request on the model with this fingerprint.

    Both nodes are chosen together, as the pair with the lowest total cost, which includes moving KV between zones.

    Args:
        adapter: Id of the adapter that both nodes must have; empty: none.
        avoid: URLs of nodes that failed this request; used only if there is no other node.

    Raises:
        NoNodeAvailable: A role has no usable node with this model.
        AdapterGone: A role has nodes with this model, and none has the adapter.
    """
    draw = Draw(turn, rng)
    able = [state.in_use(role, fingerprint, adapter) for role in ("prefill", "decode")]
    if adapter and not all(map(len, able)):
        for role in ("prefill", "decode"):
            _usable(state.in_use(role, fingerprint), avoid)
        raise AdapterGone(adapter)
    prefills, decodes = (_usable(nodes, avoid) for nodes in able)
    prefill_costs = policy.prefill.costs(prefills, routing, draw)
    decode_costs = policy.decode.costs(decodes, routing, draw)
    crossing = max(policy.prefill.crossing(routing), policy.decode.crossing(routing))
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


def _usable(nodes: Candidates, avoid: Set[str]) -> Candidates:
    if not len(nodes):
        raise NoNodeAvailable(
            "no pair of nodes can serve this model now: send the request again later"
        )
    others = [node for node in nodes.nodes if node.url not in avoid] if avoid else []
    return Candidates(others) if others else nodes


def _cheapest_by_zone(
    nodes: Candidates, costs: Sequence[float], turn: int
) -> list[tuple[float, RosterEntry]]:
    """Return the cheapest node of each zone with its cost. Ties go to the first node from position `turn` on."""
    first = turn % len(nodes)
    if len(set(nodes.zones)) == 1:
        cost = min(costs)
        index = costs.index(cost, first if cost in costs[first:] else 0)
        return [(cost, nodes.nodes[index])]
    found: dict[str, tuple[float, RosterEntry]] = {}
    for index in (*range(first, len(nodes)), *range(first)):
        cost, zone = costs[index], nodes.zones[index]
        if zone not in found or cost < found[zone][0]:
            found[zone] = (cost, nodes.nodes[index])
    return list(found.values())


def stays_on_decode(
    request: GenerateRequest, decode: RosterEntry, threshold: int, num_cached: int = 0
) -> bool:
    """Return whether a decode node should compute a prompt itself.

    The first token of a short prompt then comes sooner, but other answers on the node slow down. So the node's backlog
    is limited.

    Args:
        threshold: Limit of the node's backlog in prompt tokens, including this prompt.
    """
    num_new = tokens_to_compute(request, num_cached)
    return decode.takes_prompts and decode.backlog_tokens + num_new <= threshold
