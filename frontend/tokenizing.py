"""`/tokenize` and `/detokenize`, as vLLM and SGLang have them: text to token ids and back, by the model's tokenizer.

The ids of messages are those that a chat of them would have as its prompt.
"""

from collections.abc import Callable
from typing import Annotated, Any

from aiohttp import web
from pydantic import AliasChoices, Field

from tandem.frontend.answers import Detokenized, Tokenized
from tandem.frontend.backend import ServedModel
from tandem.frontend.body import Body, refuse_unsupported, validate
from tandem.frontend.edge import EDGE
from tandem.frontend.generation import (
    Ids,
    Texts,
    check_ids,
    read_prompts,
    require_tokenizer,
    tokenize,
)
from tandem.frontend.openai_body import chat_text, read_chat_body
from tandem.frontend.sse import encode
from tandem.wire.errors import InvalidRequest


class TokenizeBody(Body):
    """`/tokenize`. Instead of a prompt it may have the messages and tools of a chat."""

    model: str | None = None
    prompt: Annotated[Texts | None, Field(validation_alias=AliasChoices("prompt", "text"))] = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


async def to_ids(request: web.Request) -> web.Response:
    """Return the token ids of a prompt, of each of several, or of a chat."""
    return await _converted(request, _tokenized)


async def to_text(request: web.Request) -> web.Response:
    """Return the text of token ids: `prompt` with special tokens, `text` without them."""
    return await _converted(request, _detokenized)


async def _converted(
    request: web.Request,
    convert: Callable[[ServedModel, dict[str, Any]], Tokenized | Detokenized],
) -> web.Response:
    edge = request.app[EDGE]
    model = edge.backend.model()
    # Encoded where it is read: a large answer takes as long as a large body.
    answer = await edge.read(await request.read(), lambda data: encode(convert(model, data)))
    return web.Response(body=answer, content_type="application/json")


def _tokenized(model: ServedModel, data: dict[str, Any]) -> Tokenized:
    refuse_unsupported(data)
    body, tokenizer = validate(TokenizeBody, data), require_tokenizer(model)
    model.adapter_named(body.model)
    if (body.prompt is None) == (data.get("messages") is None):
        raise InvalidRequest("send either prompt or messages")
    if body.prompt is None:
        chat = read_chat_body(model, data)
        found = tokenize(model, [chat_text(model, chat)], chat.add_special_tokens)
    else:
        found = tokenize(model, read_prompts(body.prompt).texts, body.add_special_tokens)
    strings: list[list[str]] | None = None
    if body.return_token_strs:
        strings = [[tokenizer.backend.id_to_token(id_) or "" for id_ in ids] for ids in found]
    if isinstance(body.prompt, list):
        return Tokenized(found, list(map(len, found)), model.context_length, strings)
    return Tokenized(found[0], len(found[0]), model.context_length, strings and strings[0])


def _detokenized(model: ServedModel, data: dict[str, Any]) -> Detokenized:
    body, tokenizer = validate(DetokenizeBody, data), require_tokenizer(model)
    model.adapter_named(body.model)
    prompts = read_prompts(body.tokens)
    for ids in prompts.ids:
        if len(ids) > model.context_length:
            raise InvalidRequest(f"tokens: must have at most {model.context_length} ids")
        if ids:
            check_ids(model, ids)

    def text(*, skips: bool) -> str | list[str]:
        skips = skips if body.skip_special_tokens is None else body.skip_special_tokens
        texts = [tokenizer.decode(ids, skips) for ids in prompts.ids]
        return texts if prompts.is_batch else texts[0]

    # vLLM keeps special tokens and SGLang does not: each has a field of its own.
    return Detokenized(prompt=text(skips=False), text=text(skips=True))
