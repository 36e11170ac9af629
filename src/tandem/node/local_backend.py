"""The frontend's `Backend` for a node's own engine.

On prefill and decode nodes a request is one half and carries the address of the other half (`Bootstrap`), so that
routers for SGLang's disaggregation work with these nodes. On a colocated node it is a whole request.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from tandem import __version__
from tandem.frontend.backend import NO_PEER, Bootstrap, Health, ServedModel, ServedModels
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.node.config import NodeConfig, transports_of
from tandem.node.life.engine_process import Ready
from tandem.node.life.life import Life, NodeState, num_left, refusal
from tandem.node.metrics import NodeScrape, render
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import AdapterNotFound, InvalidRequest, NoNodeAvailable
from tandem.wire.generation import GenerateRequest, Room, query_answer
from tandem.wire.messages import (
    OWN_ENGINE,
    LoadAdapter,
    NodeInfo,
    NodeLoad,
    StartColocated,
    StartDecode,
    StartPrefill,
    UnloadAdapter,
)
from tandem.wire.token_stream import Relay, SoleStream, TokenReceiver

# Silence after which an engine counts as hung: three times the longest chunk of a large model on a CPU. A healthy
# engine answers every ping, and an idle one is pinged in every other interval.
LOOP_SILENCE_S = 30.0


class LocalBackend:
    """Serves the engines of one node, from before the first is ready until after the last has ended.

    The supervisor changes `life`.
    """

    def __init__(
        self, config: NodeConfig, tokenizer: Tokenizer | None, tokenizer_hash: str
    ) -> None:
        self._config, self.life = config, Life(config.role)
        self._tokenizer, self._tokenizer_hash = tokenizer, tokenizer_hash
        self._ready: Ready | None = None
        self._client: EngineClient | None = None

    def attach(self, config: NodeConfig, ready: Ready) -> None:
        """Start to serve an engine; requests are accepted after the first `link`."""
        self._config, self._ready = config, ready

    def link(self, client: EngineClient) -> None:
        """Use a new link to the engine: the first one, or the replacement of a lost one."""
        if self._client is not None:
            # Keep the last values until the engine reports again, so that counters do not restart at 0.
            client.load, client.measured = self._client.load, self._client.measured
        self._client = client

    def detach(self) -> None:
        """Reject requests from now on, because the engine is stopping or has ended."""
        self._ready = self._client = None

    @property
    def is_linked(self) -> bool:
        """Whether the engine has answered over the present link."""
        return self._client is not None and self._client.is_up

    @property
    def num_left(self) -> int:
        """Number of requests in the engine at its last report."""
        return num_left(self._load())

    def models(self) -> ServedModels:
        """Return the model that the engine serves."""
        ready = self._engine()
        model = ServedModel(
            name=ready.model.name,
            context_length=ready.model.context_length,
            max_prompt_tokens=ready.max_prompt_tokens,
            vocab_size=ready.model.vocab_size,
            eos_token_ids=frozenset(ready.model.eos_token_ids),
            tokenizer=self._tokenizer,
            default_sampling=ready.model.default_sampling,
            weight_version=ready.model.weight_version,
            adapters={each.name: each.id for each in self._load().adapters},
            aliases=tuple(ready.model.aliases),
        )
        return ServedModels((model,))

    def check(self, client: str, priority: int) -> None:
        """Accept every request: its router has admitted it."""

    async def generate(
        self,
        request: GenerateRequest,
        receiver: TokenReceiver,
        bootstrap: Bootstrap | None = None,
        model: str = "",
    ) -> None:
        """Generate the answer of a whole request, or run this node's half of it. It has one `model`."""
        if self._client is None:
            raise NoNodeAvailable(self.life.describe())
        if self.life.is_draining:
            raise refusal()
        relay = Relay(receiver)
        with self._client.generate(self._start(request, bootstrap), relay.on_change) as stream:
            await relay.run(SoleStream(stream, receiver).take)

    def _start(
        self, request: GenerateRequest, bootstrap: Bootstrap | None
    ) -> StartPrefill | StartDecode | StartColocated:
        role = self._config.role
        request = msgspec.structs.replace(request, client="")
        # Routers send decode alone what is not worth a hand-off, such as short prompts.
        if bootstrap is NO_PEER or (bootstrap is None and role != "prefill"):
            return StartColocated(request=request)
        if bootstrap is None:
            raise InvalidRequest(
                "this is a prefill node, which runs one half of a request; use the router, or set bootstrap_host, "
                "bootstrap_port and bootstrap_room"
            )
        room = Room(bootstrap.room)
        if role == "prefill" and bootstrap.is_sequential:
            # Its router waits for this answer before it starts decode.
            sampling = msgspec.structs.replace(
                request.sampling,
                max_new_tokens=1,
                min_new_tokens=min(request.sampling.min_new_tokens, 1),
            )
            request = msgspec.structs.replace(request, sampling=sampling)
            return StartPrefill(request=request, room=room, waits_for_grant=False)
        if role == "prefill":
            return StartPrefill(request=request, room=room)
        if not bootstrap.host:
            raise InvalidRequest(
                f"this is a {role} node, and do_remote_decode names prefill's half of a request"
            )
        port = bootstrap.port or self._config.transfer.bootstrap_port
        return StartDecode(
            request=request, room=room, bootstrap_host=bootstrap.host, bootstrap_port=port
        )

    async def abort(self, request_id: str) -> bool:
        """Stop a request; return False if no request has this id."""
        return self._client is not None and self._client.abort(request_id)

    async def flush_cache(self) -> None:
        """Drop the cached pages that no request reads."""
        if self._client is None:
            raise NoNodeAvailable(self.life.describe())
        self._client.flush_cache()

    async def load_adapter(self, name: str, path: str, *, in_place: bool, model: str = "") -> None:
        """Load a LoRA adapter, then unload the others of its name."""
        if self._client is None:
            raise NoNodeAvailable(self.life.describe())
        load = LoadAdapter(name=name, path=path, in_place=in_place)
        adapter = await self._client.change_adapter(load)
        await self._unload(
            {each.id for each in self._load().adapters if each.name == name} - {adapter}
        )

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Unload a LoRA adapter."""
        adapters = {each.id for each in self._load().adapters if each.name == name}
        if not adapters:
            raise AdapterNotFound(name)
        await self._unload(adapters)

    async def _unload(self, adapters: Collection[str]) -> None:
        for adapter in adapters:
            if self._client is not None:
                await self._client.change_adapter(UnloadAdapter(adapter=adapter))

    def health(self) -> Health:
        """Return whether the node serves, and a description of its state."""
        if self._client is None or self.life.is_loading:
            return Health(is_serving=False, detail=self.life.describe())
        if not self.is_linked:
            return Health(is_serving=False, detail="the engine does not answer")
        limit_s = max(
            min(LOOP_SILENCE_S, self._config.step_timeout_s), 5 * self._config.heartbeat.interval_s
        )
        if (silent_s := self._client.silent_s) > limit_s:
            # The link can be up although the loop hangs: its heartbeats do not depend on the loop.
            return Health(
                is_serving=False,
                detail=f"the engine's loop has been stuck for {silent_s:.0f} s; the node exits when a step "
                f"takes {self._config.step_timeout_s:g} s",
            )
        is_serving = self.life.state is NodeState.SERVING
        return Health(is_serving=is_serving, detail=self.life.describe(self.num_left))

    def token_counts(self) -> Mapping[object, int]:
        """Return how many tokens the engine had processed at its last report; empty without a link."""
        client = self._client
        if client is None or not client.is_up:
            return {}
        return {client: client.load.prompt_tokens + client.load.generated_tokens}

    def loads(self) -> Sequence[NodeLoad]:
        """Return the load of this node."""
        return [self._load()]

    def server_info(self) -> Mapping[str, object]:
        """Return a `NodeInfo` as JSON values, and what SGLang's servers report; raise `NoNodeAvailable` until the engine is ready."""
        config, ready = self._config, self._engine()
        info = NodeInfo(
            role=config.role,
            version=__version__,
            epoch=ready.epoch,
            engine_port=ready.engine_port,
            bootstrap_port=ready.bootstrap_port,
            is_healthy=self.health().is_serving,
            is_draining=self.life.is_draining,
            max_prompt_tokens=ready.max_prompt_tokens,
            load=self._load(),
            tp_size=config.engine.tp_size,
            transports=self._transports(),
            zone=config.zone,
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            takes_prompts=config.role != "prefill",
            engine="vllm" if config.simulation.engine == "vllm" else OWN_ENGINE,
            model=msgspec.structs.replace(ready.model, tokenizer_hash=self._tokenizer_hash),
        )
        built: dict[str, object] = msgspec.to_builtins(info)
        return built | {
            "disaggregation_mode": "null" if config.role == "colocated" else config.role,
            "disaggregation_bootstrap_port": ready.bootstrap_port,
            "incremental_streaming_output": config.is_incremental_output,
            "context_length": ready.model.context_length,
            # SGLang rejects prompts of this length.
            "max_req_input_len": ready.max_prompt_tokens + 1,
            "page_size": info.load.page_size,
            "dp_size": 1,
        }

    def query(self) -> Mapping[str, object]:
        """Return the answer to `GET /query` of vLLM's routers, as JSON values; raise `NoNodeAvailable` until the engine is ready."""
        port = self._engine().bootstrap_port
        if port is None:
            raise InvalidRequest("this is no prefill node: it has no bootstrap port")
        return query_answer(self._config.host, port)

    def _transports(self) -> list[str]:
        if self._config.role == "colocated":
            return []
        return transports_of(self._config)

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return render(self._view())

    def _view(self) -> NodeScrape:
        config, client = self._config, self._client
        return NodeScrape(
            role=config.role,
            state=self.life.state,
            facts={
                "model": config.served_model_name,
                "fingerprint": "" if self._ready is None else self._ready.model.fingerprint,
                "device": config.engine.device,
                "tp_size": str(config.engine.tp_size),
                "transports": ",".join(self._transports()),
                "zone": config.zone,
            },
            load=self._load(),
            measured=None if client is None else client.measured,
        )

    def _engine(self) -> Ready:
        if self._ready is None or self.life.is_loading:
            raise NoNodeAvailable(self.life.describe())
        return self._ready

    def _load(self) -> NodeLoad:
        return NodeLoad() if self._client is None else self._client.load
