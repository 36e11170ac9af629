"""From checked fields of a body to generations: prompts to token ids, one generation for each choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from pydantic import Field

from tandem.frontend.backend import Bootstrap, ServedModel
from tandem.frontend.body import GenerationBody, Many, worded
from tandem.frontend.sampling import SamplingBody, TextRules, engine_params, seeds
from tandem.frontend.timings import Report, Timings, TimingsSink
from tandem.frontend.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import (
    GenerateRequest,
    Grammar,
    LogprobsWanted,
    RequestId,
    new_request_id,
)

# Prompts times n of one HTTP request: what one client may start at once.
MAX_GENERATIONS = 1024
# Tokenizing so many characters takes about 1.5 ms. More releases the interpreter's lock.
LOCKED_CHARS = 4096

_Ids = Many[int] | Many[Many[int]]
_FORM = Field(union_mode="left_to_right")
Texts = Annotated[str | Many[str], _FORM, worded("must be a string or a list of strings")]
Ids = Annotated[_Ids, _FORM, worded("must be a list of integers or a list of such lists")]
AnyPrompt = Annotated[
    str | Many[str] | _Ids,
    _FORM,
    worded("must be a string or a list of strings, a list of integers or a list of such lists"),
]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one body, not yet tokenized: all of them texts, or all of them ids.

    Attributes:
        is_batch: Whether they came as a list, so that the answer is one.
    """

    is_batch: bool
    texts: Sequence[str] = ()
    ids: Sequence[list[int]] = ()

    def __len__(self) -> int:
        return len(self.texts) + len(self.ids)


def read_prompts(value: str | list[str] | list[int] | list[list[int]]) -> Prompts:
    """Return the prompts of a checked field, in any of its four forms."""
    is_batch = not isinstance(value, str) and not isinstance(value[0], int)
    entries: list[Any] = list(value) if is_batch else [value]
    if len(entries) > MAX_GENERATIONS:
        raise InvalidRequest(f"{len(value)} prompts were sent; at most {MAX_GENERATIONS} may be")
    if isinstance(entries[0], str):
        return Prompts(is_batch, texts=entries)
    return Prompts(is_batch, ids=entries)


def prompt_ids(
    model: ServedModel, prompts: Prompts, add_special_tokens: bool = True
) -> Sequence[list[int]]:
    """Return the token ids of each prompt, checked against the model.

    Args:
        add_special_tokens: Whether texts get those that the model's tokenizer puts around them.
    """
    ids = prompts.ids or tokenize(model, prompts.texts, add_special_tokens)
    for one in ids:
        _check(model, one)
    return ids


def require_tokenizer(model: ServedModel) -> Tokenizer:
    """Return the model's tokenizer."""
    if model.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: send token ids instead of text")
    return model.tokenizer


def tokenize(model: ServedModel, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of each text. One that no context could hold is rejected unread."""
    tokenizer = require_tokenizer(model)
    for text in texts:
        least = tokenizer.least_tokens(text)
        if least > model.max_prompt_tokens:
            raise _too_long(model, f"at least {least}")
    if sum(map(len, texts)) <= LOCKED_CHARS:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    return tokenizer.encode_batch(texts, add_special_tokens)


def _check(model: ServedModel, ids: list[int]) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    if len(ids) > model.max_prompt_tokens:
        raise _too_long(model, str(len(ids)))
    check_ids(model, ids)


def check_ids(model: ServedModel, ids: Sequence[int]) -> None:
    """Reject ids that the model does not have.

    Args:
        ids: At least one.
    """
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < model.vocab_size:
            raise InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {model.vocab_size}"
            )


def _too_long(model: ServedModel, num_tokens: str) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {num_tokens} tokens and this model takes at most "
        f"{model.max_prompt_tokens} (its context is {model.context_length}, answer included)"
    )


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation to run.

    Attributes:
        tokenizer: None when the model has none. The text then stays empty.
        bootstrap: Where its other half is, if a router of SGLang's kind chose the pair.
        timings: Where its time goes.
        trace: Gets its report when it is over.
    """

    request: GenerateRequest
    rules: TextRules
    tokenizer: Tokenizer | None
    bootstrap: Bootstrap | None = None
    timings: Timings = field(default_factory=Timings)
    trace: TimingsSink | None = None

    def report(self) -> Report:
        """Return where its time has gone."""
        return self.timings.report(self.request.request_id, len(self.request.prompt_ids))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a body asks for one of its prompts."""

    sampling: SamplingBody
    grammar: Grammar | None
    logprobs: LogprobsWanted | None


def generations_of(
    model: ServedModel,
    body: GenerationBody,
    prompts: Prompts,
    ids: Sequence[list[int]],
    *,
    wanted: Sequence[Wanted],
    names: Sequence[RequestId],
    adapter: str = "",
) -> list[Generation]:
    """Return n generations of each prompt, each with a seed of its own. Those of a prompt form a group.

    Args:
        ids: The token ids of each prompt.
        wanted: One for each prompt, with the same n.
        names: One for each generation.
        adapter: What the body's `model` names, if that is one.
    """
    n = wanted[0].sampling.n
    if n * len(ids) > MAX_GENERATIONS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_GENERATIONS}")
    halves = body.bootstraps(len(ids), is_batch=prompts.is_batch, n=n)
    adapters = _adapters(model, body, prompts, adapter)
    generations: list[Generation] = []
    for token_ids, half, asked, named in zip(ids, halves, wanted, adapters, strict=True):
        group = new_request_id() if n > 1 else ""
        params = engine_params(asked.sampling, model, len(token_ids), asked.grammar)
        for seed in seeds(asked.sampling.seed, n, is_left_open=half is not None):
            request = GenerateRequest(
                request_id=names[len(generations)],
                prompt_ids=token_ids,
                sampling=msgspec.structs.replace(params, seed=seed),
                priority=body.priority,
                cache_salt=body.cache_salt,
                logprobs=asked.logprobs,
                group=group,
                adapter=named,
            )
            rules = asked.sampling.text_rules
            generations.append(Generation(request, rules, model.tokenizer, half))
    return generations


def _adapters(
    model: ServedModel, body: GenerationBody, prompts: Prompts, named: str
) -> Sequence[str]:
    """Return the adapter of each prompt, from `lora_path` or else from the body's `model`."""
    adapters = body.per_prompt("lora_path", len(prompts), is_batch=prompts.is_batch)
    for adapter in adapters:
        if adapter and adapter not in model.adapters:
            there = ", ".join(map(repr, model.adapters)) or "none"
            raise InvalidRequest(f"lora_path: {adapter!r} is not loaded; there is {there}")
        if adapter and named not in {"", adapter}:
            raise InvalidRequest(f"lora_path: {adapter!r} is not what model names, {named!r}")
    return [adapter or named for adapter in adapters]
