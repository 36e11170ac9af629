"""The cluster as the frontend's `Backend`: admits requests, serves each until its last token, counts how it ends."""

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from tandem.frontend.backend import Bootstrap, Health, ServedModel, Tap
from tandem.router.admission import Admission
from tandem.router.cluster import Cluster
from tandem.router.config import AdmissionConfig
from tandem.router.metrics import Counts, RouterMetrics
from tandem.router.pairing import Groups, Pairing
from tandem.router.policy import Policy
from tandem.router.progress import Progress, Trail
from tandem.router.request import NodeWait, Request, Shared
from tandem.telemetry.log import get_logger
from tandem.wire.errors import NoNodeAvailable, PeerLost, TandemError
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import NodeLoad, TokenDelta

log = get_logger(__name__)


class ClusterBackend:
    """Generates on a cluster.

    Args:
        cluster: Its `run` is the caller's to run.
        max_attempts: How often one request is tried; at least 1.
        node_wait_s: How long a request waits for a role that has no node.
        rng: For the policies that draw.

    Attributes:
        pairing: Counts what each pair is given.
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
        self._groups, self._requests = Groups(), dict[str, Request]()
        self._metrics = RouterMetrics()
        admission = admission or AdmissionConfig()
        self._node_wait = NodeWait(node_wait_s, admission.limits.max_requests)
        self.pairing = Pairing(cluster, policy, rng, self._metrics)
        self._shared = Shared(cluster, self.pairing, self._node_wait, max_attempts, self._metrics)
        self._admission = Admission(cluster.servable, admission, self._metrics)
        cluster.roster.on_change = self._admission.look
        cluster.came_up = self._node_wait.wake_all

    @property
    def leftovers(self) -> dict[str, int]:
        """What is held for requests now, by name: all zero once every request has ended."""
        return self._admission.leftovers | {
            "waiting for nodes": len(self._node_wait),
            "requests": len(self._requests),
            "groups": len(self._groups),
        }

    def model(self) -> ServedModel:
        """Return the model served, or the last one that was while requests may wait for nodes.

        Raises:
            NoNodeAvailable: No pair can serve, and none did: a request would not know what to wait for.
        """
        try:
            return self._cluster.model()
        except NoNodeAvailable:
            last = self._cluster.last_model
            if last is None or not self._node_wait.limit_s:
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
            bootstrap: Not used: this router pairs the nodes.
        """
        trail, serving = Trail(), Request(self._shared)
        self._requests[request.request_id] = serving
        try:
            async with self._admission.admitted(request) as admitted:
                if admitted is None:
                    yield Progress(request).aborted()
                    return
                trail.end("queue")
                progress = Progress(admitted.request, tap, trail=trail)
                outcome = "failed"
                with (
                    self._metrics.in_flight.track_inprogress(),
                    self._groups.entered(progress.group) as group,
                ):
                    try:
                        serving.begin(progress, group)
                        while (delta := await serving.next()) is not None:
                            if delta.finish is not None:
                                # Its reader may leave now.
                                outcome = "finished"
                            yield delta
                    except (GeneratorExit, asyncio.CancelledError):
                        outcome = "finished" if progress.is_finished else "cancelled"
                        raise
                    except TandemError:
                        serving.end()
                        yield progress.last_words()
                        raise
                    finally:
                        serving.end()
                        admitted.answered(len(progress.sent_ids))
                        self._metrics.requests.labels(outcome).inc()
        finally:
            if self._requests.get(request.request_id) is serving:
                del self._requests[request.request_id]

    async def abort(self, request_id: str) -> bool:
        """End a request with reason `abort`, whatever it waits for. False if it does not run here."""
        request = self._requests.get(request_id)
        if request is not None and not self._admission.abort(request_id):
            request.abort()
        return request is not None

    async def flush_cache(self) -> None:
        """Drop the idle cached pages of every node that is up."""
        for node in self._cluster.roster:
            if node.is_up and node.client is not None:
                try:
                    node.client.flush_cache()
                except PeerLost as error:  # its cache is gone with it
                    log.debug("node.flush_unsent", url=node.url, reason=error.message)

    def health(self) -> Health:
        """Tell whether a pair can serve now, and what is missing."""
        return self._cluster.health()

    def tokens_told(self) -> Mapping[object, int]:
        """Return the tokens that each engine read and made, by its link."""
        clients = [node.client for node in self._cluster.roster]
        return {
            client: client.load.prompt_tokens + client.load.generated_tokens
            for client in clients
            if client is not None and client.is_up
        }

    def loads(self) -> Sequence[NodeLoad]:
        """Return the loads of the prefills, then of the decodes."""
        snapshot = self._cluster.snapshot()
        return [node.load for node in (*snapshot.prefills, *snapshot.decodes)]

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
