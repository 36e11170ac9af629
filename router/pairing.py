"""Which pair the next attempt at a request goes to: its group's, or one that the policy chooses."""

import itertools
import random
from collections.abc import Set

from tandem.router.cluster import Cluster
from tandem.router.conditional import stays_on_decode
from tandem.router.groups import Group
from tandem.router.metrics import RouterMetrics
from tandem.router.policy import Asked, Pair, Policy, choose
from tandem.wire.errors import NoNodeAvailable, TandemError
from tandem.wire.generation import GenerateRequest


class Pairing:
    """Chooses pairs.

    Args:
        rng: For the policies that draw.
    """

    def __init__(
        self, cluster: Cluster, policy: Policy, rng: random.Random, metrics: RouterMetrics
    ) -> None:
        self._cluster, self._metrics = cluster, metrics
        self._policy, self._rng = policy, rng
        self._turns = itertools.count()

    def pair_for(
        self,
        group: Group,
        request: GenerateRequest,
        fingerprint: str,
        failed: Set[Pair],
        after: TandemError | None = None,
    ) -> Pair:
        """Return the group's pair while it serves and did not fail this request, else a new one."""
        pair = group.pair
        if pair is None or pair in failed or not self._serves(pair, fingerprint):
            group.pair = pair = self._choose(request, fingerprint, failed, after)
        return pair

    def _serves(self, pair: Pair, fingerprint: str) -> bool:
        nodes = [self._cluster.node(url).snapshot() for url in pair.urls]
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
        with self._metrics.pairing():
            asked = Asked.of(request)
            avoid = {url for pair in failed for url in pair.urls}
            try:
                pair = choose(
                    self._cluster.servable(),
                    fingerprint,
                    self._policy,
                    next(self._turns),
                    self._rng,
                    asked=asked,
                    avoid=avoid,
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

        What decode has in its tiers is not counted: the threshold is what its answers are promised to be
        disturbed by at most, and a fetch that fails or comes late is computed.
        """
        decode = self._cluster.node(pair.decode).snapshot()
        is_stand_in = self._cluster.node(pair.prefill).role == "decode"
        threshold, num_cached = self._cluster.local_prefill_threshold, asked.cached_tokens(decode)
        if not is_stand_in and not stays_on_decode(request, decode, threshold, num_cached):
            return pair
        self._metrics.stayed_on_decode("no_prefill" if is_stand_in else "little_to_compute")
        return Pair(prefill="", decode=pair.decode)

    def _expect(self, pair: Pair, asked: Asked) -> None:
        """Have the nodes count what they were given, until their loads tell of it."""
        self._cluster.node(pair.decode).expect(asked.num_tokens)
        computing = self._cluster.node(pair.prefill or pair.decode)
        snapshot = computing.snapshot()
        found = asked.found_in(snapshot)
        self._metrics.given(asked.num_tokens, found)
        if pair.prefill:
            # As it was rated: what is fetched costs its share of being computed.
            saved = asked.saved_tokens(snapshot) if snapshot.tiers else found["device"]
            computing.expect(asked.num_tokens - round(saved))
