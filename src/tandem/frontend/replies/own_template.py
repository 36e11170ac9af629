"""Parse replies with the model's own `response_template`, which some tokenizers ship.

transformers' `ResponseParser` splits the text into the fields of the template. It searches for the closing mark of a
field, also inside of strings, and returns a call when it is complete. Calls that the template cannot parse become
content.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tandem.frontend.replies.call_scanner import CallBegin
from tandem.frontend.replies.tool_calls import CallParts, ReplyPart, TextKind, TextParts
from tandem.wire.errors import ConfigInvalid

Template = Mapping[str, Any]

_TOPIC = "docs/parsers.md"
# Names under which templates return the reasoning.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def reasoning_marks(template: Template) -> tuple[str, str] | None:
    """Return the opening and closing mark of the reasoning. None: the template has no reasoning with fixed marks."""
    for name in _REASONING:
        field = template["fields"].get(name, {})
        opening, closing = field.get("open"), field.get("close")
        if isinstance(opening, str) and isinstance(closing, str):
            return opening, closing
    return None


def checked_template(template: object) -> Template:
    """Return a response template as a mapping.

    Raises:
        ConfigInvalid: It is not one, or the model has none.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    remedy = "name the parser of the model's format"
    if template is None:
        raise ConfigInvalid(
            f"parser hf: the model's tokenizer has no response_template; {remedy}", _TOPIC
        )
    try:
        load_response_template(template)
    except (TypeError, ValueError) as error:
        raise ConfigInvalid(
            f"parser hf: the response_template of the model's tokenizer is invalid ({error}); {remedy}",
            _TOPIC,
        ) from error
    assert isinstance(template, dict)
    return template


class TemplateReply:
    """Parses one choice with the model's response template. A `Reply`.

    Args:
        template: A checked template.
        prompt: The prompt's text, whose end may open a field.
        tools: The request's tools, whose schemas define the types of arguments. None: calls are content.
        first, max_calls: As in `CallParts`.
        is_split: Whether to separate the reasoning from the content.
    """

    def __init__(
        self,
        template: Template,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
        first: int | None,
        max_calls: float,
        *,
        is_split: bool,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._fields = template["fields"]
        self._tools, self._is_split = tools, is_split
        self._text, self._calls = TextParts(), CallParts(first, max_calls)
        self._parser: Any = ResponseParser(_readable(template), prefix=prompt)
        for event in self._parser.initial_events:
            self._open(event)

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """`tool_calls` if the reply has a call."""
        return "tool_calls" if self._calls.num_calls else "stop"

    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that `text` completes."""
        return [part for event in self._parser.feed(text) for part in self._take(event)]

    def finish(self) -> list[ReplyPart]:
        """Return the remaining parts."""
        events = self._parser.finalize()[1]
        parts = [part for event in events for part in self._take(event)]
        blanks = "".join(self._text.blanks)
        if blanks and self._text.kind == "content":
            parts.append(ReplyPart("content", blanks))
        return parts

    def _open(self, event: Mapping[str, Any]) -> None:
        kind: TextKind = "content"
        if event["field"] in _REASONING and self._is_split:
            kind = "reasoning_content"
        if event["type"] == "region_open" and (kind != self._text.kind):
            self._text.begin(kind)

    def _take(self, event: Mapping[str, Any]) -> list[ReplyPart]:
        is_call = event["field"] == "tool_calls" and self._tools is not None
        match event["type"]:
            case "region_open":
                self._open(event)
            case "region_chunk" if not is_call:
                return self._text.add(event["text"])
            case "region_close" if is_call:
                return self._close_call(event["value"])
        return []

    def _close_call(self, value: Mapping[str, str]) -> list[ReplyPart]:
        try:
            calls = [_function(each) for each in self._parse(value)]
        except (KeyError, RecursionError, TypeError, ValueError):
            return self._text.add(value["body"])
        self._text.begin("content")
        return [
            part
            for name, arguments in calls
            for event in (CallBegin(name), arguments)
            for part in self._calls.add(event)
        ]

    def _parse(self, value: Mapping[str, str]) -> list[Any]:
        """Return the calls of a field's text, with arguments of their schemas' types."""
        from transformers.utils.chat_parsing.content_parsers import process_field
        from transformers.utils.chat_parsing.response_parser import parse_response
        from transformers.utils.chat_parsing.response_templates import load_response_template

        field = load_response_template(
            {"fields": {"tool_calls": self._fields["tool_calls"]}, "start_anchor": "\0"}
        ).fields["tool_calls"]
        captures = {name: text for name, text in value.items() if name != "body"}
        calls = process_field(value["body"], field, captures)
        typed = parse_response(
            json.dumps(calls if isinstance(calls, list) else [calls]),
            {"fields": {"calls": {"content": "json"}}, "start_anchor": "\0"},
            prefix="",
            tools=list(self._tools or ()),
        )
        found: list[Any] = typed["calls"]
        return found


def _function(call: Any) -> tuple[str, str]:
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    if not isinstance(name, str):
        raise TypeError("the name of a call must be text")
    is_text = isinstance(arguments, str)
    return name, arguments if is_text else json.dumps(arguments, ensure_ascii=False)


def _readable(template: Template) -> Template:
    """Return the template with the raw text of calls as their value, which no content can make fail."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    groups = load_response_template(dict(template)).fields
    fields = copy.deepcopy(template["fields"])
    for name, field in fields.items():
        field |= {"optional": True}
        if name == "tool_calls":
            for key in ("transform_each", "content", "content_args", "join"):
                field.pop(key, None)
            patterns = (groups[name].open_re, groups[name].close_re)
            names = [group for each in patterns if each is not None for group in each.groupindex]
            captured = {group: f"{{{group}}}" for group in names}
            field |= {"repeats": True, "content_args": {"strip": False}}
            field["transform"] = captured | {"body": "{content}"}
    return {**template, "fields": fields}
