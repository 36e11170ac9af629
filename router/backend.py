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
from collections.abc import AsyncGenerator, Iterator, Mapping, Set
from contextlib import aclosing

import msgspec

from frontend.backend import Bootstrap, Health, ServedModel, Tap
from router.attempt import Progress
from router.cluster import Cluster
from router.groups import Group, Groups
from router.metrics import RouterMetrics
from router.node import Node, Work
from router.policy import Pair, Policy, choose
from telemetry.log import get_logger
from wire.errors import NoNodeAvailable, Overloaded, PeerLost, TandemError
from wire.generation import GenerateRequest
from wire.ids import new_room
from wire.messages import StartDecode, StartPrefill, TokenDelta

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
        self._policy, self._rng = policy, rng
        self._turns = itertools.count()
        self._max_attempts = max_attempts
        self._groups = Groups()
        self._metrics = RouterMetrics()

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
            pair = self._pair_for(group, fingerprint, failed)
            for attempt in itertools.count():
                try:
                    async with aclosing(self._attempt(progress, pair, attempt)) as deltas:
                        async for delta in deltas:
                            if delta.finish is not None:
                                outcome.finished()
                            yield delta
                except TandemError as error:
                    if not self._may_replay(error, attempt):
                        raise
                    self._note_replay(progress, pair, error)
                    failed.add(pair)
                    pair = self._pair_for(group, fingerprint, failed, after=error)
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

    def _pair_for(
        self,
        group: Group,
        fingerprint: str,
        failed: Set[Pair],
        after: TandemError | None = None,
    ) -> Pair:
        """Return the group's pair while it serves and did not fail this request, else a new one."""
        pair = group.pair
        if pair is None or pair in failed or not self._serves(pair, fingerprint):
            group.pair = pair = self._choose(fingerprint, failed, after)
        return pair

    def _serves(self, pair: Pair, fingerprint: str) -> bool:
        nodes = [self._cluster.node(url).snapshot() for url in (pair.prefill, pair.decode)]
        return all(node.is_up and node.fingerprint == fingerprint for node in nodes)

    def _choose(self, fingerprint: str, failed: Set[Pair], after: TandemError | None) -> Pair:
        with self._metrics.pairing():
            snapshot, turn = self._cluster.snapshot(), next(self._turns)
            avoid = {url for pair in failed for url in (pair.prefill, pair.decode)}
            try:
                return choose(snapshot, fingerprint, self._policy, turn, self._rng, avoid=avoid)
            except NoNodeAvailable as none:
                if after is None:
                    raise
                raise NoNodeAvailable(f"{after.message}; {none.message}") from after

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

    async def _attempt(
        self, progress: Progress, pair: Pair, attempt: int
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield what one pair adds to the request. Both halves have ended when it returns.

        Raises:
            TandemError: A half failed before the end; the other is cancelled.
        """
        prefill, decode = self._cluster.node(pair.prefill), self._cluster.node(pair.decode)
        request, wake = progress.remaining(), asyncio.Event()
        start_decode, start_prefill = _starts(request, prefill, attempt)
        with (
            decode.start(start_decode, wake) as decode_work,
            prefill.start(start_prefill, wake) as prefill_work,
        ):
            while not progress.is_finished:
                # Once decode has spoken, only its tokens can follow.
                if progress.sent_ids and not prefill_work.is_counted:
                    decode_work.stream.tap = progress
                await wake.wait()
                wake.clear()
                decode_work.stream.tap = None
                for delta in _arrivals(progress, prefill_work, decode_work):
                    if new := progress.accept(delta):
                        yield new
                    if progress.is_finished:
                        break
            # A finish that came from prefill is not known to decode, which is cancelled here.
            prefill_work.end(is_done=True)


def _starts(
    request: GenerateRequest, prefill: Node, attempt: int
) -> tuple[StartDecode, StartPrefill]:
    """Return the two halves of an attempt, which meet in a room of their own."""
    room = new_room()
    if prefill.bootstrap_port is None:
        raise PeerLost(f"prefill node {prefill.url} tells no bootstrap port any more")
    decode = StartDecode(
        request=request,
        room=room,
        bootstrap_host=prefill.host,
        bootstrap_port=prefill.bootstrap_port,
        attempt=attempt,
    )
    return decode, StartPrefill(request=request, room=room, attempt=attempt)


def _arrivals(progress: Progress, prefill: Work, decode: Work) -> Iterator[TokenDelta]:
    """Yield what waits in both streams, prefill's first: it has the first token."""
    while delta := prefill.stream.take():
        yield delta
    # The nodes' links do not keep pace with each other: while prefill owes log-probabilities of the
    # prompt, which come before all tokens, decode's tokens wait. Its failure does not.
    if progress.awaits_prompt_logprobs and prefill.stream.is_open and not decode.stream.is_empty:
        return
    while delta := decode.stream.take():
        # Decode speaks once every page landed: prefill's part is done, and cannot fail any more.
        prefill.end(is_done=True)
        yield delta
