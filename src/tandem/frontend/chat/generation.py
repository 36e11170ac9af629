"""Create generations from the checked fields of a body: tokenize prompts, one generation per choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.frontend.backend import Bootstrap, ServedModel
from tandem.frontend.chat.body import GenerationBody
from tandem.frontend.chat.sampling import SamplingBody, engine_params, seeds
from tandem.frontend.request_ids import unique_id
from tandem.frontend.text.stops import SearchBudget, TextRules
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.frontend.timings import ReportMaker, Timings, TimingsSink
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import (
    GenerateRequest,
    Grammar,
    LogprobOptions,
    new_request_id,
)

# Limit of prompts times n in one HTTP request.
MAX_GENERATIONS = 1024
# Up to this length texts are tokenized with the GIL held, in about 1.5 ms. Longer ones release the GIL.
LOCKED_CHARS = 4096

Texts = str | Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[int | list[int]], Meta(min_length=1)]
TextsOrIds = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class PromptTooLong(InvalidRequest, code="context_length_exceeded"):
    """The prompt exceeds the context length, or what fits in the KV pool.

    `http/api_errors.py` has the words that clients of each API know.

    Attributes:
        num_tokens: Tokens of the prompt. 0: a different process sent the error, and only its message is known.
    """

    num_tokens = max_prompt_tokens = 0
    is_lower_bound = False

    def __init__(
        self, num_tokens: int, max_prompt_tokens: int, *, is_lower_bound: bool = False
    ) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens; this model accepts at most {max_prompt_tokens}"
        )
        self.num_tokens, self.max_prompt_tokens = num_tokens, max_prompt_tokens
        self.is_lower_bound = is_lower_bound


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one body before tokenization: either all texts or all token ids.

    Attributes:
        is_batch: Whether the body has a list of prompts, so that the answer is a list too.
    """

    is_batch: bool
    texts: Sequence[str] = ()
    ids: Sequence[list[int]] = ()

    def __len__(self) -> int:
        return len(self.texts) + len(self.ids)


