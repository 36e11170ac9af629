"""Parse tool calls and reasoning in text that no grammar constrains.

```
              a mark that opens
 content ──────────────────────▶ reasoning ──▶ content         at its closing mark
    │ ───────▶ section ──▶ call ──▶ section ──▶ content        the marks around a list of calls
    └ ───────▶ call ──▶ content                                where the scanner finds the end of the call
               call ──▶ tail ──▶ content                       if it broke off: up to its closing mark
 header ──▶ body ──▶ header                                    harmony: all text is in messages, with headers
```

Each state reads its text once. Text that turns out to be no call becomes content, and so does text between the tags of
a call: only marks and the whitespace next to them are dropped.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tandem.frontend.replies import own_template
from tandem.frontend.replies.argument_types import cast_of
from tandem.frontend.replies.call_scanner import (
    MAX_HEAD,
    CallBegin,
    CallScanner,
    ScanEvent,
    Scanner,
)
from tandem.frontend.replies.formats import (
    OWN,
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    CallFormat,
    ReasoningFormat,
)
from tandem.frontend.replies.marks import marks
from tandem.frontend.replies.python_scanner import PythonScanner
from tandem.frontend.replies.tagged_scanner import TaggedScanner
from tandem.frontend.replies.tool_calls import CallParts, Reply, ReplyPart, TextParts
from tandem.wire.errors import ConfigInvalid

F = TypeVar("F", CallFormat, ReasoningFormat)

# Longer text is parsed in pieces, so that cutting off what was parsed stays cheap.
_PIECE = 4096
_NO_END: tuple[tuple[str, ...], str] = ((), "")
_BODY_END = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=functions\.(?P<name>[^\s<]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>(?P<channel>\w+)(?:\s*<\|constrain\|>\w+)?\s*$")


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """The formats of the server's model, selected by its flags."""

    tools: CallFormat | None = None
    reasoning: ReasoningFormat | None = None

    def load(self) -> None:
        """Import what converts arguments to their types. A later import would block the loop."""
        if self != NO_FORMATS:
            import transformers.utils.chat_parsing  # noqa: F401

    def for_model(self, template: object) -> "ReplyFormats":
        """Return the formats for a model whose tokenizer has this response template.

        Raises:
            ConfigInvalid: The template is needed, and is missing or invalid.
        """
        is_own = [each is not None and each.template == {} for each in (self.tools, self.reasoning)]
        if not any(is_own):
            return self
        own = own_template.checked_template(template)
        opening, closing = own_template.reasoning_marks(own) or ("", "")
        openings = (opening,) if opening else ()
        return ReplyFormats(
            tools=CallFormat(template=own) if is_own[0] else None,
            reasoning=ReasoningFormat(openings, closing, template=own) if is_own[1] else None,
        )

    def reasoning_marks(self) -> tuple[str, str] | None:
        """Return the opening and closing mark of the reasoning. None: no format, or a format without such marks."""
        if self.reasoning is None or not self.reasoning.opening:
            return None
        return self.reasoning.opening[0], self.reasoning.closing

    def reply(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        first: int | None = None,
        *,
        is_split: bool = True,
        is_parallel: bool = True,
    ) -> Callable[[], Reply] | None:
        """Return a factory of the parser of one choice. None: all text is content.

        Args:
            prompt: The prompt's text, whose end may open the reasoning.
            tools: The request's tools. If empty, calls are not parsed.
            first: As in `new_call`.
            is_split: Whether to separate the reasoning from the content.
            is_parallel: Whether several calls are allowed. If not, calls after the first are dropped.
        """
        reasoning = self.reasoning if is_split else None
        calls = self.tools if tools else None
        if reasoning is None and calls is None:
            return None
        max_calls = math.inf if is_parallel else 1
        own = (reasoning or ReasoningFormat()).template or (calls or CallFormat()).template
        if own:
            is_split = reasoning is not None
            read = None if calls is None else tools
            return functools.partial(
                own_template.TemplateReply, own, prompt, read, first, max_calls, is_split=is_split
            )
        is_open = reasoning is not None and prompt.rstrip().endswith(reasoning.opening or "\0")
        return functools.partial(
            ParsedReply, calls, reasoning, tools, first, max_calls, is_open=is_open, prompt=prompt
        )


