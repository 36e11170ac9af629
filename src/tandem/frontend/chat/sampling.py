"""Sampling parameters: the fields of each API with their ranges, converted for the engine and the edge.

`SamplingBody` has the parameters that all APIs share. `NativeSampling` and `OpenAISampling` set their names and
defaults. `engine_params` returns the engine's part, and `text_rules` the edge's.
"""

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, field
from typing_extensions import override

from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import Body, validate, without_nulls
from tandem.frontend.text.stops import (
    MAX_PATTERN_CHARS,
    StopPattern,
    TextRules,
    compile_pattern,
    pattern_of_strings,
)
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar, SamplingParams

# OpenAI allows 4 stop strings. These limits are more generous but still bound the work per token.
MAX_STOPS = 64
MAX_STOP_CHARS = 512
# For all prompts of one body together: compiling one pattern blocks the loop for up to 2 ms.
MAX_STOP_PATTERNS = 16
MAX_STOP_TOKEN_IDS = 1024
# OpenAI allows 300 entries.
MAX_LOGIT_BIAS = 1024
# OpenAI's limit.
MAX_N = 128
_SEED_BITS = 63
_MIN_TOP_P = 1e-6


Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
_Pattern = Annotated[str, Meta(max_length=MAX_PATTERN_CHARS)]
_Patterns = Annotated[list[_Pattern], Meta(max_length=MAX_STOP_PATTERNS)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
_LogitBias = Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)]


class SamplingBody(Body, dict=True):
    """Sampling parameters that all APIs share. `dict=True` lets `text_rules` be cached."""

    max_new_tokens: NotNegative | None = None
    min_new_tokens: NotNegative = 0
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    min_p: Share = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] = field(default_factory=list)
    stop_regex: _Pattern | _Patterns = field(default_factory=list)
    stop_token_ids: _TokenIds = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: Positive = 1
    logit_bias: _LogitBias = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert equivalent values to one form."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if isinstance(self.stop_regex, str):
            self.stop_regex = [self.stop_regex]
        # 0 means all in vLLM, -1 in SGLang. No vocabulary has 2**31 tokens.
        self.top_k = self.top_k if 0 < self.top_k < 2**31 else -1
        # OpenAI allows 0, which selects the most likely token. A very small value has the same effect.
        self.top_p = max(self.top_p, _MIN_TOP_P)

    @cached_property
    def text_rules(self) -> TextRules:
        """The edge's rules for the text. Built once, for all generations."""
        stops = tuple(stop for stop in self.stop if stop)
        return TextRules(
            stops=stops,
            patterns=self._patterns(stops),
            keeps_stop=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            min_new_tokens=self.min_new_tokens,
            stream_interval=self.stream_interval,
            is_silent=self.max_new_tokens == 0,
        )

    def _patterns(self, stops: tuple[str, ...]) -> tuple[StopPattern, ...]:
        try:
            patterns = [compile_pattern(pattern) for pattern in self.stop_regex if pattern]
        except ValueError as error:
            raise InvalidRequest(f"stop_regex: {error}") from error
        return (*patterns, pattern_of_strings(stops)) if patterns and stops else tuple(patterns)


SamplingT = TypeVar("SamplingT", bound=SamplingBody)


class NativeSampling(SamplingBody):
    """`sampling_params` of `/generate`, with SGLang's names and defaults."""

    max_new_tokens: NotNegative | None = 128
    sampling_seed: int | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed = self.seed if self.sampling_seed is None else self.sampling_seed


class OpenAISampling(SamplingBody):
    """Sampling parameters of the `/v1` routes, with the common extensions.

    If no maximum is set, an answer may fill the context.
    """

    max_new_tokens: Positive | None = field(name="max_completion_tokens", default=None)
    max_tokens: Positive | None = None
    min_new_tokens: NotNegative = field(name="min_tokens", default=0)
    top_p: Share = 1.0
    include_stop_str_in_output: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is None:
            self.max_new_tokens = self.max_tokens
        self.no_stop_trim = self.no_stop_trim or self.include_stop_str_in_output


class CompletionSampling(OpenAISampling):
    """Sampling parameters of `/v1/completions`, with OpenAI's default length."""

    max_new_tokens: NotNegative | None = field(name="max_completion_tokens", default=None)
    max_tokens: NotNegative | None = 16


def read_sampling(
    body_class: type[SamplingT], data: Mapping[str, object], model: ServedModel, prefix: str = ""
) -> SamplingT:
    """Return the sampling parameters in `data`. Missing ones get the model's defaults, then the API's."""
    params = msgspec.structs.asdict(model.default_sampling) | without_nulls(data)
    return validate(body_class, params, prefix)


def engine_params(
    body: SamplingBody, model: ServedModel, num_prompt_tokens: int, grammar: Grammar | None
) -> SamplingParams:
    """Return the engine's parameters for one prompt, without a seed.

    `max_new_tokens` is limited to the rest of the context, which is also its default. An engine generates at
    least one token; for 0, `TextRules` hides it.
    """
    room = model.context_length - num_prompt_tokens
    max_new_tokens = room if body.max_new_tokens is None else min(body.max_new_tokens, room)
    if body.max_new_tokens is not None and body.min_new_tokens > body.max_new_tokens:
        raise InvalidRequest(
            f"the minimum of {body.min_new_tokens} new tokens exceeds the maximum of "
            f"{body.max_new_tokens}; lower the minimum or raise the maximum"
        )
    _check_bias(body.logit_bias, model.vocab_size)
    return SamplingParams(
        max_new_tokens=max(1, max_new_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(body.top_k, model.vocab_size),
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        min_new_tokens=min(body.min_new_tokens, max_new_tokens),
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logit_bias=body.logit_bias,
        grammar=grammar,
    )


def require_tokens(body: SamplingBody, field: str) -> None:
    """Reject a maximum of 0 tokens, which is useful only for an echo or logprobs of the prompt."""
    if body.max_new_tokens == 0:
        raise InvalidRequest(f"{field}: must be at least 1")


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    for token_id in bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size}"
            )


def seeds(seed: int | None, count: int, *, is_left_open: bool = False) -> list[int | None]:
    """Return a seed for each of `count` generations of one prompt.

    Args:
        seed: The client's seed, any integer. Each further generation adds one to it. None: random seeds.
        is_left_open: Return None instead of random seeds, so that the node that samples first chooses one.
    """
    if seed is not None:
        return [(seed + offset) % 2**_SEED_BITS for offset in range(count)]
    return [None if is_left_open else secrets.randbits(_SEED_BITS) for _ in range(count)]
