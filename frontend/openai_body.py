"""Bodies of OpenAI's API: from JSON to checked generations. Answering is in `frontend/openai.py`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BeforeValidator, ConfigDict, Field

from tandem.frontend.backend import ServedModel
from tandem.frontend.body import (
    UNSUPPORTED_IN_CHATS,
    Body,
    GenerationBody,
    Many,
    refuse_unsupported,
    validate,
)
from tandem.frontend.generation import (
    AnyPrompt,
    Generation,
    Prompts,
    Wanted,
    generations_of,
    prompt_ids,
    read_prompts,
    require_tokenizer,
)
from tandem.frontend.grammars import after_thoughts, openai_grammar, strict_calls
from tandem.frontend.logprobs import MAX_TOP_LOGPROBS
from tandem.frontend.options import FrontendOptions
from tandem.frontend.reply_formats import Thoughts
from tandem.frontend.reply_parser import ReplyFormats
from tandem.frontend.request_ids import NAMES, GivenId, ids_of
from tandem.frontend.sampling import (
    CompletionSampling,
    OpenAISampling,
    read_sampling,
    require_tokens,
)
from tandem.frontend.tool_calls import Reply, ToolChoice, read_choice
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar, LogprobsWanted, new_request_id

# The longest conversations have hundreds.
MAX_MESSAGES = 8192
# Templates read one of these names to turn thoughts on or off.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIBody(GenerationBody):
    """What both routes share, without sampling parameters."""

    model: str | None = None
    rid: Annotated[GivenId | None, Field(validation_alias=NAMES)] = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_options: StreamOptions = StreamOptions()


OpenAIBodyT = TypeVar("OpenAIBodyT", bound=OpenAIBody)
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


def _off(value: object) -> object:
    return None if value is False else value


class CompletionBody(OpenAIBody):
    """`/v1/completions`."""

    prompt: AnyPrompt
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: Annotated[NumTop | None, BeforeValidator(_off)] = None

    def wanted(self) -> LogprobsWanted | None:
        """Return which log-probabilities to ask the engine for: an echoed prompt's as well."""
        if self.logprobs is None:
            return None
        return LogprobsWanted(num_top=self.logprobs, prompt_start=0 if self.echo else -1)


