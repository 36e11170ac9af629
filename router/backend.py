"""The cluster as the frontend's `Backend`: pairs nodes, merges their tokens, replays what was lost.

```
 request ──▶ attempt 0 on (P, D) ──finish──▶ done
                  │ P or D failed, and a retry may help
                  ▼
             attempt 1 on another pair, prompt + sent tokens, the index continues ──▶ ...
```
"""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec

from tandem.frontend.backend import Bootstrap, Health, ServedModel, Tap
from tandem.frontend.middleware import public_info
from tandem.router.attempt import Progress
from tandem.router.cluster import Cluster
from tandem.router.config import AdmissionConfig
from tandem.router.events import Events
from tandem.router.gate import Gate
from tandem.router.groups import Group, Groups
from tandem.router.metrics import Counts, RouterMetrics
from tandem.router.pairing import Pairing
from tandem.router.pairs_in_use import PairsInUse
from tandem.router.policy import Pair, Policy
from tandem.router.recent import RecentRequests
from tandem.router.replays import Replays
from tandem.router.running import are_alive, run_on
from tandem.router.trail import Trail
from tandem.router.waiters import WaitAborted, Waiter
from tandem.telemetry.log import get_logger
from tandem.wire.errors import NoNodeAvailable, PeerLost, TandemError
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import TokenDelta

log = get_logger(__name__)

T = TypeVar("T")


class ClusterBackend:
    """Generates on a cluster.

    Args:
        cluster: Whose `run` runs elsewhere.
        max_attempts: How often one request is tried; at least 1.
        node_wait_s: How long a request waits for a role that has no node.
        rng: For the policies that draw.
        admission: Which requests start when.

    Attributes:
        recent: Timings of requests that ended.
        events: What happened to requests, for people.
        pairs: Those that attempts run on.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        max_attempts: int,
        rng: random.Random,
        node_wait_s: float = 0.0,
        *,
        admission: AdmissionConfig | None = None,
    ) -> None:
        self._cluster = cluster
        self._max_attempts, self._node_wait_s = max_attempts, node_wait_s
        self._groups = Groups()
        self._metrics = RouterMetrics()
        self.recent, self.events, self.pairs = RecentRequests(), Events(), PairsInUse()
        self._pairing = Pairing(cluster, policy, rng, self._metrics)
        admission = admission or AdmissionConfig()
        self._max_waiting = admission.limits.max_requests
        self._gate = Gate(cluster.servable, admission, self._metrics)
        cluster.roster.on_change = self._gate.look

    def model(self) -> ServedModel:
        """Return the model served.

        Raises:
            NoNodeAvailable: No pair can serve, and none did: a request would not know what to wait for.
        """
        try:
            return self._cluster.model()
        except NoNodeAvailable:
            last = self._cluster.last_model
            if last is None or not self._node_wait_s:
                raise
            return last

    async def generate(
        self,
        request: GenerateRequest,
        bootstrap: Bootstrap | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the tokens of one request once there is room for it; see `Backend`.

        Args:
            bootstrap: Not used: who pairs the nodes is this router.
        """
        trail = Trail()
        with self._cluster.waiters.entered(request.request_id) as waiter:
            async with self._gate.admitted(request, tap) as visit:
                if visit is None:
                    yield Progress(request).aborted()
                    return
                trail.end("queue")
                progress = Progress(visit.request, visit.tap, trail=trail)
                async with aclosing(self._counted(progress, waiter)) as deltas:
                    try:
                        async for delta in deltas:
                            visit.saw(delta)
                            yield delta
                    except TandemError:
                        yield progress.last_words()
                        raise

    async def _counted(
        self, progress: Progress, waiter: Waiter
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the tokens of one request that has room, and count how it ends."""
        group_name = progress.group
        with self._metrics.request() as outcome, self._groups.entered(group_name) as group:
            try:
                async with aclosing(self._attempts(progress, group, waiter)) as deltas:
                    async for delta in deltas:
                        if delta.finish is not None:
                            outcome.finished()
                        yield delta
            except WaitAborted:  # requests that run are ended by their streams
                outcome.finished()
                yield progress.aborted()

    async def _attempts(
        self, progress: Progress, group: Group, waiter: Waiter
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield what attempts give, one after the other, until the request has ended.

        Raises:
            TandemError: No further attempt helps, or none may be made.
            WaitAborted: Somebody ended the request while no attempt ran.
        """
        fingerprint = await self._when_up(waiter, self._cluster.fingerprint)
        replays, failed = Replays(self._max_attempts), set[Pair]()
        choose = partial(self._pairing.pair_for, group, fingerprint=fingerprint, failed=failed)
        pair = await self._when_up(waiter, partial(choose, progress.to_place()))
        for attempt in itertools.count():
            progress.trail.end("pair", pair.decode)
            try:
                running = run_on(self._cluster, progress, pair, attempt)
                with self.pairs.attempt(pair, len(progress.to_place().prompt_ids)):
                    async with aclosing(running) as deltas:
                        async for delta in deltas:
                            yield delta
            except TandemError as error:
                replays.after(error)
                lost = error
            else:
                return
            progress.trail.lost()
            self._note_replay(progress, pair, lost)
            failed.add(pair)
            again = partial(choose, progress.to_place(), after=lost)
            pair = await self._when_up(waiter, again)
            while not await are_alive(self._cluster, pair):
                pair = await self._when_up(waiter, again)
            waiter.check()

    async def _when_up(self, waiter: Waiter, look: Callable[[], T]) -> T:
        """Return what `look` finds, waiting for nodes that it lacks.

        Raises:
            NoNodeAvailable: They did not come within `node_wait_s`.
            WaitAborted: Somebody ended the request meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + self._node_wait_s
        while True:
            waiter.check()
            try:
                return look()
            except NoNodeAvailable:
                is_crowded = len(self._cluster.waiters) >= self._max_waiting
                if is_crowded or not await waiter.before(deadline):
                    raise

    async def abort(self, request_id: str) -> bool:
        """End a request with reason `abort`. False if it does not run here."""
        nodes = [*self._cluster.prefills, *self._cluster.decodes]
        was_running = [node.client.abort(request_id) for node in nodes if node.client is not None]
        was_in_line = self._gate.abort(request_id)
        # Also where neither a line nor a node has it: between two attempts.
        return self._cluster.waiters.abort(request_id) or was_in_line or any(was_running)

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

    def tokens_told(self) -> Mapping[object, int]:
        """See `Backend.tokens_told`."""
        clients = [node.client for node in self._cluster.roster]
        return {
            client: client.load.prompt_tokens + client.load.generated_tokens
            for client in clients
            if client is not None and client.is_up
        }

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

    def counts(self) -> Counts:
        """Return what this edge worker has counted."""
        return self._metrics.counts()

    def metrics(self) -> str:
        """Return this edge worker's counters."""
        return self._metrics.render(self._cluster.snapshot(), self._cluster.tier_blocks())

    def _note_replay(self, progress: Progress, pair: Pair, error: TandemError) -> None:
        self._metrics.replayed(error)
        self.events.tell(
            "replay",
            f"{public_info(error).message} ({error.code})",
            alike=f"{error.code} {pair.prefill} {pair.decode}",
        )
        log.warning(
            "request.replay",
            request_id=progress.request_id,
            num_sent=len(progress.sent_ids),
            prefill=pair.prefill,
            decode=pair.decode,
            error=error.message,
        )
