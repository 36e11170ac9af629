"""Bodies of Anthropic's API, converted to chats.

```
 system, messages of blocks, tools ──▶ Chat ──▶ `frontend/chat/openai_body.py` ──▶ OpenAICall
```

`cache_control` is ignored: every prefix is cached, and the usage reports the cached tokens. The headers
`anthropic-version` and `anthropic-beta` are ignored too: betas add fields, and unsupported fields are
rejected by name. `frontend/apis/anthropic.py` writes the answers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Meta, field

from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import Body, ModelBody, refuse_unsupported, validate
from tandem.frontend.chat.generation import require_tokenizer, tokenize
from tandem.frontend.chat.grammars import OpenAIGrammar, openai_grammar
from tandem.frontend.chat.messages import tool_object
from tandem.frontend.chat.openai_body import (
    MAX_MESSAGES,
    THINKING_SWITCHES,
    Chat,
    ChatOptions,
    OpenAICall,
    chat_text,
    make_call,
)
from tandem.frontend.chat.sampling import MAX_STOPS, OpenAISampling, Stop, read_sampling
from tandem.frontend.options import FrontendOptions
from tandem.wire.errors import InvalidRequest

T = TypeVar("T")
BlockT = TypeVar("BlockT", bound=Body)

_SAMPLING = frozenset({"max_tokens", "temperature", "top_p", "top_k"})
# Fields of Anthropic's API that would change the answer or its metadata.
UNSUPPORTED_IN_MESSAGES = frozenset(
    {
        *("compaction", "container", "diagnostics", "inference_geo", "mcp_servers"),
        *("output_format", "thread"),
    }
)
# Supported on other routes.
_OF_OTHER_APIS = (
    frozenset({"logprobs", "parallel_tool_calls", "reasoning_effort", "top_logprobs"})
    | (OpenAISampling.names() - _SAMPLING)
    | OpenAIGrammar.names()
)


class TextBlock(Body, tag="text"):
    """Text. Its citations are ignored, because they repeat the text."""

    text: str


# A string is accepted in place of a list with one text block.
Blocks: TypeAlias = str | list[T]


def _blocks(content: Blocks[Any]) -> Sequence[Any]:
    return [TextBlock(content)] if isinstance(content, str) else content


class ThinkingBlock(Body, tag="thinking"):
    """Reasoning of an earlier answer. Its signature is ignored, because this server signs none."""

    thinking: str


class ToolUseBlock(Body, tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]

    def for_chat(self) -> dict[str, Any]:
        """Return the call in OpenAI's format, except that its arguments stay an object."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(Body, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: Blocks[TextBlock] = field(default_factory=list)
    is_error: bool = False

    def for_chat(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the result in OpenAI's format.

        Args:
            names: Tool name of each call so far, by call id.
        """
        if self.tool_use_id not in names:
            raise InvalidRequest(
                f"messages: no tool_use with id {self.tool_use_id!r} precedes its tool_result"
            )
        content = _joined(_blocks(self.content))
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "name": names[self.tool_use_id],
            # Chat templates have no field for `is_error`.
            "content": f"Error: {content}" if self.is_error else content,
        }


class UserMessage(Body, tag_field="role", tag="user"):
    """The user's text and the results of tools."""

    content: Blocks[TextBlock | ToolResultBlock]


class AssistantMessage(Body, tag_field="role", tag="assistant"):
    """An earlier answer."""

    content: Blocks[TextBlock | ThinkingBlock | ToolUseBlock]


class SystemMessage(Body, tag_field="role", tag="system"):
    """Instructions between two turns. The chat template may reject them."""

    content: Blocks[TextBlock]


AnyMessage = UserMessage | AssistantMessage | SystemMessage


class CustomTool(Body, kw_only=True):
    """A tool that the client runs. Anthropic's own tools have other types."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Meta(min_length=1)]
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = False
    allowed_callers: list[Literal["direct"]] = field(default_factory=list)
    input_examples: Annotated[list[Any], Meta(max_length=0)] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check what the types of the fields cannot express."""
        if self.input_schema.get("type") != "object":
            raise ValueError('input_schema: must be a JSON schema of "type": "object"')
        if self.defer_loading:
            raise ValueError("defer_loading: must be false")

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format."""
        return tool_object(self.name, self.description, self.input_schema, is_strict=self.strict)


class CustomToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.type in ("any", "tool")

    def for_chat(self) -> object:
        """Return the choice in OpenAI's format."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Body):
    """`thinking`. Its budget is ignored: Anthropic defines it as a target, and `max_tokens` limits reasoning plus text."""

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized"] = "summarized"


class OutputFormat(Body):
    """The required format of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = field(name="schema")


class OutputConfig(Body):
    """`output_config`. `effort` is passed to the chat template as `reasoning_effort`."""

    effort: str | None = None
    format: OutputFormat | None = None


class KeepThinking(Body):
    """A context edit that changes nothing. Claude Code sends it."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """`context_management`."""

    edits: list[KeepThinking] = field(default_factory=list)


class CountBody(ModelBody, kw_only=True):
    """`/v1/messages/count_tokens`."""

    system: Blocks[TextBlock] = field(default_factory=list)
    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[CustomTool] = field(default_factory=list)
    tool_choice: CustomToolChoice = field(default_factory=CustomToolChoice)
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = field(default_factory=OutputConfig)
    context_management: ContextManagement = field(default_factory=ContextManagement)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] = field(default_factory=list)


def read_messages(model: ServedModel, options: FrontendOptions, data: dict[str, Any]) -> OpenAICall:
    """Check a body of `/v1/messages`."""
    refuse_unsupported(data, also=UNSUPPORTED_IN_MESSAGES | _OF_OTHER_APIS)
    body = validate(MessagesBody, data)
    params = {name: getattr(body, name) for name in _SAMPLING} | {"stop": body.stop_sequences}
    sampling = read_sampling(OpenAISampling, params, model)
    form = body.output_config.format
    grammar = openai_grammar({} if form is None else {"json_schema": form.schema_})
    chat = _chat(body, model, options)
    return make_call(model, options, chat, sampling, grammar, id_prefix="msg_")


def count_prompt(model: ServedModel, options: FrontendOptions, data: dict[str, Any]) -> int:
    """Return the number of prompt tokens of a body, which may exceed the model's limit.

    Raises:
        InvalidRequest: The prompt is so long that it was not tokenized.
    """
    refuse_unsupported(data, also=UNSUPPORTED_IN_MESSAGES | _OF_OTHER_APIS)
    body = validate(CountBody, data)
    model.resolve_adapter(body.model)
    text = chat_text(model, _chat(body, model, options))
    [ids] = tokenize(model, [text], add_special_tokens=False)
    return len(ids)


def _chat(body: CountBody, model: ServedModel, options: FrontendOptions) -> Chat:
    tools, choice = body.tools, body.tool_choice
    if choice.is_forced and not tools:
        raise InvalidRequest(f"tool_choice: {choice.type!r} requires tools, and the body has none")
    chat = ChatOptions(
        **body.shared(),
        tool_choice=choice.for_chat(),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        chat_template_kwargs=_switches(body, model, options) | body.chat_template_kwargs,
        reasoning_effort=body.output_config.effort,
    )
    return Chat(chat, list(_turns(body)), [tool.for_chat() for tool in tools])


def _turns(body: CountBody) -> Iterator[dict[str, Any]]:
    """Yield the messages in OpenAI's format. Consecutive messages of one role become one turn."""
    if isinstance(body.messages[-1], AssistantMessage):
        raise InvalidRequest(
            "messages: the last message must not be the assistant's, because answers cannot be continued"
        )
    if system := _blocks(body.system):
        yield {"role": "system", "content": _joined(system)}
    names: dict[str, str] = {}
    for kind, messages in groupby(body.messages, key=type):
        blocks = [block for message in messages for block in _blocks(message.content)]
        if kind is AssistantMessage:
            names |= {block.id: block.name for block in _only(ToolUseBlock, blocks)}
            yield _answer(blocks)
            continue
        role = "user" if kind is UserMessage else "system"
        for block_kind, run in groupby(blocks, key=type):
            if block_kind is ToolResultBlock:
                yield from (result.for_chat(names) for result in _only(ToolResultBlock, run))
            else:
                yield {"role": role, "content": _joined(_only(TextBlock, run))}


def _only(kind: type[BlockT], blocks: Iterable[Body]) -> list[BlockT]:
    return [block for block in blocks if isinstance(block, kind)]


def _answer(blocks: Sequence[Body]) -> dict[str, Any]:
    """Return an earlier answer as one message. Templates render reasoning, then text, then calls."""
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    if texts := _only(TextBlock, blocks):
        turn["content"] = _joined(texts)
    if reasoning := [block.thinking for block in _only(ThinkingBlock, blocks)]:
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls := [block.for_chat() for block in _only(ToolUseBlock, blocks)]:
        turn["tool_calls"] = calls
    return turn


def _joined(blocks: Iterable[TextBlock]) -> str:
    # With the same separator as the content parts of a chat message.
    return "\n".join(block.text for block in blocks)


def _switches(body: CountBody, model: ServedModel, options: FrontendOptions) -> dict[str, bool]:
    """Return the template variables that implement `thinking`. A template without any ignores `disabled`."""
    if body.thinking is None:
        return {}
    kind, switches = body.thinking.type, THINKING_SWITCHES & require_tokenizer(model).template_names
    formats = options.formats_of(model.names)
    has_parser = formats.reasoning is not None
    # Without marks around the reasoning, a forced call starts at the first token.
    is_excluded = body.tool_choice.is_forced and formats.reasoning_marks() is None
    if kind == "enabled" and not has_parser:
        raise InvalidRequest(
            "thinking: this server has no reasoning parser; leave it out, or start the server with "
            "--reasoning-parser"
        )
    if kind == "enabled" and is_excluded:
        raise InvalidRequest("thinking: cannot be enabled together with a forced tool call")
    if kind == "adaptive" and (is_excluded or not has_parser):
        return {}
    return dict.fromkeys(switches, kind != "disabled")
