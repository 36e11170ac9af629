"""A node's own engine as the frontend's `Backend`.

On prefill and decode a request is one half, and carries where the other is (`Bootstrap`): so routers
made for SGLang's disaggregation can drive our nodes. On a colocated node it is the whole.
"""

from collections.abc import AsyncGenerator, Mapping

import msgspec

from tandem.frontend.backend import ALONE, Bootstrap, Health, ServedModel, Tap
from tandem.frontend.engine_client import EngineClient
from tandem.frontend.tokenizer import Tokenizer
from tandem.kvtransfer.transports.registry import names_of
from tandem.node.config import NodeConfig
from tandem.node.engine_process import Ready
from tandem.node.life import Life, State, num_left, refusal
from tandem.node.metrics import NodeView, render
from tandem.telemetry.version import package_version
from tandem.wire.errors import InvalidRequest, NoNodeAvailable
from tandem.wire.generation import GenerateRequest, Room
from tandem.wire.messages import (
    NodeInfo,
    NodeLoad,
    StartColocated,
    StartDecode,
    StartPrefill,
    TokenDelta,
)

# After so long without a word of its loop an engine counts as hung: three times the longest chunk of a large
# model on a CPU. It answers every half second while it is well.
LOOP_SILENCE_S = 30.0


class LocalBackend:
    """Serves one node's engines, from before the first is ready until the last ends.

    Its supervisor leads its `life`.
    """

    def __init__(
        self, config: NodeConfig, tokenizer: Tokenizer | None, tokenizer_hash: str
    ) -> None:
        self._config, self.life = config, Life(config.role)
        self._tokenizer, self._tokenizer_hash = tokenizer, tokenizer_hash
        self._ready: Ready | None = None
        self._client: EngineClient | None = None

    def attach(self, config: NodeConfig, ready: Ready) -> None:
        """Serve an engine, from its first link on."""
        self._config, self._ready = config, ready

    def link(self, client: EngineClient) -> None:
        """Use this link to the engine, which may have lost one before."""
        if self._client is not None:
            # True until they are reported anew: counters must not seem to begin again.
            client.load, client.measured = self._client.load, self._client.measured
        self._client = client

    def detach(self) -> None:
        """The engine is gone: refuse requests."""
        self._ready = self._client = None

    @property
    def num_left(self) -> int:
        """Requests that the engine has to do with, as it last said."""
        return num_left(self._load())

    def model(self) -> ServedModel:
        """Return the model that the engine serves."""
        ready = self._engine()
        return ServedModel(
            name=ready.model.name,
            context_length=ready.model.context_length,
            max_prompt_tokens=ready.max_prompt_tokens,
            vocab_size=ready.model.vocab_size,
            eos_token_ids=frozenset(ready.model.eos_token_ids),
            tokenizer=self._tokenizer,
            default_sampling=ready.model.default_sampling,
        )

    async def generate(
        self,
        request: GenerateRequest,
        bootstrap: Bootstrap | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Answer a request, or the half of it that this node's role computes."""
        if self._client is None:
            raise NoNodeAvailable(self.life.describe())
        if self.life.is_draining:
            raise refusal()
        with self._client.generate(self._start(request, bootstrap)) as stream:
            async for delta in stream.read(tap):
                yield delta

    def _start(
        self, request: GenerateRequest, bootstrap: Bootstrap | None
    ) -> StartPrefill | StartDecode | StartColocated:
        role = self._config.role
        request = msgspec.structs.replace(request, client="")
        if role == "colocated" or bootstrap is ALONE:
            return StartColocated(request=request)
        if bootstrap is None:
            raise InvalidRequest(
                f"this is a {role} node and runs half of a request: send it to the router, or give "
                "bootstrap_host, bootstrap_port and bootstrap_room"
            )
        room = Room(bootstrap.room)
        if role == "prefill":
            return StartPrefill(request=request, room=room)
        port = bootstrap.port or self._config.transfer.bootstrap_port
        return StartDecode(
            request=request, room=room, bootstrap_host=bootstrap.host, bootstrap_port=port
        )

    async def abort(self, request_id: str) -> bool:
        """Stop a request; False when there is none of this name."""
        return self._client is not None and self._client.abort(request_id)

    async def flush_cache(self) -> None:
        """Drop cached pages that no request reads."""
        if self._client is None:
            raise NoNodeAvailable(self.life.describe())
        self._client.flush_cache()

    def health(self) -> Health:
        """Return whether the node serves, and what it does."""
        if self._client is None:
            return Health(is_serving=False, detail=self.life.describe())
        if not self._client.is_up:
            return Health(is_serving=False, detail="the engine does not answer")
        limit_s = min(LOOP_SILENCE_S, self._config.step_timeout_s)
        if (silent_s := self._client.silent_s) > limit_s:
            # The link is up: its heartbeats need no loop.
            return Health(
                is_serving=False,
                detail=f"the engine's loop has not turned for {silent_s:.0f} s; the node ends when a step "
                f"takes {self._config.step_timeout_s:g} s",
            )
        is_serving = self.life.state is State.SERVING
        return Health(is_serving=is_serving, detail=self.life.describe(self.num_left))

    def tokens_told(self) -> Mapping[object, int]:
        """Return how many tokens each engine has computed."""
        client = self._client
        if client is None or not client.is_up:
            return {}
        return {client: client.load.prompt_tokens + client.load.generated_tokens}

    def server_info(self) -> Mapping[str, object]:
        """Return a `NodeInfo` as JSON-like values; raise `NoNodeAvailable` while the engine is not ready."""
        config, ready = self._config, self._engine()
        info = NodeInfo(
            role=config.role,
            version=package_version(),
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
            model=msgspec.structs.replace(ready.model, tokenizer_hash=self._tokenizer_hash),
        )
        built: dict[str, object] = msgspec.to_builtins(info)
        return built

    def _transports(self) -> list[str]:
        if self._config.role == "colocated":
            return []
        return names_of(self._config.transfer.backend, self._config.engine.device)

    def metrics(self) -> str:
        """Return the metrics as Prometheus reads them."""
        return render(self._view())

    def _view(self) -> NodeView:
        config, client = self._config, self._client
        return NodeView(
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
        if self._ready is None:
            raise NoNodeAvailable(self.life.describe())
        return self._ready

    def _load(self) -> NodeLoad:
        return NodeLoad() if self._client is None else self._client.load
