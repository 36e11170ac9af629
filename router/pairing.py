"""Which pair the next attempt at a request goes to: its group's, or one that the policy chooses."""

import itertools
import random
from collections.abc import Set

from router.cluster import Cluster
from router.groups import Group
from router.metrics import RouterMetrics
from router.policy import Asked, Pair, Policy, choose
from wire.errors import NoNodeAvailable, TandemError
from wire.generation import GenerateRequest


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
        nodes = [self._cluster.node(url).snapshot() for url in (pair.prefill, pair.decode)]
        return all(node.is_up and node.fingerprint == fingerprint for node in nodes)

    def _choose(
        self,
        request: GenerateRequest,
        fingerprint: str,
        failed: Set[Pair],
        after: TandemError | None,
    ) -> Pair:
        with self._metrics.pairing():
            snapshot, turn = self._cluster.snapshot(), next(self._turns)
            avoid = {url for pair in failed for url in (pair.prefill, pair.decode)}
            asked = Asked.of(request)
            try:
                pair = choose(
                    snapshot,
                    fingerprint,
                    self._policy,
                    turn,
                    self._rng,
                    asked=asked,
                    avoid=avoid,
                )
            except NoNodeAvailable as none:
                if after is None:
                    raise
                raise NoNodeAvailable(f"{after.message}; {none.message}") from after
            prefill = self._cluster.node(pair.prefill)
            prefill.expect(asked.num_tokens - asked.cached_tokens(prefill.snapshot()))
            self._cluster.node(pair.decode).expect(asked.num_tokens)
            return pair