NO_FORMATS = ReplyFormats()


def reply_formats(tools: str, reasoning: str) -> ReplyFormats:
    """Return the formats that the two flags name. Empty: no format."""
    found = ReplyFormats(
        tools=_find("--tool-call-parser", tools, TOOL_FORMATS, TOOL_ALIASES),
        reasoning=_find("--reasoning-parser", reasoning, REASONING_FORMATS, REASONING_ALIASES),
    )
    if len({each.template is None for each in (found.tools, found.reasoning) if each}) > 1:
        raise ConfigInvalid(
            f"--tool-call-parser {tools} and --reasoning-parser {reasoning}: the model's own template "
            f"cannot be combined with a different parser; set both to {OWN}, or neither"
        )
    return found


def formats_by_model(tools: Iterable[str], reasoning: Iterable[str]) -> Mapping[str, ReplyFormats]:
    """Return the formats of each model that the values of the two flags name; under "", those of all other models.

    Args:
        tools, reasoning: Each value is `NAME`, or `MODEL=NAME` for one model.
    """
    by_flag = [
        {model: name for model, _, name in (value.rpartition("=") for value in values)}
        for values in (tools, reasoning)
    ]
    return {
        model: reply_formats(*(names.get(model, names.get("", "")) for names in by_flag))
        for model in {"", *by_flag[0], *by_flag[1]}
    }


