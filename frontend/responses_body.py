"""Bodies of `/v1/responses`: from JSON to the chat of OpenAI's API that asks for the same.

```
 stored messages + instructions + input items, tools ──▶ ChatBody's fields ──▶ `frontend/openai_body.py` ──▶ OpenAICall
```

Answering is in `frontend/responses.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tandem.frontend.backend import ServedModel
from tandem.frontend.body import (
    Body,
    GenerationBody,
    Many,
    refuse_unsupported,
    validate,
)
from tandem.frontend.generation import Generation
from tandem.frontend.openai_body import MAX_MESSAGES, OpenAICall, read_chat
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import NAMES, GivenId
from tandem.frontend.sampling import OpenAISampling
from tandem.wire.errors import InvalidRequest

Message: TypeAlias = dict[str, Any]

# Beside those that no route takes: what other routes take, and what this server does not do.
REFUSED = frozenset(
    {
        *("background_options", "context_management", "conversation", "image", "prompt"),
        *("messages", "logprobs", "response_format", "reasoning_effort", "max_tokens"),
        *("max_completion_tokens", "top_logprobs"),
    }
)


def _as_parts(content: object) -> object:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class TextPart(Body):
    """Text of a message. Annotations beside it are ignored."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


Parts = Annotated[
    Many[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
]


def _joined(parts: Iterable[TextPart]) -> str:
    # As the parts of a chat's content.
    return "\n".join(part.text for part in parts)


class MessageItem(Body):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(Body):
    """Thoughts of an earlier answer."""

    type: Literal["reasoning"]
    content: Parts = Field(default_factory=list)
    encrypted_content: str = ""


def _kind(item: object) -> object:
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return found if isinstance(found, str) else ""


AnyItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
Item = Annotated[
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
        """Return the tool as chats write it."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function: Message = {name: value for name, value in given.items() if value}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class NamedFunction(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the text must follow."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextConfig(Body):
    """`text`."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Literal["medium"] = "medium"


class Reasoning(Body):
    """`reasoning`. The thoughts themselves are returned, and no summary of them."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesBody(GenerationBody):
    """`/v1/responses`."""

    model: str | None = None
    input: Annotated[
        Many[Item],
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str = ""
    previous_response_id: str = ""
    store: bool = True
    rid: Annotated[GivenId | None, Field(validation_alias=NAMES)] = None
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


@dataclass(slots=True)
class ResponsesCall:
    """One checked call: one generation.

    Attributes:
        messages: The conversation without the instructions, to be stored with the answer.
    """

    body: ResponsesBody
    chat: OpenAICall
    messages: list[Message]
    generations: list[Generation]
    is_stream: bool


def read_responses(
    model: ServedModel,
    options: FrontendOptions,
    data: dict[str, Any],
    *,
    past: Sequence[Message] = (),
) -> ResponsesCall:
    """Check a body of `/v1/responses`.

    Args:
        past: The messages of the response that `previous_response_id` names.
    """
    refused = {name: value for name, value in data.items() if name != "reasoning"}
    refuse_unsupported(refused, also=REFUSED)
    if data.get("n") not in (None, 1):
        raise InvalidRequest("n: a response is one answer; leave it out")
    body = validate(ResponsesBody, data)
    messages = _messages(body.input, past)
    chat = read_chat(model, options, _chat(body, messages, data), id_prefix="resp_")
    return ResponsesCall(body, chat, messages, chat.generations, chat.is_stream)


def _chat(body: ResponsesBody, messages: list[Message], data: dict[str, Any]) -> dict[str, Any]:
    """Return the body of `/v1/chat/completions` that asks for the same."""
    own = {*OpenAISampling.names(), *GenerationBody.names(), "model"} - {"max_tokens"}
    choice: object = body.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat = {name: value for name, value in data.items() if name in own} | {
        "messages": [*system, *messages],
        "tools": [tool.for_chat() for tool in body.tools],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "rid": body.rid,
    }
    asked = body.text.format
    if asked.type != "text":
        chat["response_format"] = {"type": asked.type}
    if asked.type == "json_schema":
        chat["response_format"]["json_schema"] = {"schema": asked.schema_}
    return chat


def _messages(items: Sequence[AnyItem], past: Sequence[Message] = ()) -> list[Message]:
    """Return the messages of a chat: earlier ones, then input items. What one answer had is one message."""
    messages = list(past)
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _answer(messages, "content", _joined(item.content))
            case MessageItem():
                # Templates know no developer.
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _joined(item.content)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _answer(messages, "tool_calls", [call])
            case FunctionCallOutputItem():
                messages.append(_result(item, messages))
            case ReasoningItem():
                if item.encrypted_content and not item.content:
                    raise InvalidRequest(
                        "input: encrypted reasoning cannot be read; send the item's content"
                    )
                if item.content:
                    _answer(messages, "reasoning_content", _joined(item.content))
    return messages


# What an answer has if the part behind it belongs to the next one. Thoughts come first, then text, then calls.
_ENDED_BY = {
    "reasoning_content": ("role",),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}


def _answer(messages: list[Message], name: str, part: Any) -> None:
    """Add a part to the assistant's last message, or begin one where it has ended."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(each) for each in _ENDED_BY[name]):
        messages.append(last := {"role": "assistant", "content": ""})
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
