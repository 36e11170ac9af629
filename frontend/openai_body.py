"""Bodies of OpenAI's API: from JSON to checked generations.

Leaves out answering, which is in `frontend/openai.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic_core
from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from frontend.backend import ServedModel
from frontend.body import Body, CacheSalt, Many, Priority, refuse, validate
from frontend.edge import part_id
from frontend.generation import Generation, Prompt, Wishes, generations_of
from frontend.grammars import openai_grammar
from frontend.logprobs import MAX_TOP_LOGPROBS
from frontend.prompts import (
    MAX_GENERATIONS,
    Prompts,
    any_prompts,
    prompt_ids,
    require_tokenizer,
    tokenize,
)
from frontend.sampling import CompletionSampling, OpenAISampling, require_tokens
from wire.errors import InvalidRequest, ModelNotFound
from wire.generation import LogprobsWanted
from wire.ids import new_request_id

# Each is looked at in turn, and the longest conversations have hundreds.
MAX_MESSAGES = 8192
_NOT_YET = (
    "prompt_logprobs",
    "suffix",
    "structural_tag",
    "functions",
    "continue_final_message",
)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(Body):
    """What both routes share, but for sampling parameters."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: Priority = 0
    cache_salt: CacheSalt = ""


NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


_IDS = {"type": "array", "items": {"type": "integer"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}


def _off(value: object) -> object:
    return None if value is False else value


class CompletionBody(OpenAIBody):
    """`/v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    echo: bool = False
    logprobs: Annotated[NumTop | None, BeforeValidator(_off)] = None

    def wanted(self) -> LogprobsWanted | None:
        """Return what the engine is asked for: an echoed prompt is told of as well."""
        if self.logprobs is None:
            return None
        return LogprobsWanted(num_top=self.logprobs, prompt_start=0 if self.echo else -1)


def _text_of_parts(content: object) -> object:
    """Join content given in parts; a part that is not text cannot be read here."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a content part of type {kind!r} is not supported, only 'text'")
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)


class Message(Body):
    """One message of a conversation. The template sees further fields as they came."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: Annotated[str, BeforeValidator(_text_of_parts)] = ""
    tool_calls: Many[dict[str, Any]] = Field(default_factory=list)

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it."""
        fields = self.model_dump(exclude_unset=True) | {"content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        return fields


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends a call's arguments as JSON text; templates write them out themselves."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        # Unlike json, it refuses what is nested without end as it refuses other bad JSON.
        arguments = pydantic_core.from_json(function["arguments"])
    except ValueError as error:
        raise InvalidRequest(f"tool_calls: arguments are not JSON: {error}") from error
    return call | {"function": function | {"arguments": arguments}}


class ChatBody(OpenAIBody):
    """`/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Many[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    logprobs: bool = False
    top_logprobs: NumTop = 0

    def wanted(self) -> LogprobsWanted | None:
        """Return what the engine is asked for.

        Raises:
            InvalidRequest: `top_logprobs` stands alone.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true")
        return LogprobsWanted(num_top=self.top_logprobs) if self.logprobs else None


_Prompt = tuple[list[int], str]  # its ids, and the text to echo


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """One checked call.

    Attributes:
        generations: Those of the first prompt, then the next; the position is the choice's index.
        num_prompt_tokens: Of all prompts; one with several choices counts once.
        echoes: Text to put before each choice's own.
    """

    call_id: str
    model_name: str
    generations: list[Generation]
    num_prompt_tokens: int
    echoes: list[str]
    is_stream: bool
    usage: StreamOptions


async def read_completion(model: ServedModel, data: dict[str, Any]) -> OpenAICall:
    """Check a body of `/v1/completions`.

    Raises:
        InvalidRequest: Something in it cannot be; the sentence names it.
        ModelNotFound: It asks for another model.
    """
    _check(data)
    body = validate(CompletionBody, data)
    _check_model(model, body.model)
    if body.prompt is None:
        raise InvalidRequest("prompt: is missing")
    prompts = any_prompts(body.prompt, "prompt")
    sampling = validate(CompletionSampling, data)
    wishes = Wishes(body.priority, body.cache_salt, body.wanted(), openai_grammar(data))
    ids = await prompt_ids(model, prompts)
    if not body.echo:
        require_tokens(sampling, "max_tokens")
    echoes = _texts(model, prompts) if body.echo else [""] * len(ids)
    return _call("cmpl", model, body, sampling, list(zip(ids, echoes, strict=True)), wishes=wishes)


async def read_chat(model: ServedModel, data: dict[str, Any]) -> OpenAICall:
    """Check a body of `/v1/chat/completions`.

    Raises:
        InvalidRequest: Something in it cannot be; the sentence names it.
        ModelNotFound: It asks for another model.
    """
    _check(data)
    body = validate(ChatBody, data)
    _check_model(model, body.model)
    sampling = validate(OpenAISampling, data)
    wishes = Wishes(body.priority, body.cache_salt, body.wanted(), openai_grammar(data))
    text = require_tokenizer(model).render_chat(
        [message.for_template() for message in body.messages],
        _tools(body),
        body.add_generation_prompt,
        body.chat_template_kwargs,
    )
    # The template has written the special tokens.
    tokenized = await tokenize(model, [text], add_special_tokens=False)
    ids = await prompt_ids(model, Prompts(is_batch=False, ids=tokenized))
    return _call("chatcmpl", model, body, sampling, [(ids[0], "")], wishes=wishes)


def _check(data: dict[str, Any]) -> None:
    """Refuse what is not there yet."""
    refuse(data, _NOT_YET)
    n = data.get("n")
    if data.get("best_of") not in (None, 1 if n is None else n):
        raise InvalidRequest("best_of: not supported unless it equals n")


def _check_model(model: ServedModel, asked: str | None) -> None:
    if asked is not None and asked != model.name:
        raise ModelNotFound(asked, model.name)


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice: only 'auto' and 'none' are supported yet")
    return None if body.tool_choice == "none" else body.tools or None


def _texts(model: ServedModel, prompts: Prompts) -> list[str]:
    if prompts.texts is not None:
        return prompts.texts
    tokenizer = require_tokenizer(model)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts.ids or []]


def _call(
    kind: str,
    model: ServedModel,
    body: OpenAIBody,
    sampling: OpenAISampling,
    prompts: Sequence[_Prompt],
    *,
    wishes: Wishes,
) -> OpenAICall:
    n = sampling.n
    if n * len(prompts) > MAX_GENERATIONS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_GENERATIONS}")
    call_id = f"{kind}-{new_request_id()}"
    generations: list[Generation] = []
    for position, (token_ids, _) in enumerate(prompts):
        names = [part_id(call_id, position * n + choice) for choice in range(n)]
        prompt = Prompt(token_ids, names, wishes)
        generations += generations_of(model, prompt, sampling)
    return OpenAICall(
        call_id=call_id,
        model_name=model.name,
        generations=generations,
        num_prompt_tokens=sum(len(token_ids) for token_ids, _ in prompts),
        echoes=[echo for _, echo in prompts for _ in range(n)],
        is_stream=body.stream,
        usage=body.stream_options,
    )
