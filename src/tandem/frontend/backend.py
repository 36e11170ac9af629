"""The interface between HTTP and token generation, by a cluster or by one node's engine.

The frontend has no notion of nodes, and a backend has no notion of text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.frontend.text.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest, ModelNotFound, NoNodeAvailable
from tandem.wire.generation import GenerateRequest, SamplingDefaults
from tandem.wire.messages import NodeLoad
from tandem.wire.token_stream import TokenReceiver

# Clients may send this name for the served model, whatever its name.
_ANY_MODEL = "default"


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The address of a request's other half, if an SGLang-style router chose the pair.

    Attributes:
        host: Host of the prefill node. An IPv6 host may be bracketed.
        port: Bootstrap port of the prefill node. None: this node's own `--bootstrap-port`.
        room: The number by which the two halves find each other.
        is_sequential: Whether the router starts decode only after prefill's answer.
    """

    host: str
    port: int | None
    room: int
    is_sequential: bool = False


NO_PEER = Bootstrap(host="", port=None, room=0)
"""The request has no other half: a prefill or decode node computes one token by itself."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's properties that the frontend needs.

    Attributes:
        name: The name in answers.
        context_length: Limit of prompt plus generated tokens.
        max_prompt_tokens: Limit of the prompt: `context_length - 1`, or less if the KV pool is small.
        tokenizer: None if the model has none. Requests and answers then contain token ids only.
        default_sampling: Sampling parameters of requests that set none.
        weight_version: As in `ModelInfo`.
        adapters: Ids of the LoRA adapters, by the names that requests may use.
        aliases: More names that requests may use.
    """

    name: str
    context_length: int
    max_prompt_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    default_sampling: SamplingDefaults
    weight_version: str = "default"
    adapters: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the base model; the first is the one in answers."""
        return (self.name, *self.aliases)

    def is_base(self, name: str) -> bool:
        """Return whether a body's `model` names the base model."""
        return name == _ANY_MODEL or name in self.names

    def resolve_adapter(self, name: str | None) -> str:
        """Return the name of the adapter in a body's `model`. Empty: the base model.

        Raises:
            ModelNotFound: `name` is neither the model nor one of its adapters.
        """
        if name is None or self.is_base(name):
            return ""
        if name not in self.adapters:
            raise ModelNotFound(name, *self.names, *self.adapters)
        return name


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that one server serves.

    Attributes:
        models: At least one model.
        unavailable: Names of models that nodes report but no pair serves, with the reasons.
    """

    models: tuple[ServedModel, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        """All names that a body's `model` may have."""
        names = [name for model in self.models for name in (*model.names, *model.adapters)]
        return list(dict.fromkeys([*names, *self.unavailable]))

    def choose(self, name: object) -> ServedModel:
        """Return the model that a body's `model` names. A missing `model` may be None or "default".

        If one model is served, it is returned for every name: its API checks the name with `resolve_adapter`.

        Raises:
            InvalidRequest: Several models are served, and `name` is missing or no string.
            ModelNotFound: Several models are served, and none has this name.
            NoNodeAvailable: No pair serves the model of this name.
        """
        if len(self.models) == 1 and not self.unavailable:
            return self.models[0]
        if not isinstance(name, str | None):
            raise InvalidRequest("model: must be a string")
        name = _ANY_MODEL if name is None else name
        found = [model for model in self.models if name in model.names]
        found += [model for model in self.models if name in model.adapters]
        if not found and name in self.unavailable:
            raise NoNodeAvailable(self.unavailable[name])
        found += self.models if len(self.models) == 1 else ()
        if found:
            return found[0]
        if name == _ANY_MODEL:
            names = ", ".join(map(repr, self.names))
            raise InvalidRequest(f"model: is missing; this router serves {names}")
        raise ModelNotFound(name, *self.names)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a request sent now can be served. `detail` explains the state to people."""

    is_serving: bool
    detail: str


class Backend(Protocol):
    """Generates tokens for the frontend."""

    def models(self) -> ServedModels:
        """Return the models served.

        Raises:
            NoNodeAvailable: No model is known, because no node has been reached yet, or none can serve.
        """

    def check(self, client: str, priority: int) -> None:
        """Refuse a request that would be refused whatever its prompt is. Called before its body is parsed.

        Args:
            client: Name of its API key, or empty.
            priority: The highest that it may have.

        Raises:
            Overloaded, RateLimited: It may not start; carries the time of a retry.
        """

    async def generate(
        self,
        request: GenerateRequest,
        receiver: TokenReceiver,
        bootstrap: Bootstrap | None = None,
        model: str = "",
    ) -> None:
        """Run one request until the receiver has ended.

        The last delta has `finish`; after a `stop`, its last id is the one that matched. Tokens that arrive while the
        receiver has no room are merged into one delta, so that a slow client accumulates ids, not deltas. A receiver
        that ends early, or the cancellation of this task, cancels the request at every node within 1 s.

        Args:
            receiver: Gets the tokens by method calls as they arrive.
            model: The name of a model in `models`; empty: any of them.

        Raises:
            TandemError: The request failed, before the first delta or later. No node still holds it.
            ConnectionError: The receiver's client has disconnected.
        """

    async def abort(self, request_id: str) -> bool:
        """Abort a request by its id, with the finish reason `abort`. False if the id is unknown."""

    async def flush_cache(self) -> None:
        """Drop every cached page that no request is using."""

    async def load_adapter(self, name: str, path: str, *, in_place: bool, model: str = "") -> None:
        """Load a LoRA adapter on every node of a model; requests may then name it.

        Args:
            in_place: Whether it may replace an adapter of this name.
            model: As in `generate`.

        Raises:
            TandemError: A node cannot load it. No node has it then.
        """

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Unload a LoRA adapter on every node of a model. Running requests with it end normally.

        Raises:
            AdapterNotFound: No node has it.
        """

    def health(self) -> Health:
        """Return whether a request sent now can be served."""

    def token_counts(self) -> Mapping[object, int]:
        """Return how many tokens each engine had processed at its last report.

        The counts grow while an engine works. An engine that restarted or reconnected gets a new key.
        """

    def loads(self) -> Sequence[NodeLoad]:
        """Return the last reported load of each node."""

    def server_info(self) -> Mapping[str, object]:
        """Return the content of `/server_info`, as JSON-like values."""

    def metrics(self) -> str:
        """Return the backend's part of `/metrics`, in Prometheus' text format."""