def _find(flag: str, name: str, formats: Mapping[str, F], aliases: Mapping[str, str]) -> F | None:
    if not name:
        return None
    plain = name.lower().replace("-", "_")
    found = formats.get(aliases.get(plain, plain))
    if found is None:
        known = ", ".join(sorted({*formats, *aliases}))
        raise ConfigInvalid(
            f"{flag}: unknown parser {name!r}; use one of {known}", topic="docs/parsers.md"
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigInvalid(f"{flag} needs transformers: pip install 'tandem-serve[parsers]'")
    return found


State = Literal["content", "reasoning", "section", "call", "tail", "header", "body"]


class ParsedReply:
    """Parses one choice in the formats of its model. A `Reply`.

    Args:
        tools: The request's tools, whose schemas define the types of arguments in tags.
        first, max_calls: As in `CallParts`.
        is_open: Whether the prompt ends with the mark that opens the reasoning.
        prompt: The prompt's text, whose last message of harmony may be open: the reply continues it.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Sequence[Mapping[str, Any]],
        first: int | None = None,
        max_calls: float = math.inf,
        *,
        is_open: bool = False,
        prompt: str = "",
    ) -> None:
        self._calls, self._tools = calls or CallFormat(), tools
        self._reasoning = reasoning or ReasoningFormat()
        self._has_reasoning = reasoning is not None
        self._is_harmony = self._calls.is_harmony or self._reasoning.is_harmony
        self._state: State = "header" if self._is_harmony else "content"
        self._openings = self._content_marks()
        self._readers: Mapping[State, Callable[[str], str]] = {
            "content": self._in_content,
            "section": self._in_section,
            "call": self._in_call,
            "header": self._in_header,
        }
        # The marks that end other states, and the states after them.
        self._ends: Mapping[State, tuple[tuple[str, ...], State]] = {
            "reasoning": ((self._reasoning.closing,), "content"),
            "body": (_BODY_END, "header"),
            "tail": ((self._calls.closing,), self._after_call()),
        }
        self._pending = ""  # beginning of a mark
        self._header = ""
        self._raw = list[str]()  # marks and whitespace before the call, until it is one
        self._back: State = "content"  # state to return to if the open call is none
        self._scanner: Scanner | None = None
        self._follows_json = True
        self._text = TextParts()
        self._call_parts = CallParts(first, max_calls)
        self._is_shown = True  # whether the current message of harmony is
        self._is_blank = True  # whether nothing but whitespace has been content, and no call began
        self._has_begun = False  # whether the open call is one
        self._parts: list[ReplyPart] = []
        if is_open:
            self._open_reasoning()
        if self._is_harmony and (header := _open_header(prompt)):
            self._in_header(header)
            self._text = TextParts(self._text.kind)  # no mark precedes the reply's whitespace

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """`tool_calls` if the reply has a call."""
        return "tool_calls" if self._call_parts.num_calls else "stop"

    def push(self, text: str) -> list[ReplyPart]:
        """Return the parts that `text` completes."""
        self._parts = []
        if self._has_no_mark(text):  # as in almost every token
            if self._is_shown:
                self._add_text(text)
            return self._parts
        for at in range(0, len(text), _PIECE):
            self._take(text[at : at + _PIECE])
        return self._parts

    def finish(self) -> list[ReplyPart]:
        """Return the remaining parts."""
        self._parts = []
        while self._scanner is not None:
            self._add_events(self._scanner.end())
            self._take(self._end_call(self._scanner))
        if self._state not in ("header", "body") or (self._state == "body" and self._is_shown):
            self._add_text("".join(self._raw) + self._pending)
        # Whitespace at the end of the reply is kept, because no region follows.
        blanks = "".join(self._text.blanks)
        if blanks and self._text.kind == "content" and not self._is_harmony:
            self._parts.append(ReplyPart("content", blanks))
        return self._parts

    def _has_no_mark(self, text: str) -> bool:
        """Whether no mark of the current state is in `text`, begins in it, or continues in it."""
        if self._pending or (self._state == "content" and self._is_blank):
            return False
        watched = (
            self._openings if self._state == "content" else self._ends.get(self._state, _NO_END)[0]
        )
        return bool(watched) and not marks(*watched).may_begin_in(text)

    def _take(self, text: str) -> None:
        text, self._pending = self._pending + text, ""
        while text:
            text = self._step(text)

    def _step(self, text: str) -> str:
        """Read text up to a change of the state. Return the text behind it, or set `_pending`."""
        if read := self._readers.get(self._state):
            return read(text)
        closing, after = self._ends[self._state]
        before, mark, rest = marks(*closing).split(text)
        if self._is_shown:
            self._add_text(before)
        if not mark:
            self._pending = rest
            return ""
        self._text.begin("content")
        self._state = after
        return rest

    # ── content and reasoning ─────────────────────────────────────────────────────────────────────

    def _content_marks(self) -> tuple[str, ...]:
        """Return the marks that end content. Reasoning precedes the answer, so it opens only once."""
        section = self._calls.section[:1] if self._calls.section else ()
        opening = () if self._calls.needs_section else self._calls.opening
        return (*self._reasoning.opening, *section, *opening)

    def _in_content(self, text: str) -> str:
        start = text.lstrip()
        if self._is_blank and start and start[0] in self._calls.leading:
            self._add_text(text[: -len(start)])
            self._open_call("")
            return start
        before, mark, rest = marks(*self._openings).split(text)
        self._add_text(before)
        if not mark:
            self._pending = rest
        elif mark in self._reasoning.opening:
            self._open_reasoning()
        elif mark in self._calls.opening:
            return self._open_call(mark) + rest
        else:
            self._state, self._raw = "section", [mark]
        return rest if mark else ""

    def _open_reasoning(self) -> None:
        self._state = "reasoning"
        self._openings = self._openings[len(self._reasoning.opening) :]
        self._text.begin("reasoning_content")

    def _add_text(self, text: str) -> None:
        parts = self._text.add(text)
        if parts and self._text.kind == "content":
            self._is_blank = False
        self._parts += parts

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    def _in_section(self, text: str) -> str:
        closing = self._calls.section[1] if self._calls.section else ""
        before, mark, rest = marks(*self._calls.opening, closing).split(text)
        is_call = mark in self._calls.opening
        if self._raw and (before.strip() or (mark and not is_call)):
            # The mark does not open a section: what is behind it may still hold other marks.
            start = text.lstrip()
            self._add_text("".join(self._raw) + text[: len(text) - len(start)])
            self._state, self._raw = "content", []
            return start
        if self._raw:
            self._raw.append(before)
        else:
            self._add_text(before)
        if not mark:
            self._pending = rest
            return ""
        if is_call:
            return self._open_call(mark) + rest
        self._text.begin("content")
        self._state = "content"
        return rest

    def _open_call(self, mark: str) -> str:
        """Start the scanner of a call. Return the part of the mark that belongs to the call."""
        bracket = mark[-1:] if mark[-1:] in ("{", "[") else ""
        self._back = "content" if self._raw else self._state
        self._raw.append(mark.removesuffix(bracket))
        self._state, self._scanner, self._has_begun = "call", self._new_scanner(mark), False
        return bracket

    def _new_scanner(self, mark: str) -> Scanner:
        form = self._calls
        if form.is_python:
            return PythonScanner()
        if form.tags is None or form.head is None:
            return CallScanner(form.closing, form.head, needs_arguments=not mark)
        casts = functools.partial(cast_of, self._tools)
        return TaggedScanner(
            form.head, form.tags, form.closing, casts, follows_json=self._follows_json
        )

    def _in_call(self, text: str) -> str:
        assert self._scanner is not None
        self._add_events(self._scanner.push(text))
        return "" if self._scanner.rest is None else self._end_call(self._scanner)

    def _end_call(self, scanner: Scanner) -> str:
        """Leave a call whose scanner has ended. Return the text behind it."""
        self._scanner, self._state = None, self._after_call()
        if isinstance(scanner, TaggedScanner):
            self._follows_json = scanner.follows_json
        if self._has_begun:
            self._add_text(scanner.held)
            if scanner.is_broken and self._calls.closing:
                self._state = "tail"
        else:
            self._add_text("".join(self._raw) + scanner.held)
            self._state = self._back
        self._raw = []
        return scanner.rest or ""

    def _after_call(self) -> State:
        if self._is_harmony:
            return "header"
        return "content" if self._calls.section is None else "section"

    def _add_events(self, events: Sequence[ScanEvent]) -> None:
        for event in events:
            if isinstance(event, CallBegin):
                self._has_begun, self._is_blank = True, False
                self._text.begin("content")
            self._parts += self._call_parts.add(event)

    # ── harmony ───────────────────────────────────────────────────────────────────────────────────

    def _in_header(self, text: str) -> str:
        """Read a header of gpt-oss, and find out what its message is.

        It names a role, a channel, a recipient and a type, so its length is bounded by that of names. Only final
        messages and comments are content; text between messages is dropped. Models write a call's recipient
        into the role, or behind the channel.
        """
        before, mark, rest = marks("<|message|>").split(text)
        header = (self._header + before)[-MAX_HEAD:]
        if not mark:
            self._header, self._pending = header, rest
            return ""
        self._header = ""
        call, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if call is not None and self._calls.is_harmony:
            self._state, self._back, self._has_begun = "call", "header", False
            self._scanner = CallScanner(self._calls.closing, name=call["name"])
            return rest
        name = channel["channel"] if channel is not None else ""
        is_reasoning = name == "analysis"
        self._text.begin("reasoning_content" if is_reasoning else "content")
        self._is_shown = self._has_reasoning if is_reasoning else name in ("final", "commentary")
        self._state = "body"
        return rest


def _open_header(prompt: str) -> str:
    """Return the header of the prompt's last message of harmony if its end is missing, else nothing."""
    header, mark, body = prompt.rpartition("<|start|>")[2].partition("<|message|>")
    is_open = mark and not any(end in body for end in _BODY_END)
    return header + mark if is_open else ""
