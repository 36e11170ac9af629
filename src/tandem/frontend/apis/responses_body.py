"""Bodies of `/v1/responses`, converted to chats.

```
 instructions + input items, tools ──▶ Chat ──▶ `frontend/chat/openai_body.py` ──▶ OpenAICall
```

`frontend/apis/responses.py` writes the answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, field

from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import Body, ModelBody, refuse_unsupported, validate, without_nulls
from tandem.frontend.chat.generation import Generation
from tandem.frontend.chat.grammars import OpenAIGrammar, openai_grammar
from tandem.frontend.chat.messages import tool_object
from tandem.frontend.chat.openai_body import MAX_MESSAGES, Chat, ChatOptions, OpenAICall, make_call
from tandem.frontend.chat.sampling import OpenAISampling, Positive, read_sampling
from tandem.frontend.http.absent_routes import NOT_STORED
from tandem.frontend.options import FrontendOptions
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


class Part(Body):
    """Text of a message. Its annotations are ignored."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        """Check that the part has its text."""
        name = "refusal" if self.type == "refusal" else "text"
        self.text = getattr(self, name)
        if self.text is None:
            raise ValueError(f"{name}: is missing")


Parts: TypeAlias = str | list[Part]


def _joined(parts: Parts) -> str:
    # With the same separator as the content parts of a chat message.
    return parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)


class MessageItem(Body, tag="message"):
    """One message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCallItem(Body, tag="function_call"):
    """A tool call of an earlier answer."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body, tag="function_call_output"):
    """The result of a tool call."""

    call_id: str
    output: Parts


class ReasoningItem(Body, tag="reasoning"):
    """The reasoning of an earlier answer."""

    content: Parts = field(default_factory=list)
    encrypted_content: str = ""


AnyItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class Function(Body):
    """A tool that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False

    def for_chat(self) -> Message:
        """Return the tool in the format of `/v1/chat/completions`."""
        return tool_object(self.name, self.description, self.parameters, is_strict=self.strict)


class NamedFunction(Body):
    """A `tool_choice` that forces one tool."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = field(name="schema", default=None)


class TextConfig(Body):
    """`text`."""

    format: TextFormat = field(default_factory=TextFormat)
    verbosity: Literal["medium"] = "medium"


class Reasoning(Body):
    """`reasoning`. Answers contain the full reasoning and no summary of it."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesBody(ModelBody, kw_only=True):
    """`/v1/responses`."""

    input: str | Annotated[list[AnyItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str = ""
    tools: list[Function] = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = field(default_factory=TextConfig)
    reasoning: Reasoning = field(default_factory=Reasoning)
    max_output_tokens: Positive | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    include: list[Literal["reasoning.encrypted_content"]] = field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    background: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
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
    body = validate(ResponsesBody, data | {"input": with_types(data.get("input"))})
    if body.background:
        raise InvalidRequest("background: must be false, because responses are not stored")
    params = data | {"max_tokens": body.max_output_tokens}
    sampling = read_sampling(OpenAISampling, params, model)
    fields = {name: value for name, value in data.items() if name in GRAMMARS}
    if (form := body.text.format).type != "text":
        schema = {"schema": form.schema_}
        fields["response_format"] = {"type": form.type, "json_schema": schema}
    grammar = openai_grammar(fields)
    chat = make_call(model, options, _chat(body), sampling, grammar, id_prefix="resp_")
    return ResponsesCall(body, chat, chat.generations, chat.is_stream)


def with_types(items: object) -> object:
    """Return the input items. Those without a type get the type `message`."""
    first = items[: MAX_MESSAGES + 1] if isinstance(items, list) else ()
    typed = [
        {"type": "message"} | without_nulls(item) if isinstance(item, dict) else item
        for item in first
    ]
    return typed or items


def _chat(body: ResponsesBody) -> Chat:
    choice: object = body.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    options = ChatOptions(
        **body.shared(),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort,
        include_reasoning=body.include_reasoning,
    )
    messages = [*system, *_messages(body.input)]
    return Chat(options, messages, [tool.for_chat() for tool in body.tools])


def _messages(items: str | Sequence[AnyItem]) -> list[Message]:
    """Convert input items to chat messages. The items of one answer become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages, names = list[Message](), dict[str, str]()
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _answer(messages, "content", _joined(item.content))
            case MessageItem():
                messages.append({"role": item.role, "content": _joined(item.content)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                names[item.call_id] = item.name
                _answer(messages, "tool_calls", [call])
            case FunctionCallOutputItem():
                messages.append(_result(item, names))
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
        messages.append(last := {"role": "assistant", "content": None})
    if name == "tool_calls":
        last.setdefault(name, []).extend(part)
    else:
        last[name] = part


def _result(item: FunctionCallOutputItem, names: Mapping[str, str]) -> Message:
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
