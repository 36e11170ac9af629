"""What a step produced, for a role to act on."""

from dataclasses import dataclass, field

import msgspec

from tandem.engine.request import ActiveRequest
from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, TokenLogprobs


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token.

    Attributes:
        index: Among the generated tokens of all attempts.
        logprobs: When wanted, and known here.
    """

    request: ActiveRequest
    index: int
    token: int
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, told with the first token only."""
        is_first = self.index == self.request.request.num_prior_tokens
        return self.request.num_cached if is_first else 0

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Of these, those that tiers brought for this request."""
        left, by_tier = self.cached_tokens, {}
        for name, num_tokens in (self.request.from_tiers or {}).items() if left else ():
            by_tier[name] = min(left, num_tokens)
            left -= by_tier[name]
        return by_tier


@dataclass(frozen=True, slots=True)
class CompletePages:
    """Pages of a prompt-only request that no later forward changes: they may be pushed."""

    request: ActiveRequest
    first_page: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt positions; runs of a request come in order."""

    request: ActiveRequest
    first_position: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk of a prompt whose forward was collected."""

    request: ActiveRequest
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended because of an error of its own; nothing is left of it."""

    request: ActiveRequest
    error: TandemError


@dataclass(slots=True)
class StepResult:
    """What one step produced."""

    tokens: list[Token] = field(default_factory=list)
    pages: list[CompletePages] = field(default_factory=list)
    chunks: list[Computed] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