def _text_of_parts(content: object) -> object:
    """Join content that was given in parts, all of which must be text."""
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
    """Return the call with its arguments parsed: clients send JSON text, templates write objects."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            # Unlike json, it rejects endless nesting as it rejects other bad JSON.
            arguments = pydantic_core.from_json(arguments.strip() or "{}")
        except ValueError as error:
            raise InvalidRequest(f"tool_calls: arguments are not JSON: {error}") from error
    return call | {"function": function | {"arguments": arguments}}


class ChatBody(OpenAIBody):
    """`/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Many[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    logprobs: bool = False
    top_logprobs: NumTop = 0

    def wanted(self) -> LogprobsWanted | None:
        """Return which log-probabilities to ask the engine for."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true")
        return LogprobsWanted(num_top=self.top_logprobs) if self.logprobs else None

    def for_template(self) -> dict[str, Any]:
        """Return further names for the template."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return effort | self.chat_template_kwargs


@dataclass(slots=True)
class OpenAICall:
    """One checked call.

    Attributes:
        generations: Those of the first prompt, then the next. The position is the choice's index.
        num_prompt_tokens: Of all prompts. One with several choices counts once.
        echoes: Text to put before each choice's own.
        has_token_ids: Whether choices have their token ids, and the prompt's.
        has_ids_as_tokens: Whether log-probabilities name tokens by their ids.
        has_reasoning: Whether the answer has what the model thought, where that is told apart.
        eos_token_ids: With these the model ends by itself.
        make_reply: Makes the reader of one choice's text. None: all of it is content.
    """

    call_id: str
    model_name: str
    is_chat: bool
    generations: list[Generation]
    num_prompt_tokens: int
    echoes: list[str]
    is_stream: bool
    usage: StreamOptions
    has_token_ids: bool
    has_ids_as_tokens: bool
    eos_token_ids: Collection[int] = ()
    has_reasoning: bool = True
    make_reply: Callable[[], Reply] | None = None


def read_completion(
    model: ServedModel, _options: FrontendOptions, data: dict[str, Any]
) -> OpenAICall:
    """Check a body of `/v1/completions`."""
    body = read_body(CompletionBody, model, data)
    sampling = read_sampling(CompletionSampling, data, model)
    if not body.echo:
        require_tokens(sampling, "max_tokens")
    prompts = read_prompts(body.prompt)
    call = _call(model, body, sampling, prompts, "cmpl-", grammar=openai_grammar(data))
    if body.echo:
        call.echoes = [text for text in _texts(model, prompts) for _ in range(sampling.n)]
    return call


def read_chat(
    model: ServedModel,
    options: FrontendOptions,
    data: dict[str, Any],
    id_prefix: str = "chatcmpl-",
) -> OpenAICall:
    """Check a body of `/v1/chat/completions`."""
    body = read_chat_body(model, data)
    sampling = read_sampling(OpenAISampling, data, model)
    choice = _choice(body)
    text = chat_text(model, body, choice)
    asked = openai_grammar(data)
    if asked is not None and choice.grammar is not None:
        raise InvalidRequest("tool_choice: a call cannot be forced beside another grammar")
    formats, bound, thoughts = options.reply_formats, asked or choice.grammar, None
    if bound is not None:
        if body.separate_reasoning:
            thoughts = _thoughts(body, formats, text)
        if thoughts is not None:
            bound = after_thoughts(bound, thoughts, require_tokenizer(model).is_special)
    elif schemas := choice.schemas:
        bound = _strict_calls(model, body, schemas, formats, text)
    if asked is not None:
        # There are no calls in what it allows, and thoughts only before it.
        formats = ReplyFormats(thoughts=formats.thoughts if thoughts is not None else None)
        choice = ToolChoice([])
    make_reply = _make_reply(body, choice, formats, text, thoughts)
    if make_reply is not None and choice.grammar is None:
        # In many formats marks are special tokens.
        sampling = sampling.model_copy(update={"skip_special_tokens": False})
    prompts = Prompts(is_batch=False, texts=[text])
    call = _call(model, body, sampling, prompts, id_prefix, grammar=bound)
    if choice.grammar is not None and thoughts is not None:
        # A stop token that the client keeps must not be part of the arguments.
        shown = (thoughts.opening, thoughts.closing)
        call.generations = [
            replace(each, rules=replace(each.rules, shown_tokens=shown))
            for each in call.generations
        ]
    call.make_reply, call.has_reasoning = make_reply, body.include_reasoning
    return call


def _strict_calls(
    model: ServedModel,
    body: ChatBody,
    schemas: Mapping[str, Any],
    formats: ReplyFormats,
    prompt: str,
) -> Grammar:
    """Return the grammar that holds the model's own calls to their schemas, behind its thoughts."""
    call = formats.tools.call if formats.tools is not None else None
    is_special = require_tokenizer(model).is_special
    if call is None or is_special(call[0]):
        raise InvalidRequest(
            "tools: strict is supported with --tool-call-parser hermes, or for a call that tool_choice forces; "
            "leave it out"
        )
    grammar = strict_calls(schemas, call, is_parallel=body.parallel_tool_calls)
    thoughts = _thoughts(body, formats, prompt)
    return grammar if thoughts is None else after_thoughts(grammar, thoughts, is_special)


def _thoughts(body: ChatBody, formats: ReplyFormats, prompt: str) -> Thoughts | None:
    """Return what the model may write before what a grammar binds; None where the answer has no thoughts."""
    marks, told = formats.marks_of_thoughts(), prompt.rstrip()
    if marks is None or told.endswith(marks[1]):
        return None
    is_open = told.endswith(marks[0])
    # Not every template has a switch: one may open thoughts in any case.
    is_off = any(body.chat_template_kwargs.get(name) is False for name in THINKING_SWITCHES)
    return None if is_off and not is_open else Thoughts(*marks, is_open)


def read_chat_body(model: ServedModel, data: dict[str, Any]) -> ChatBody:
    """Check the fields of a chat."""
    body = read_body(ChatBody, model, data, UNSUPPORTED_IN_CHATS)
    if body.continue_final_message and body.add_generation_prompt:
        if data.get("add_generation_prompt"):
            raise InvalidRequest(
                "continue_final_message: leave add_generation_prompt out, or set it to false"
            )
        return body.model_copy(update={"add_generation_prompt": False})
    return body


def chat_text(model: ServedModel, body: ChatBody, choice: ToolChoice | None = None) -> str:
    """Return the prompt of a chat, as its template makes it."""
    text = require_tokenizer(model).render_chat(
        [message.for_template() for message in body.messages],
        (choice or _choice(body)).tools or None,
        body.add_generation_prompt,
        body.for_template(),
    )
    return _without_end(text, body.messages[-1]) if body.continue_final_message else text


def _without_end(text: str, last: Message) -> str:
    """Return a prompt up to the end of its last message, which the answer continues."""
    content = last.content.strip()
    if last.role != "assistant" or not content:
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's, with content"
        )
    place = text.rfind(content)
    if place < 0:
        raise InvalidRequest(
            "continue_final_message: this model's template does not write the message as it is"
        )
    return text[: place + len(content)]


def _choice(body: ChatBody) -> ToolChoice:
    return read_choice(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls)


def _make_reply(
    body: ChatBody,
    choice: ToolChoice,
    formats: ReplyFormats,
    prompt: str,
    thoughts: Thoughts | None,
) -> Callable[[], Reply] | None:
    first = None
    if formats.tools is not None and formats.tools.has_numbered_calls:
        first = sum(len(message.tool_calls) for message in body.messages)
    if choice.grammar is not None:
        return partial(choice.reply, first, thoughts)
    return formats.reply(
        prompt,
        choice.tools,
        first,
        is_split=body.separate_reasoning,
        is_parallel=body.parallel_tool_calls,
    )


def read_body(
    kind: type[OpenAIBodyT],
    model: ServedModel,
    data: dict[str, Any],
    also_unsupported: frozenset[str] = frozenset(),
) -> OpenAIBodyT:
    """Check the fields of a body, and that it is for this model."""
    refuse_unsupported(data, also=also_unsupported)
    n = data.get("n")
    if data.get("best_of") not in (None, 1 if n is None else n):
        raise InvalidRequest("best_of: not supported unless it equals n")
    body = validate(kind, data)
    model.adapter_named(body.model)
    return body


def _texts(model: ServedModel, prompts: Prompts) -> Sequence[str]:
    if prompts.texts:
        return prompts.texts
    tokenizer = require_tokenizer(model)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts.ids]


def _call(
    model: ServedModel,
    body: CompletionBody | ChatBody,
    sampling: OpenAISampling,
    prompts: Prompts,
    id_prefix: str,
    *,
    grammar: Grammar | None,
) -> OpenAICall:
    ids = prompt_ids(model, prompts, body.add_special_tokens)
    call_id = body.rid or f"{id_prefix}{new_request_id()}"
    names = ids_of(call_id, sampling.n * len(ids))
    wanted = [Wanted(sampling, grammar, body.wanted())] * len(ids)
    adapter = model.adapter_named(body.model)
    generations = generations_of(
        model, body, prompts, ids, wanted=wanted, names=names, adapter=adapter
    )
    return OpenAICall(
        call_id=call_id,
        model_name=adapter or model.name,
        is_chat=isinstance(body, ChatBody),
        generations=generations,
        num_prompt_tokens=sum(map(len, ids)),
        echoes=[""] * len(generations),
        is_stream=body.stream,
        usage=body.stream_options,
        has_token_ids=body.return_token_ids,
        has_ids_as_tokens=body.return_tokens_as_token_ids,
        eos_token_ids=model.eos_token_ids,
    )
