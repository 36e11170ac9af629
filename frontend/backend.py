"""The seam between HTTP and whatever generates tokens: a cluster, or one node's engine.

The frontend is given a `Backend` and knows nothing of nodes; a backend knows nothing of text.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.frontend.tokenizer import Tokenizer
from tandem.wire.generation import GenerateRequest, SamplingDefaults
from tandem.wire.messages import TokenDelta


class Tap(Protocol):
    """Takes ordinary tokens at once."""

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """Take what stands behind everything before, or say no to have it yielded as a delta."""
        ...


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where the other half of a request is, when a router of SGLang's kind chose the pair.

    Attributes:
        host: Of the prefill node. An IPv6 host may be bracketed.
        port: Of its bootstrap socket; None means the node's own `--bootstrap-port`.
        room: Under which the halves meet.
    """

    host: str
    port: int | None
    room: int


ALONE = Bootstrap(host="", port=None, room=0)
"""No other half: a node with one role computes a request of one token by itself."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the frontend needs to know of the model.

    Attributes:
        tokenizer: None when the model has none: then only ids go in and come out.
        default_sampling: What stands for parameters that a request leaves out.
        context_length: Prompt plus generated tokens, at most.
        max_prompt_tokens: At most `context_length - 1`; smaller when the pool is.
    """

    name: str
    context_length: int
    max_prompt_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    default_sampling: SamplingDefaults


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a request sent now can be served, and a sentence for people when not."""

    is_serving: bool
    detail: str


class Backend(Protocol):
    """Generates tokens for the frontend."""

    def model(self) -> ServedModel:
        """Return the model served.

        Raises:
            NoNodeAvailable: No node has been reached yet, so it is not known.
        """
        ...

    def generate(
        self,
        request: GenerateRequest,
        bootstrap: Bootstrap | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the tokens of one request, each index once and in order.

        While the caller waits for the next delta, a token of which there is nothing more to say than
        its id may be given to `tap` instead: never the first, never the last, and in order with what
        is yielded. It must not wait.

        The last delta has `finish`, and the id that ended a `stop` is its last. What came while
        the caller was away comes as one delta, so that a slow client costs ids and not events.
        Closing the generator early (`aclose`, or cancelling the task that awaits it) cancels the
        request at every node within 1 s.

        Raises:
            TandemError: Before the first delta or between two; nothing of the request is left.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request by its id; its stream finishes with reason `abort`. False if unknown."""
        ...

    async def flush_cache(self) -> None:
        """Drop every cached page that nobody reads."""
        ...

    def health(self) -> Health:
        """Tell whether a request sent now can be served."""
        ...

    def tokens_told(self) -> Mapping[object, int]:
        """Return the tokens that each engine read and made, as it last told: they grow while it works.

        An engine that restarted, or that is heard over a new link, has another key.
        """
        ...

    def server_info(self) -> Mapping[str, object]:
        """Return what `/server_info` shows, as JSON-like values."""
        ...

    def metrics(self) -> str:
        """Return what `/metrics` shows, in Prometheus' text format."""
        ...