def read_prompts(value: str | Sequence[str | int | list[int]]) -> Prompts:
    """Return the prompts of a field: texts, or token ids."""
    if isinstance(value, str):
        return Prompts(is_batch=False, texts=[value])
    if len(value) > MAX_GENERATIONS and not isinstance(value[0], int):
        raise InvalidRequest(
            f"the body has {len(value)} prompts; send at most {MAX_GENERATIONS} in one request"
        )
    try:
        if isinstance(value[0], str):
            return Prompts(is_batch=True, texts=msgspec.convert(value, list[str]))
        if isinstance(value[0], int):
            return Prompts(is_batch=False, ids=[msgspec.convert(value, list[int])])
        return Prompts(is_batch=True, ids=msgspec.convert(value, list[list[int]]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            "the entries of the prompt must all be strings, all be integers, or all be lists of integers"
        ) from error


def prompt_ids(
    model: ServedModel, prompts: Prompts, add_special_tokens: bool = True
) -> Sequence[list[int]]:
    """Return the token ids of each prompt, checked against the model's limits.

    Args:
        add_special_tokens: Whether the tokenizer adds special tokens, such as BOS, to texts.
    """
    ids = prompts.ids or tokenize(model, prompts.texts, add_special_tokens)
    for token_ids in ids:
        _check(model, token_ids)
    return ids


def require_tokenizer(model: ServedModel) -> Tokenizer:
    """Return the model's tokenizer."""
    if model.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: send token ids instead of text")
    return model.tokenizer


def tokenize(model: ServedModel, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of each text. A text that cannot fit the context is rejected before tokenization."""
    tokenizer = require_tokenizer(model)
    for text in texts:
        min_tokens = tokenizer.min_tokens(text, model.max_prompt_tokens)
        if min_tokens > model.max_prompt_tokens:
            raise PromptTooLong(min_tokens, model.max_prompt_tokens, is_lower_bound=True)
    if sum(map(len, texts)) <= LOCKED_CHARS:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    return tokenizer.encode_batch(texts, add_special_tokens)


def _check(model: ServedModel, ids: list[int]) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty; send at least one token")
    if len(ids) > model.max_prompt_tokens:
        raise PromptTooLong(len(ids), model.max_prompt_tokens)
    check_ids(model, ids)


def check_ids(model: ServedModel, ids: Sequence[int]) -> None:
    """Reject token ids outside the model's vocabulary.

    Args:
        ids: At least one id.
    """
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {model.vocab_size}"
            )


@dataclass(slots=True)
class Generation:
    """One generation to run.

    Attributes:
        id: Id that the client knows. Several generations may share it; only `request.request_id` is unique.
        rules: Stop rules and display options of its text.
        tokenizer: None if the model has none. The text is then always empty.
        bootstrap: Address of its other half, if an SGLang-style router chose the pair.
        timings: Collects its timings.
        trace: Receives its timing report at the end.
        model: Name of its model, for the backend.
    """

    id: str
    request: GenerateRequest
    rules: TextRules
    tokenizer: Tokenizer | None
    bootstrap: Bootstrap | None = None
    timings: Timings = field(default_factory=Timings)
    trace: TimingsSink | None = None
    model: str = ""

    @property
    def report(self) -> ReportMaker:
        """Returns the timing report so far. It does not keep the prompt."""
        request = self.request
        return partial(self.timings.report, self.id, request.client, len(request.prompt_ids))


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options of one prompt of a body."""

    sampling: SamplingBody
    grammar: Grammar | None
    logprobs: LogprobOptions | None


def create_generations(
    model: ServedModel,
    body: GenerationBody,
    prompts: Prompts,
    ids: Sequence[list[int]],
    *,
    options: Sequence[PromptOptions],
    request_ids: Sequence[str],
    adapter: str = "",
) -> list[Generation]:
    """Return n generations for each prompt, each with a different seed. Those of one prompt form a group.

    Args:
        ids: Token ids of each prompt.
        options: Options of each prompt, all with the same n.
        request_ids: Id of each generation that the client knows.
        adapter: The adapter that the body's `model` names, or empty.
    """
    n = options[0].sampling.n
    if n * len(ids) > MAX_GENERATIONS:
        raise InvalidRequest(
            f"the body asks for {len(ids)} prompts times n={n}; at most {MAX_GENERATIONS} are allowed"
        )
    bootstraps = body.bootstraps(len(ids), is_batch=prompts.is_batch, n=n)
    adapters = _adapters(model, body, prompts, adapter)
    salts = [
        f"{body.cache_salt}\n{key}" if key else body.cache_salt
        for key in body.per_prompt("extra_key", len(prompts), is_batch=prompts.is_batch)
    ]
    generations: list[Generation] = []
    budget = SearchBudget(n * len(ids))
    for token_ids, each, name, salt in zip(ids, options, adapters, salts, strict=True):
        group = new_request_id() if n > 1 else ""
        rules = each.sampling.text_rules
        if rules.patterns:  # prompts with different parameters have different rules
            rules = replace(rules, budget=budget)
        params = engine_params(each.sampling, model, len(token_ids), each.grammar)
        for seed in seeds(each.sampling.seed, n, is_left_open=bootstraps[0] is not None):
            client_id = request_ids[len(generations)]
            request = GenerateRequest(
                request_id=unique_id(client_id),
                prompt_ids=token_ids,
                sampling=msgspec.structs.replace(params, seed=seed),
                priority=body.priority,
                cache_salt=salt,
                logprobs=each.logprobs,
                group=group,
                adapter=model.adapters[name] if name else "",
            )
            bootstrap = bootstraps[len(generations)]
            generations.append(
                Generation(client_id, request, rules, model.tokenizer, bootstrap, model=model.name)
            )
    return generations


def _adapters(
    model: ServedModel, body: GenerationBody, prompts: Prompts, model_adapter: str
) -> Sequence[str]:
    """Return the adapter of each prompt, from `lora_path` or else from the body's `model`."""
    adapters = body.per_prompt("lora_path", len(prompts), is_batch=prompts.is_batch)
    for adapter in adapters:
        if adapter and adapter not in model.adapters:
            loaded = ", ".join(map(repr, model.adapters)) or "none"
            raise InvalidRequest(f"lora_path: {adapter!r} is not loaded; loaded adapters: {loaded}")
        if adapter and model_adapter not in {"", adapter}:
            raise InvalidRequest(
                f"lora_path: {adapter!r} conflicts with model, which names {model_adapter!r}"
            )
    return [adapter or model_adapter for adapter in adapters]
