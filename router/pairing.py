"""Which pair the next attempt at a request goes to: its group's, or the one that costs least by the policy.

```
 nodes of a role ──Rating.costs──▶ a cost for each ──▶ the cheapest of each zone ─┐
                                                                                 ├─▶ the cheapest pair
 nodes of the other ─────────────▶ ...             ──▶ the cheapest of each zone ─┘   + crossing, if zones differ


 a group: first enter ──▶ no pair ──▶ a pair ──▶ ... ──▶ last leave: forgotten
                                       │  ▲
                                       └──┘ another one, when the pair fails or goes away
```
"""

import itertools
import random
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.router.cluster import Cluster
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import (
    ANYTHING,
    Asked,
    Candidates,
    ClusterSnapshot,
    Draw,
    NodeSnapshot,
    Pair,
    Policy,
    tokens_to_compute,
)
from tandem.wire.errors import NoNodeAvailable, TandemError
from tandem.wire.generation import GenerateRequest

# Hundreds of nodes make tens of thousands of pairs; people look at those in use.
MAX_PAIRS = 256


@dataclass(slots=True, eq=False)
class Group:
    """Requests of one prompt, which go to one pair: None until it was chosen."""

    pair: Pair | None = None
    num_running: int = 0


class Groups:
    """The groups that have a request running; each is forgotten with its last one."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def entered(self, name: str) -> Iterator[Group]:
        """Count a request as running inside the block and yield its group; without a name it is alone."""
        if not name:
            yield Group()
            return
        group = self._groups.setdefault(name, Group())
        group.num_running += 1
        try:
            yield group
        finally:
            group.num_running -= 1
            if not group.num_running:
                del self._groups[name]


@dataclass(slots=True, eq=False)
class PairUse:
    """What one edge worker has given to one pair.

    Attributes:
        num_running, num_started: Attempts now, and since the pair is known.
        num_tokens: Of the prompts of all of them.
    """

    num_running: int = 0
    num_started: int = 0
    num_tokens: int = 0


class Pairing:
    """Chooses pairs, and counts what each is given.

    Args:
        rng: For the policies that draw.
    """

    def __init__(
        self, cluster: Cluster, policy: Policy, rng: random.Random, metrics: RouterMetrics
    ) -> None:
        self._cluster, self._metrics = cluster, metrics
        self._policy, self._rng = policy, rng
        self._turns = itertools.count()
        # In the order of their last attempts.
        self.uses: dict[Pair, PairUse] = {}

    def begin(self, pair: Pair, num_tokens: int) -> PairUse:
        """Count an attempt with a prompt of so many tokens; its owner counts its end in what is returned."""
        use = self.uses[pair] = self.uses.pop(pair, PairUse())
        use.num_running += 1
        use.num_started += 1
        use.num_tokens += num_tokens
        return use

    def forget(self, urls: set[str]) -> None:
        """Forget idle pairs with a node that is none of `urls`, and those beyond `MAX_PAIRS` that began longest ago."""
        num_over = len(self.uses) - MAX_PAIRS
        self.uses = {
            pair: use
            for position, (pair, use) in enumerate(self.uses.items())
            if use.num_running or (position >= num_over and urls.issuperset(pair.urls))
        }

    def pair_for(
        self,
        group: Group,
        request: GenerateRequest,
        fingerprint: str,
        failed: Set[Pair],
        after: TandemError | None = None,
    ) -> Pair:
        """Return the group's pair while it serves and did not fail this request, else a new one.

        Raises:
            NoNodeAvailable: A role has no node; names `after` too, if an attempt ended with that.
        """
        pair = group.pair
        if pair is None or pair in failed or not self._serves(pair, fingerprint):
            with self._metrics.pairing.time():
                group.pair = pair = self._choose(request, fingerprint, failed, after)
        return pair

    def _serves(self, pair: Pair, fingerprint: str) -> bool:
        nodes = [self._cluster.view(url) for url in pair.urls]
        return all(
            node.is_up and not node.is_aside and node.fingerprint == fingerprint for node in nodes
        )

    def _choose(
        self,
        request: GenerateRequest,
        fingerprint: str,
        failed: Set[Pair],
        after: TandemError | None,
    ) -> Pair:
        asked = Asked.of(request)
        try:
            pair = choose(
                self._cluster.servable(),
                fingerprint,
                self._policy,
                next(self._turns),
                self._rng,
                asked=asked,
                avoid={url for pair in failed for url in pair.urls},
            )
        except NoNodeAvailable as none:
            if after is None:
                raise
            raise NoNodeAvailable(f"{after.message}; {none.message}") from after
        pair = self._conditional(pair, request, asked)
        self._expect(pair, asked)
        return pair

    def _conditional(self, pair: Pair, request: GenerateRequest, asked: Asked) -> Pair:
        """Return the pair, or its decode alone where that computes the prompt by itself.

        Tokens in decode's tiers count as not cached: the threshold bounds how much its other answers are slowed
        down, and a fetch that fails or comes late is computed.
        """
        decode = self._cluster.view(pair.decode)
        is_stand_in = self._cluster.view(pair.prefill).role == "decode"
        threshold, num_cached = self._cluster.local_prefill_threshold, asked.cached_tokens(decode)
        if not is_stand_in and not stays_on_decode(request, decode, threshold, num_cached):
            return pair
        reason = "no_prefill" if is_stand_in else "little_to_compute"
        self._metrics.local_prompts.labels(reason).inc()
        return Pair(prefill="", decode=pair.decode)

    def _expect(self, pair: Pair, asked: Asked) -> None:
        """Have the nodes count what they were given, until their loads include it."""
        computing = pair.prefill or pair.decode
        snapshot = self._cluster.view(computing)
        self._cluster.node(pair.decode).expect(asked.num_tokens)
        found = asked.found_in(snapshot)
        self._metrics.given(asked.num_tokens, found)
        if pair.prefill:
            # As it was rated: a fetched token costs its share of being computed.
            saved = asked.saved_tokens(snapshot) if snapshot.tiers else found["device"]
            self._cluster.node(computing).expect(asked.num_tokens - round(saved))


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
    prefills = _usable(snapshot.in_use("prefill", fingerprint), avoid)
    decodes = _usable(snapshot.in_use("decode", fingerprint), avoid)
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


def _usable(nodes: Candidates, avoid: Set[str]) -> Candidates:
    if not len(nodes):
        raise NoNodeAvailable("no pair of nodes can serve this model now; send it again later")
    others = [node for node in nodes.nodes if node.url not in avoid] if avoid else []
    return Candidates(others) if others else nodes


def _cheapest_by_zone(
    nodes: Candidates, costs: Sequence[float], turn: int
) -> list[tuple[float, NodeSnapshot]]:
    """Return the cheapest node of each zone with its cost; of equals, the first from `turn` on."""
    first = turn % len(nodes)
    if len(set(nodes.zones)) == 1:
        cost = min(costs)
        index = costs.index(cost, first if cost in costs[first:] else 0)
        return [(cost, nodes.nodes[index])]
    found: dict[str, tuple[float, NodeSnapshot]] = {}
    for index in (*range(first, len(nodes)), *range(first)):
        cost, zone = costs[index], nodes.zones[index]
        if zone not in found or cost < found[zone][0]:
            found[zone] = (cost, nodes.nodes[index])
    return list(found.values())


def stays_on_decode(
    request: GenerateRequest, decode: NodeSnapshot, threshold: int, num_cached: int = 0
) -> bool:
    """Tell whether a decode node shall compute a prompt by itself: its first token comes sooner than over prefill.

    That slows the answers beside it, so what waits at a decode node is bounded.

    Args:
        threshold: Prompt tokens that the node may have to compute at a time, this prompt's included.
    """
    num_new = tokens_to_compute(request, num_cached)
    return decode.takes_prompts and decode.backlog_tokens + num_new <= threshold
