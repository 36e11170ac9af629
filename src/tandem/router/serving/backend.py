"""The frontend's `Backend` on a cluster: admits requests, runs each until its last token, and counts outcomes.

Each model has its own queue, places and adapters. All models share the limits of API keys and the counters.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.frontend.backend import Bootstrap, Health, ServedModel, ServedModels
from tandem.router.admission import Admission
from tandem.router.config import AdmissionConfig
from tandem.router.key_limits import KeyUsage
from tandem.router.metrics import RouterMetrics, WorkerCounts
from tandem.router.nodes.adapters import AdapterChanges
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.fleet import Fleet
from tandem.router.pairing.pairing import PairGroups, Pairing
from tandem.router.pairing.policy import Policy
from tandem.router.serving.progress import Progress, RequestTimeline
from tandem.router.serving.request import NodeWait, Request, RequestContext
from tandem.router.serving.suspects import Suspects
from tandem.telemetry.log import get_logger
from tandem.wire.errors import NoNodeAvailable, PeerLost, TandemError
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import NodeLoad
from tandem.wire.token_stream import TokenReceiver

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """What a request for one model passes first."""

    admission: Admission
    adapters: AdapterChanges


class ClusterBackend:
    """Generates on a cluster.

    Args:
        cluster: The nodes; the caller runs `cluster.run`.
        max_attempts: Limit of attempts at one request; at least 1.
        node_wait_s: Seconds that a request waits while a role has no node.
        rng: Source of randomness for policies that need one.
        keys: Limits and usage of the API keys; None: no limits.
        replays_sampled: Whether a node may continue a sampled answer with other draws.

    Attributes:
        pairing: The choice of pairs, with the attempts on each pair.
        suspects: Prompts with which nodes were lost.
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
        keys: KeyUsage | None = None,
        replays_sampled: bool = True,
    ) -> None:
        self._cluster = cluster
        self._groups, self._requests = PairGroups(), dict[str, tuple[Request, Admission]]()
        self._metrics = RouterMetrics()
        self._config = admission or AdmissionConfig()
        self._keys = keys or KeyUsage({})
        self._entries: dict[Fleet, _Entry] = {}
        self._node_wait = NodeWait(node_wait_s, self._config.limits.max_requests)
        self.pairing = Pairing(cluster, policy, rng, self._metrics)
        self.suspects = Suspects()
        self._shared = RequestContext(
            cluster,
            self.pairing,
            self._node_wait,
            max_attempts,
            self._metrics,
            self.suspects,
            replays_sampled,
        )
        cluster.roster.on_change = self._schedule_start
        cluster.on_node_up = self._node_wait.wake_all

    @property
    def leftovers(self) -> dict[str, int]:
        """Resources held for requests, by name: all zero once every request has ended."""
        left = Counter[str]()
        for entry in self._entries.values():
            left.update(entry.admission.leftovers)
        return {
            **left,
            "waiting for nodes": len(self._node_wait),
            "requests": len(self._requests),
            "groups": len(self._groups),
            "suspects": len(self.suspects),
        }

    def models(self) -> ServedModels:
        """Return the models served now or, while requests may wait for nodes, the models served last.

        Of several models, those served last are always included: requests for them fail one by one.

        Raises:
            NoNodeAvailable: No pair can serve, and no model is known for which a request could wait.
        """
        fleets = self._cluster.fleets
        if len(fleets) == 1:
            return ServedModels((_model(fleets[0], may_be_last=bool(self._node_wait.limit_s)),))
        models, unavailable = list[ServedModel](), dict[str, str]()
        has_nodes = any(fleet.has_nodes for fleet in fleets)
        for fleet in fleets:
            try:
                models.append(_model(fleet, may_be_last=fleet.has_nodes or not has_nodes))
            except NoNodeAvailable as error:
                unavailable |= dict.fromkeys(fleet.names, error.message)
        if not models:
            raise NoNodeAvailable(self.health().detail)
        return ServedModels(tuple(models), unavailable)

    def check(self, client: str, priority: int) -> None:
        """Refuse a request by the limits of its key, or because the queue of the only model is full."""
        usage, fleets = self._keys.of(client), self._cluster.fleets
        last = fleets[0].last_model if len(fleets) == 1 else None
        model = "" if last is None else last.name  # of several, the body names one
        with self._metrics.of(model).rejections():
            if usage is not None:
                usage.check(1, asyncio.get_running_loop().time())
            if last is not None:
                self._entry(fleets[0], model).admission.check(client, priority)

    def _entry(self, fleet: Fleet, model: str) -> _Entry:
        metrics = self._metrics.of(model)
        entry = self._entries.get(fleet)
        if entry is None:
            entry = _Entry(
                Admission(fleet.servable, self._config, metrics, self._keys),
                AdapterChanges(fleet.clients),
            )
            known = self._cluster.fleets
            entries = {each: kept for each, kept in self._entries.items() if each in known}
            self._entries = {**entries, fleet: entry}
        entry.admission.metrics = metrics  # the nodes may have renamed their model
        return entry

    def _schedule_start(self) -> None:
        for entry in self._entries.values():
            entry.admission.schedule_start()

    async def generate(
        self,
        request: GenerateRequest,
        receiver: TokenReceiver,
        bootstrap: Bootstrap | None = None,
        model: str = "",
    ) -> None:
        """Wait for admission and run one request; see `Backend`.

        Args:
            bootstrap: Unused, because this router pairs the nodes itself.
        """
        fleet = self._cluster.fleet(model)
        admission, metrics = self._entry(fleet, model).admission, self._metrics.of(model)
        running = Request(self._shared, fleet, receiver)
        self._requests[request.request_id] = running, admission
        try:
            timeline = RequestTimeline()
            admitted = await admission.admit(request)
            if admitted is None:
                receiver.take(Progress(request, receiver).aborted())
                return
            timeline.end("queue")
            progress = Progress(admitted.request, receiver, timeline=timeline)
            group, outcome = self._groups.enter(progress.group), "failed"
            metrics.in_flight.inc()
            try:
                await running.run(progress, group)
                outcome = "finished"
            except (ConnectionError, asyncio.CancelledError):
                outcome = "finished" if receiver.is_ended else "cancelled"
                raise
            except TandemError:
                running.release()
                receiver.take(progress.final_timings())
                raise
            finally:
                running.release()
                self._groups.leave(progress.group)
                admitted.end(len(progress.sent_ids))
                metrics.in_flight.dec()
                metrics.requests[outcome].inc()
        finally:
            del self._requests[request.request_id]

    async def abort(self, request_id: str) -> bool:
        """End a waiting or running request with reason `abort`. Return False if it is not here."""
        held = self._requests.get(request_id)
        if held is None:
            return False
        request, admission = held
        if not admission.abort(request_id):
            request.abort()
        return True

    async def flush_cache(self) -> None:
        """Drop the cached pages that no request uses, on every node that is up."""
        for node in self._cluster.roster:
            if node.is_up and node.client is not None:
                try:
                    node.client.flush_cache()
                except PeerLost as error:  # the cache is lost with the node
                    log.debug("node.flush_unsent", url=node.url, reason=error.message)

    async def load_adapter(self, name: str, path: str, *, in_place: bool, model: str = "") -> None:
        """Load a LoRA adapter on every node that is connected and has the model served now."""
        adapters = self._entry(self._cluster.fleet(model), model).adapters
        await adapters.load(name, path, in_place=in_place)

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Unload a LoRA adapter on these nodes."""
        await self._entry(self._cluster.fleet(model), model).adapters.unload(name)

    def health(self) -> Health:
        """Return whether a pair can serve now, and what is missing."""
        return self._cluster.health()

    def token_counts(self) -> Mapping[object, int]:
        """Return how many tokens each engine had processed at its last report, by its link."""
        clients = [node.client for node in self._cluster.roster]
        return {
            client: client.load.prompt_tokens + client.load.generated_tokens
            for client in clients
            if client is not None and client.is_up
        }

    def loads(self) -> Sequence[NodeLoad]:
        """Return the loads of the prefill nodes, then of the decode nodes."""
        state = self._cluster.state()
        return [node.load for node in (*state.prefills, *state.decodes)]

    def server_info(self) -> Mapping[str, object]:
        """Return the nodes with their loads, as JSON-like values."""
        health, state = self.health(), self._cluster.state()
        return {
            "role": "router",
            "is_serving": health.is_serving,
            "detail": health.detail,
            "nodes": [msgspec.to_builtins(node) for node in (*state.prefills, *state.decodes)],
        }

    def counts(self) -> WorkerCounts:
        """Return the request counts of this edge worker."""
        return self._metrics.counts()

    def metrics(self) -> str:
        """Return the metrics of this edge worker in Prometheus' text format."""
        return self._metrics.render(self._cluster.state(), self._cluster.tier_blocks())


def _model(fleet: Fleet, *, may_be_last: bool) -> ServedModel:
    """Return the model that a fleet serves or, if that is allowed, the one that it served last. Raises `NoNodeAvailable`."""
    try:
        return fleet.model()
    except NoNodeAvailable:
        if fleet.last_model is None or not may_be_last:
            raise
        return fleet.last_model
