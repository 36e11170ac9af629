"""The messages, tool calls and tools of a chat, checked by field and kept as the client wrote them.

A chat template may write all fields of an object, in their order. So objects stay as they came, except that fields
that are null are left out.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field

from tandem.frontend.chat.body import Body, Many, OneOrMany, with_message, without_nulls


class MessageText(Body):
    """Text of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """Text of an earlier answer in which the model declined."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The part's text."""
        return self.refusal


def _joined(content: str | Sequence[MessageText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class CalledFunction(Body):
    """The function of a tool call."""

    name: str
    arguments: Annotated[str | dict[str, Any], with_message("must be JSON text or an object")] = ""


class ToolCall(Body):
    """A tool call of an earlier answer."""

    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(Body):
    """A tool that the client runs."""

    type: Literal["function"] = "function"
    function: ToolFunction


def _as_sent(kind: type[Tool | ToolCall]) -> BeforeValidator:
    """Check an object as `kind`, and keep the fields that the client sent."""

    def check(value: Any) -> dict[str, Any]:
        checked = kind.model_validate(value)
        sent = without_nulls(value)
        return {**sent, "type": checked.type, "function": without_nulls(sent["function"])}

    return BeforeValidator(check, json_schema_input_type=kind)


ToolObject: TypeAlias = Annotated[dict[str, Any], _as_sent(Tool)]
ToolCallObject: TypeAlias = Annotated[dict[str, Any], _as_sent(ToolCall)]


class ChatMessage(Body):
    """One message of a conversation. Additional fields are passed to the template unchanged.

    The last three fields are alternative names for the reasoning of an earlier answer.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: Annotated[
        OneOrMany[str, Annotated[MessageText | RefusalPart, Discriminator("type")]] | None,
        AfterValidator(_joined),
    ] = None
    refusal: str | None = None
    tool_calls: Many[ToolCallObject] = Field(default_factory=list)
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message in OpenAI's format, with one text as its content."""
        fields = self.model_dump(exclude_unset=True, exclude={"refusal", "tool_calls"})
        if self.tool_calls:
            fields["tool_calls"] = self.tool_calls
        text = self.refusal if self.content is None else self.content
        return fields | {"content": text}
