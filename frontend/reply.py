"""An assistant's reply in parts: what it says, what it thought, which tools it calls.

```
 text of one choice ──▶ Reply.push, Reply.finish ──▶ Part, Part, ... ──▶ deltas of a stream, or one message
```

Holds the parts and how OpenAI's API writes them. Who makes them of text: `ForcedCall` and `ForcedCalls` in
`frontend/tool_calls.py`, `ParsedReply` in `frontend/reply_parser.py`.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# Returns the id of a call, from its index in the reply and the name of its tool.
CallIds = Callable[[int, str], str]


@dataclass(frozen=True, slots=True)
class Part:
    """What came next of a reply.

    Attributes:
        text: For a call, of its arguments, which are JSON once all of them came.
        index: Of the call among those of the reply.
        call_id: Set on the first part of a call, as `name` is; empty on those that go on.
    """

    kind: Literal["content", "reasoning_content", "tool_call"]
    text: str
    index: int = 0
    call_id: str = ""
    name: str = ""

    def delta(self) -> dict[str, Any]:
        """Return the part as the `delta` of a streamed choice."""
        if self.kind != "tool_call":
            return {self.kind: self.text}
        call: dict[str, Any] = {"index": self.index}
        if self.call_id:
            call |= {"id": self.call_id, "type": "function"}
        function = {"name": self.name} if self.name else {}
        return {"tool_calls": [call | {"function": function | {"arguments": self.text}}]}


class Reply(Protocol):
    """Reads the text of one choice as it comes."""

    @property
    def finish_reason(self) -> str:
        """What an answer that ended by itself is told to have ended for: `stop` or `tool_calls`."""
        ...

    def push(self, text: str) -> list[Part]:
        """Return what `text` completes; however the text is cut, the parts join to the same."""
        ...

    def finish(self) -> list[Part]:
        """Return the rest. Nothing may be pushed afterwards."""
        ...


def random_ids(_index: int, _name: str) -> str:
    """Return an id as OpenAI makes them."""
    return f"call_{secrets.token_hex(12)}"


def numbered_ids(num_earlier: int) -> CallIds:
    """Return what makes ids in which calls are numbered over their conversation.

    Args:
        num_earlier: Calls that stand in the conversation before the reply.
    """
    return lambda index, name: f"functions.{name}:{num_earlier + index}"


def new_call(index: int, name: str, arguments: str, ids: CallIds) -> Part:
    """Return a call, or its beginning, with an id of its own."""
    return Part("tool_call", arguments, index, ids(index, name), name)


def message(parts: Iterable[Part]) -> dict[str, Any]:
    """Return the parts of a whole reply as the `message` of a choice."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind != "tool_call":
            texts[part.kind] += part.text
        elif part.call_id:
            function = {"name": part.name, "arguments": part.text}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        else:
            calls[part.index]["function"]["arguments"] += part.text
    # OpenAI's content is null where there are only calls.
    made: dict[str, Any] = {"role": "assistant", "content": texts["content"] or None}
    if not calls and not texts["reasoning_content"]:
        made["content"] = texts["content"]
    if texts["reasoning_content"]:
        made["reasoning_content"] = texts["reasoning_content"]
    return made | ({"tool_calls": calls} if calls else {})
