"""The messages, tool calls and tools of a chat, checked by field and kept as the client wrote them.

A chat template may write all fields of an object, in their order. So objects stay as they came, except that fields
that are null are left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from tandem.frontend.chat.body import Body, without_nulls


class MessageText(Body, tag="text"):
    """Text of a message."""

    text: str


class RefusalPart(Body, tag="refusal"):
    """Text of an earlier answer in which the model declined."""

    text: str = field(name="refusal")


class CalledFunction(Body):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body, kw_only=True):
    """A tool call of an earlier answer."""

    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Body):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    parameters: dict[str, Any] = field(default_factory=dict)


class Tool(Body, kw_only=True):
    """A tool that the client runs."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ChatMessage(Body):
    """One message of a conversation. Additional fields are passed to the template unchanged.

    The last three fields are alternative names for the reasoning of an earlier answer.
    """

    role: str
    content: str | list[MessageText | RefusalPart] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None

    def for_template(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message in OpenAI's format, with one text as its content.

        Args:
            sent: The message as the client sent it.
        """
        fields = without_nulls(sent)
        fields.pop("refusal", None)
        if calls := fields.pop("tool_calls", None):
            fields["tool_calls"] = [as_sent(call) for call in calls]
        content = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return fields | {"content": content}


def as_sent(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked tool or call with the fields that the client sent."""
    sent = without_nulls(value)
    return {**sent, "type": "function", "function": without_nulls(sent["function"])}


def tool_object(
    name: str, description: str, parameters: dict[str, Any], *, is_strict: bool
) -> dict[str, Any]:
    """Return a tool in OpenAI's format, without empty fields."""
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {field: value for field, value in (fields | {"strict": is_strict}).items() if value}
    return {"type": "function", "function": function}
