"""The seam between HTTP and the generation of tokens, by a cluster or by one node's engine.

The frontend knows nothing of nodes, and a backend knows nothing of text.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.frontend.tokenizer import Tokenizer
from tandem.wire.errors import ModelNotFound
from tandem.wire.generation import GenerateRequest, SamplingDefaults
from tandem.wire.messages import NodeLoad, TokenDelta

# A client's name for the one model of any server.
_ANY_MODEL = "default"


class Tap(Protocol):
    """Takes ordinary tokens at once."""

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """Take the next tokens. False: yield them as a delta instead."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where the other half of a request is, if a router of SGLang's kind chose the pair.

    Attributes:
        host: The prefill node. An IPv6 host may be bracketed.
        port: Its bootstrap port. None: the node's own `--bootstrap-port`.
        room: The number under which the halves meet.
    """

    host: str
    port: int | None
    room: int


ALONE = Bootstrap(host="", port=None, room=0)
"""No other half: a node with one role computes one token by itself."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the frontend needs to know of the model.

    Attributes:
        tokenizer: None if the model has none. Then only ids go in and come out.
        default_sampling: The defaults of parameters.
        context_length: Prompt plus generated tokens, at most.
        max_prompt_tokens: At most `context_length - 1`, or less in a small pool.
        weight_version: As in `ModelInfo`.
        adapters: The LoRA adapters that requests may name.
    """

    name: str
    context_length: int
    max_prompt_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    default_sampling: SamplingDefaults
    weight_version: str = "default"
    adapters: tuple[str, ...] = ()

    def adapter_named(self, asked: str | None) -> str:
        """Return the adapter that the `model` of a body names; empty: the model itself.

        Raises:
            ModelNotFound: It is neither.
        """
        if asked is None or asked in {_ANY_MODEL, self.name}:
            return ""
        if asked not in self.adapters:
            raise ModelNotFound(asked, self.name, *self.adapters)
        return asked


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a request sent now can be served, and a sentence for people if not."""

    is_serving: bool
    detail: str


class Backend(Protocol):
    """Generates tokens for the frontend."""

    def model(self) -> ServedModel:
        """Return the model served.

        Raises:
            NoNodeAvailable: The model is not known: no node has been reached yet.
        """

    def generate(
        self,
        request: GenerateRequest,
        bootstrap: Bootstrap | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the tokens of one request, each index once and in order.

        While the caller waits for the next delta, `tap` may get ordinary tokens instead: ids alone, in
        order with the deltas, never the first or the last.

        The last delta has `finish`, and the id that ended a `stop` is its last. Tokens that came while
        the caller was away come as one delta: a slow client costs ids, not events. Closing the
        generator early (`aclose`, or cancelling its task) cancels the request at every node within 1 s.

        Raises:
            TandemError: Before the first delta or between two. The request has left every node.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request by its id, with the finish reason `abort`. False if it is unknown."""

    async def flush_cache(self) -> None:
        """Drop every cached page that nobody reads."""

    def health(self) -> Health:
        """Return whether a request sent now can be served."""

    def tokens_told(self) -> Mapping[object, int]:
        """Return the tokens that each engine read and made by its last report.

        They grow while it works. An engine that restarted or has a new link has a new key.
        """

    def loads(self) -> Sequence[NodeLoad]:
        """Return the load of each node by its last report."""

    def server_info(self) -> Mapping[str, object]:
        """Return what `/server_info` shows, as JSON-like values."""

    def metrics(self) -> str:
        """Return what `/metrics` shows, in Prometheus' text format."""
