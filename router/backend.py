"""The cluster as the frontend's `Backend`: pairs nodes, merges their tokens, replays what was lost.

```
 request ──▶ attempt 0 on (P, D) ──finish──▶ done
                  │ P or D failed, and a retry may help
                  ▼
             attempt 1 on another pair, prompt + sent tokens, the index continues ──▶ ...
```
"""

import itertools
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec

from frontend.backend import Bootstrap, Health, ServedModel, Tap
from router.attempt import Progress
from router.cluster import Cluster
from router.groups import Groups
from router.metrics import RouterMetrics
from router.pairing import Pairing
from router.policy import Pair, Policy
from router.running import run_on
from telemetry.log import get_logger
from wire.errors import Overloaded, PeerLost, TandemError
from wire.generation import GenerateRequest
from wire.messages import TokenDelta

log = get_logger(__name__)


class ClusterBackend:
    """Generates on a cluster.

    Args:
        cluster: Whose `run` runs elsewhere.
        max_attempts: How often one request is tried; at least 1.
        rng: For the policies that draw.
    """

    def __init__(
        self, cluster: Cluster, policy: Policy, max_attempts: int, rng: random.Random
    ) -> None:
        self._cluster = cluster
        self._max_attempts = max_attempts
        self._groups = Groups()
        self._metrics = RouterMetrics()
        self._pairing = Pairing(cluster, policy, rng, self._metrics)

    def model(self) -> ServedModel:
        """Return the model served. Raises `NoNodeAvailable` while no pair can serve."""
        return self._cluster.model()

    async def generate(
        self,
        request: GenerateRequest,
        bootstrap: Bootstrap | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the tokens of one request, over as many attempts as it takes; see `Backend`.

        Args:
            bootstrap: Not used: who pairs the nodes is this router.
        """
        with self._metrics.request() as outcome, self._groups.entered(request.group) as group:
            fingerprint = self._cluster.fingerprint()
            progress, failed = Progress(request, tap), set[Pair]()
            pair = self._pairing.pair_for(group, request, fingerprint, failed)
            for attempt in itertools.count():
                try:
                    async with aclosing(run_on(self._cluster, progress, pair, attempt)) as deltas:
                        async for delta in deltas:
                            if delta.finish is not None:
                                outcome.finished()
                            yield delta
                except TandemError as error:
                    if not self._may_replay(error, attempt):
                        raise
                    self._note_replay(progress, pair, error)
                    failed.add(pair)
                    # To compute is all that was sent, too.
                    prompt = request.prompt_ids + progress.sent_ids
                    rest = msgspec.structs.replace(request, prompt_ids=prompt)
                    pair = self._pairing.pair_for(group, rest, fingerprint, failed, after=error)
                else:
                    return

    async def abort(self, request_id: str) -> bool:
        """End a request with reason `abort`. False if it does not run here."""
        nodes = [*self._cluster.prefills, *self._cluster.decodes]
        aborted = [node.client.abort(request_id) for node in nodes if node.client is not None]
        return any(aborted)

    async def flush_cache(self) -> None:
        """Drop the idle cached pages of every node that is up."""
        for node in (*self._cluster.prefills, *self._cluster.decodes):
            if node.is_up and node.client is not None:
                try:
                    node.client.flush_cache()
                except PeerLost as error:  # its cache is gone with it
                    log.debug("node.flush_unsent", url=node.url, reason=error.message)

    def health(self) -> Health:
        """Tell whether a pair can serve now, and what is missing."""
        return self._cluster.health()

    def server_info(self) -> Mapping[str, object]:
        """Return the nodes with their loads, as JSON-like values."""
        health, snapshot = self.health(), self._cluster.snapshot()
        return {
            "role": "router",
            "is_serving": health.is_serving,
            "detail": health.detail,
            "nodes": [
                msgspec.to_builtins(node) for node in (*snapshot.prefills, *snapshot.decodes)
            ],
        }

    def metrics(self) -> str:
        """Return this edge worker's counters."""
        return self._metrics.render(self._cluster.snapshot())

    def _may_replay(self, error: TandemError, attempt: int) -> bool:
        # The policy took the least busy nodes: if even they have no room, the client should wait.
        is_hopeful = error.is_retryable and not isinstance(error, Overloaded)
        return is_hopeful and attempt + 1 < self._max_attempts

    def _note_replay(self, progress: Progress, pair: Pair, error: TandemError) -> None:
        self._metrics.replayed(error)
        log.warning(
            "request.replay",
            request_id=progress.request_id,
            num_sent=len(progress.sent_ids),
            prefill=pair.prefill,
            decode=pair.decode,
            error=error.message,
        )
