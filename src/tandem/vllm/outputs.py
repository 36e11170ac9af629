"""What vLLM's engine answers, in our words, so that the role needs no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.vllm.halves import Reports
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs
from tandem.wire.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought for one request.

    Attributes:
        cached_tokens: Prompt tokens that were in the prefix cache; only with the first output.
        finish: None while it goes on.
        error: Why vLLM ended it, if it did.
        prompt_logprobs: Of positions 1 and on.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    cached_tokens: int = 0
    finish: Finish | None = None
    error: str = ""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks and requests now; tokens since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    pages_free: int = 0
    page_size: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Apart:
    """The other half of a request: `bootstrap_*` are given to decode only.

    Attributes:
        draws_first: Whether prefill draws the answer's first token; see `draws_first`.
    """

    room: int
    draws_first: bool
    bootstrap_host: str = ""
    bootstrap_port: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether this half decodes."""
        return bool(self.bootstrap_host)

    def params(self) -> dict[str, object]:
        """Return the request's `kv_transfer_params`."""
        params: dict[str, object] = {"bootstrap_room": self.room, "draws_first": self.draws_first}
        if self.bootstrap_host:
            params |= {
                "bootstrap_host": self.bootstrap_host,
                "bootstrap_port": self.bootstrap_port,
            }
        return params


def draws_first(request: GenerateRequest) -> bool:
    """Tell whether prefill draws the first token of a request that runs apart.

    Then it reaches the client sooner, and is what one process would have drawn, also in bfloat16. vLLM counts it as
    one of the prompt in decode: so not where grammars, penalties or log-probabilities look at the answer alone.
    """
    sampling = request.sampling
    has_penalty = sampling.frequency_penalty or sampling.presence_penalty
    is_plain = sampling.grammar is None and request.logprobs is None and not has_penalty
    return is_plain and sampling.max_new_tokens - request.num_prior_tokens > 1


class Generator(Protocol):
    """vLLM's engine, as the role uses it."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""

    def check(self, request: GenerateRequest, apart: Apart | None) -> object:
        """Return the request in vLLM's words, or raise `InvalidRequest`."""

    def add(self, request_id: str, checked: object) -> None:
        """Queue a checked request under an id that no other has."""

    def abort(self, request_id: str) -> None:
        """End a request; an unknown one is ignored."""

    def step(self) -> list[Output]:
        """Run one step."""

    def take_transfers(self) -> Reports:
        """Return what the connector heard: `handed_off`, `failed` and `landed`."""

    def counts(self) -> Counts:
        """Return what is there now."""

    def flush_cache(self) -> None:
        """Drop the cached blocks that no request reads."""

    @property
    def model(self) -> ModelInfo:
        """The model."""
