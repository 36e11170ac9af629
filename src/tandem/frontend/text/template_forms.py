"""The forms in which a chat template takes what clients send in several ways, found by rendering probes.

```
 arguments of a call      object, or its JSON text     templates that concatenate fail on objects
 content beside calls     null, or empty text          some write calls only if the content is null, others fail on null
 role of a developer      developer, or system         templates drop roles that they do not know
 reasoning                under each name in use
```

A template that fails, writes Python's notation or escapes the JSON text does not take that form.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tandem.frontend.text import json_text
from tandem.wire.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]

# The names of reasoning in the messages of vLLM, SGLang, transformers, OpenRouter and gpt-oss.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

_KEY, _TEXT, _OTHER_ROLE = "probe_key", "probe text", "probe_role"
_USER = {"role": "user", "content": "Hello"}
# Mistral's templates require ids of nine characters.
_CALL = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probe", "arguments": {_KEY: "value"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_CALL_PROBE: Messages = [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]

Render = Callable[[Messages, Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """The forms that one template takes.

    Attributes:
        has_text_arguments: Whether it takes the arguments of calls as JSON text instead of objects.
        no_content: What it takes as the content of an answer that has only calls.
        has_developer: Whether it has a place for the role `developer`. Otherwise this becomes `system`.
    """

    has_text_arguments: bool = False
    no_content: str | None = None
    has_developer: bool = True

    def apply(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages as the template takes them.

        Raises:
            InvalidRequest: The template takes objects, and the arguments of a call are not JSON.
        """
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fields, calls = dict(message), message.get("tool_calls")
        if not self.has_developer and message.get("role") == "developer":
            fields["role"] = "system"
        if calls:
            fields["tool_calls"] = [self._call(call) for call in calls]
        # Some templates write either the calls or the text of a message, and take empty text for text.
        fields["content"] = message.get("content") or (self.no_content if calls else "")
        reasoning = next((message[name] for name in REASONING_NAMES if message.get(name)), None)
        return fields if reasoning is None else fields | dict.fromkeys(REASONING_NAMES, reasoning)

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if self.has_text_arguments:
            arguments = _as_text(arguments)
        elif isinstance(arguments, str):
            arguments = _as_object(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


def _as_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: str) -> object:
    try:
        return json_text.decode(arguments.strip().encode() or b"{}")
    except ValueError as error:
        raise InvalidRequest(f"tool_calls: arguments are not valid JSON: {error}") from error


def forms_of(render: Render) -> TemplateForms:
    """Return the forms of the template that `render` renders: the preferred ones if it takes several."""
    choices = [
        TemplateForms(has_text_arguments=is_text, no_content=content)
        for content, is_text in product((None, ""), (False, True))
    ]
    best = max(choices, key=lambda forms: _fidelity(_text_of(render, forms.apply(_CALL_PROBE))))
    return replace(best, has_developer=_has_developer(render))


def _fidelity(text: str | None) -> tuple[bool, int, bool]:
    """Return how well a template rendered the call: the larger, the better."""
    if text is None:
        return False, 0, False
    # Python's notation, escaped JSON text, and null as text. What a template always writes counts for all forms.
    num_faults = sum(map(text.count, (f"'{_KEY}':", f'\\"{_KEY}', "None", "null")))
    return True, -num_faults, _KEY in text


def _has_developer(render: Render) -> bool:
    developer, other = (
        _text_of(render, [{"role": role, "content": _TEXT}, _USER])
        for role in ("developer", _OTHER_ROLE)
    )
    if developer is None or _TEXT not in developer:
        return False
    # A template that writes any role has no place for this one: the model has never seen it.
    return other is None or other.replace(_OTHER_ROLE, "developer") != developer


def _text_of(render: Render, messages: Messages) -> str | None:
    for tools in ([_TOOL], []):
        try:
            return render(messages, tools)
        except InvalidRequest:
            pass  # the template takes no tools, or not these messages
    return None
