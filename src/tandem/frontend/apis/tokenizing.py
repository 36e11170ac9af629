"""`/tokenize` and `/detokenize`, compatible with vLLM and SGLang: convert text to token ids and back.

Messages are rendered by the chat template first, so their ids are the prompt of the equivalent chat.
"""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from tandem.frontend.answers import Detokenized, Tokenized
from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import Body, refuse_unsupported, validate
from tandem.frontend.chat.generation import (
    Ids,
    Texts,
    check_ids,
    read_prompts,
    require_tokenizer,
    tokenize,
)
from tandem.frontend.chat.openai_body import chat_text, checked_chat
from tandem.frontend.http.edge import EDGE
from tandem.frontend.http.sse import encode
from tandem.wire.errors import InvalidRequest


class TokenizeBody(Body):
    """`/tokenize`. A body may have a chat's messages and tools instead of a prompt."""

    model: str | None = None
    prompt: Texts | None = None
    text: Texts | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body, kw_only=True):
    """`/detokenize`."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


async def to_ids(request: web.Request) -> web.Response:
    """Return the token ids of one prompt, of several prompts, or of a chat."""
    return await _convert(request, _tokenize)


async def to_text(request: web.Request) -> web.Response:
    """Return the text of token ids: `prompt` with special tokens, `text` without them."""
    return await _convert(request, _detokenize)


async def _convert(
    request: web.Request,
    convert: Callable[[ServedModel, dict[str, Any]], Tokenized | Detokenized],
) -> web.Response:
    edge = request.app[EDGE]
    models = edge.backend.models()
    # Encode in the thread that parses the body: a large answer takes as long to encode as a large body to parse.
    answer = await edge.read(
        await request.read(),
        lambda data: encode(convert(models.choose(data.get("model")), data)),
    )
    return web.Response(body=answer, content_type="application/json")


def _tokenize(model: ServedModel, data: dict[str, Any]) -> Tokenized:
    refuse_unsupported(data)
    body, tokenizer = validate(TokenizeBody, data), require_tokenizer(model)
    model.resolve_adapter(body.model)
    prompt = body.text if body.prompt is None else body.prompt
    if (prompt is None) == (data.get("messages") is None):
        raise InvalidRequest("send either prompt or messages")
    if prompt is None:
        chat = checked_chat(model, data)
        prompts = tokenize(model, [chat_text(model, chat)], chat.options.add_special_tokens)
    else:
        prompts = tokenize(model, read_prompts(prompt).texts, body.add_special_tokens)
    strings: list[list[str]] | None = None
    if body.return_token_strs:
        strings = [[tokenizer.backend.id_to_token(id_) or "" for id_ in ids] for ids in prompts]
    if isinstance(prompt, list):
        return Tokenized(prompts, list(map(len, prompts)), model.context_length, strings)
    return Tokenized(prompts[0], len(prompts[0]), model.context_length, strings and strings[0])


def _detokenize(model: ServedModel, data: dict[str, Any]) -> Detokenized:
    body, tokenizer = validate(DetokenizeBody, data), require_tokenizer(model)
    model.resolve_adapter(body.model)
    prompts = read_prompts(body.tokens)
    for ids in prompts.ids:
        if len(ids) > model.context_length:
            raise InvalidRequest(
                f"tokens: {len(ids)} ids exceed the model's context of {model.context_length}"
            )
        if ids:
            check_ids(model, ids)

    def text(*, skips: bool) -> str | list[str]:
        skips = skips if body.skip_special_tokens is None else body.skip_special_tokens
        texts = [tokenizer.decode(ids, skips) for ids in prompts.ids]
        return texts if prompts.is_batch else texts[0]

    # vLLM's field keeps special tokens, SGLang's omits them.
    return Detokenized(prompt=text(skips=False), text=text(skips=True))
