"""Sampling parameters: the fields of each API with their ranges, converted for the engine and the edge.

`SamplingBody` has the parameters that all APIs share. `NativeSampling` and `OpenAISampling` set their names and
defaults. `engine_params` returns the engine's part, and `text_rules` the edge's.
"""

import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import Body, Many, validate
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


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _top_k(value: int) -> int:
    if value < -1:
        raise ValueError("must be -1 (all) or at least 1")
    # 0 means all in vLLM, -1 in SGLang. No vocabulary has 2**31 tokens.
    return value if 0 < value < 2**31 else -1


def _top_p(value: float) -> float:
    # OpenAI allows 0, which selects the most likely token. A very small value has the same effect.
    return max(value, _MIN_TOP_P)


def _id_keys(value: Any) -> Any:
    """Convert JSON's string keys to token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:  # pydantic would validate every entry first
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries")
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("keys must be token ids") from None


_MAX_TOKENS = AliasChoices("max_completion_tokens", "max_tokens")

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
PatternText = Annotated[str, Field(max_length=MAX_PATTERN_CHARS)]


class SamplingBody(Body):
    """Sampling parameters that all APIs share."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, AfterValidator(_top_k)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: Annotated[
        Many[Stop],
        BeforeValidator(_as_list, json_schema_input_type=str | list[Stop]),
        Field(default_factory=list, max_length=MAX_STOPS),
    ]
    stop_regex: Annotated[
        Many[PatternText],
        BeforeValidator(_as_list, json_schema_input_type=str | list[PatternText]),
        Field(default_factory=list, max_length=MAX_STOP_PATTERNS),
    ]
    stop_token_ids: Annotated[
        Many[TokenId], Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    ]
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: Annotated[int, Field(ge=1)] = 1
    logit_bias: Annotated[
        dict[int, float],
        BeforeValidator(_id_keys, json_schema_input_type=dict[str, float]),
        Field(default_factory=dict, json_schema_extra={"maxProperties": MAX_LOGIT_BIAS}),
    ]

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

    max_new_tokens: Annotated[int | None, Field(ge=0)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int | None, Field(validation_alias=AliasChoices("sampling_seed", "seed"))] = (
        None
    )


class OpenAISampling(SamplingBody):
    """Sampling parameters of the `/v1` routes, with the common extensions.

    If no maximum is set, an answer may fill the context.
    """

    max_new_tokens: Annotated[int | None, Field(ge=1, validation_alias=_MAX_TOKENS)] = None
    min_new_tokens: Annotated[int, Field(ge=0, validation_alias="min_tokens")] = 0
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(_top_p)] = 1.0
    no_stop_trim: Annotated[
        bool, Field(validation_alias=AliasChoices("no_stop_trim", "include_stop_str_in_output"))
    ] = False


class CompletionSampling(OpenAISampling):
    """Sampling parameters of `/v1/completions`, with OpenAI's default length."""

    max_new_tokens: Annotated[int | None, Field(ge=0, validation_alias=_MAX_TOKENS)] = 16


def read_sampling(
    body_class: type[SamplingT], data: Mapping[str, object], model: ServedModel, prefix: str = ""
) -> SamplingT:
    """Return the sampling parameters in `data`. Missing ones get the model's defaults, then the API's."""
    params = {name: value for name, value in data.items() if value is not None}
    return validate(body_class, msgspec.structs.asdict(model.default_sampling) | params, prefix)


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
