"""Bodies of `/v1/responses`, converted to equivalent bodies of `/v1/chat/completions`.

```
 instructions + input items, tools ──▶ ChatBody's fields ──▶ `frontend/chat/openai_body.py` ──▶ OpenAICall
```

`frontend/apis/responses.py` writes the answers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import (
    Body,
    GenerationBody,
    Many,
    refuse_unsupported,
    validate,
)
from tandem.frontend.chat.generation import Generation
from tandem.frontend.chat.grammars import OpenAIGrammar
from tandem.frontend.chat.messages import RefusalPart
from tandem.frontend.chat.openai_body import MAX_MESSAGES, OpenAICall, read_chat
from tandem.frontend.chat.sampling import OpenAISampling
from tandem.frontend.http.absent_routes import NOT_STORED
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import NAMES, RequestIdField
from tandem.wire.errors import InvalidRequest

Message: TypeAlias = dict[str, Any]

# SGLang's and vLLM's fields. `text` replaces OpenAI's `response_format`.
GRAMMARS = OpenAIGrammar.names() - {"response_format"}

# Fields rejected here, in addition to those that every route rejects: fields of other routes, and unsupported ones.
REFUSED = frozenset(
    {
        *("background_options", "context_management", "conversation", "image", "prompt"),
        "previous_response_id",
        *("messages", "logprobs", "response_format", "reasoning_effort", "max_tokens"),
        *("max_completion_tokens", "top_logprobs"),
        *("enable_response_messages", "previous_input_messages"),
    }
)


def _as_parts(content: object) -> object:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class TextPart(Body):
    """Text of a message. Its annotations are ignored."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


Part = Annotated[TextPart | RefusalPart, Discriminator("type")]
TextParts = Annotated[
    Many[Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])
]


def _joined(parts: Iterable[TextPart | RefusalPart]) -> str:
    # With the same separator as the content parts of a chat message.
    return "\n".join(part.text for part in parts)


class MessageItem(Body):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextParts


class FunctionCallItem(Body):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextParts


class ReasoningItem(Body):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: TextParts = Field(default_factory=list)
    encrypted_content: str = ""


def _kind(item: object) -> object:
    kind = (item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", "")
    return kind if isinstance(kind, str) else ""


AnyItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Function(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    def for_chat(self) -> Message:
        """Return the tool in the format of `/v1/chat/completions`."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function: Message = {name: value for name, value in fields.items() if value}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class NamedFunction(Body):
    """A `tool_choice` that forces one tool."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextConfig(Body):
    """`text`."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Literal["medium"] = "medium"


class Reasoning(Body):
    """`reasoning`. Answers contain the full reasoning and no summary of it."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesBody(GenerationBody):
    """`/v1/responses`."""

    model: str | None = None
    input: Annotated[
        Many[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str = ""
    rid: Annotated[RequestIdField | None, Field(validation_alias=NAMES)] = None
    tools: Many[Function] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    include: Many[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    include_reasoning: bool = True


@dataclass(slots=True)
class ResponsesCall:
    """One checked call: one generation."""

    body: ResponsesBody
    chat: OpenAICall
    generations: list[Generation]
    is_stream: bool


def read_responses(
    model: ServedModel, options: FrontendOptions, data: dict[str, Any]
) -> ResponsesCall:
    """Check a body of `/v1/responses`."""
    if data.get("previous_response_id"):
        raise InvalidRequest(f"previous_response_id: {NOT_STORED}")
    refused = {name: value for name, value in data.items() if name != "reasoning"}
    refuse_unsupported(refused, also=REFUSED)
    if data.get("n") not in (None, 1):
        raise InvalidRequest("n: must be 1, because a response is one answer; leave it out")
    body = validate(ResponsesBody, data)
    chat = read_chat(model, options, _chat(body, data), id_prefix="resp_")
    return ResponsesCall(body, chat, chat.generations, chat.is_stream)


def _chat(body: ResponsesBody, data: dict[str, Any]) -> dict[str, Any]:
    """Return the equivalent body of `/v1/chat/completions`."""
    shared = {*OpenAISampling.names(), *GRAMMARS, *GenerationBody.names(), "model"} - {"max_tokens"}
    choice: object = body.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat = {name: value for name, value in data.items() if name in shared} | {
        "messages": [*system, *_messages(body.input)],
        "tools": [tool.for_chat() for tool in body.tools],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "include_reasoning": body.include_reasoning,
        "rid": body.rid,
    }
    text_format = body.text.format
    if text_format.type != "text":
        chat["response_format"] = {"type": text_format.type}
    if text_format.type == "json_schema":
        chat["response_format"]["json_schema"] = {"schema": text_format.schema_}
    return chat


def _messages(items: Sequence[AnyItem]) -> list[Message]:
    """Convert input items to chat messages. The items of one answer become one message."""
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _answer(messages, "content", _joined(item.content))
            case MessageItem():
                messages.append({"role": item.role, "content": _joined(item.content)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _answer(messages, "tool_calls", [call])
            case FunctionCallOutputItem():
                messages.append(_result(item, messages))
            case ReasoningItem():
                if item.encrypted_content and not item.content:
                    raise InvalidRequest(
                        "input: encrypted reasoning is not supported; send the item's content"
                    )
                if item.content:
                    _answer(messages, "reasoning_content", _joined(item.content))
    return messages


# An answer has reasoning, then text, then calls. A part of the kind on the left starts a new answer if the
# last message already has one of the fields on the right.
_STARTS_NEW_AFTER = {
    "reasoning_content": ("role",),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}


def _answer(messages: list[Message], name: str, part: Any) -> None:
    """Add a part to the last assistant message, or start a new message if that one is complete."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(each) for each in _STARTS_NEW_AFTER[name]):
        messages.append(last := {"role": "assistant"})
    last[name] = [*last.get(name, []), *part] if name == "tool_calls" else part


def _result(item: FunctionCallOutputItem, messages: Sequence[Message]) -> Message:
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    if item.call_id not in names:
        raise InvalidRequest(
            f"input: no function_call with call_id {item.call_id!r} precedes its function_call_output"
        )
    return {
        "role": "tool",
        "tool_call_id": item.call_id,
        "name": names[item.call_id],
        "content": _joined(item.output),
    }
