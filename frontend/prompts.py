"""Prompts as clients send them, to checked token ids within the model's limits.

Holds the four forms of a prompt: text, ids, lists of either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.frontend.backend import ServedModel
from tandem.frontend.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest

# Prompts times n of one HTTP request: what one client may start at once.
MAX_GENERATIONS = 1024
# Tokenizing so many characters takes about 1.5 ms; more lets go of the interpreter's lock.
LOCKED_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one body, not yet tokenized: either texts or ids.

    Attributes:
        is_batch: Whether they came as a list, so that the answer is one.

    Raises:
        InvalidRequest: There are more than one body may have.
    """

    is_batch: bool
    texts: list[str] | None = None
    ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if len(self) > MAX_GENERATIONS:
            raise InvalidRequest(f"{len(self)} prompts were sent; at most {MAX_GENERATIONS} may be")

    def __len__(self) -> int:
        return len(self.texts or self.ids or ())


def text_prompts(value: object, field: str) -> Prompts:
    """Read a text or a list of texts.

    Raises:
        InvalidRequest: It is neither, or an empty list.
    """
    if isinstance(value, str):
        return Prompts(is_batch=False, texts=[value])
    entries = _not_empty(value, field)
    texts = [entry for entry in entries if isinstance(entry, str)]
    if len(texts) < len(entries):
        raise InvalidRequest(f"{field}: must be a string or a list of strings")
    return Prompts(is_batch=True, texts=texts)


def id_prompts(value: object, field: str) -> Prompts:
    """Read token ids or a list of token ids.

    Raises:
        InvalidRequest: It is neither, or an empty list.
    """
    entries = _not_empty(value, field)
    is_batch = isinstance(entries[0], list)
    prompts = entries if is_batch else [entries]
    if not all(isinstance(ids, list) and set(map(type, ids)) <= {int} for ids in prompts):
        raise InvalidRequest(f"{field}: must be a list of integers or a list of such lists")
    return Prompts(is_batch=is_batch, ids=prompts)


def any_prompts(value: object, field: str) -> Prompts:
    """Read any of the four forms.

    Raises:
        InvalidRequest: It is none of them, or an empty list.
    """
    first = value[0] if isinstance(value, list) and value else value
    return text_prompts(value, field) if isinstance(first, str) else id_prompts(value, field)


def _not_empty(value: object, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}: must be a string or a list")
    if not value:
        raise InvalidRequest(f"{field}: must not be empty")
    return value


def prompt_ids(
    model: ServedModel, prompts: Prompts, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each prompt, checked against the model.

    Args:
        add_special_tokens: Whether texts get those that the model's tokenizer puts around them.

    Raises:
        InvalidRequest: A prompt is empty, too long, or has ids outside the vocabulary; or it is
            text and the model has no tokenizer.
    """
    if prompts.texts is not None:
        ids = tokenize(model, prompts.texts, add_special_tokens)
    else:
        ids = prompts.ids or []
    for prompt in ids:
        _check(model, prompt)
    return ids


def tokenize(
    model: ServedModel, texts: Sequence[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the ids of each text.

    Raises:
        InvalidRequest: The model has no tokenizer, or a text is sure to be too long.
    """
    tokenizer = require_tokenizer(model)
    for text in texts:
        least = tokenizer.least_tokens(text)
        if least > model.max_prompt_tokens:
            raise _too_long(model, f"at least {least}")
    if sum(map(len, texts)) <= LOCKED_CHARS:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    return tokenizer.encode_batch(texts, add_special_tokens)


def require_tokenizer(model: ServedModel) -> Tokenizer:
    """Return the model's tokenizer.

    Raises:
        InvalidRequest: It has none.
    """
    if model.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: send token ids instead of text")
    return model.tokenizer


def _check(model: ServedModel, ids: list[int]) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty: it must have at least one token")
    if len(ids) > model.max_prompt_tokens:
        raise _too_long(model, str(len(ids)))
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
