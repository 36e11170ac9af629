"""The formats in which models write tool calls and reasoning, as data, by their common names.

```
 text  opening  head  arguments  closing  text          a call
 text  section[0]  call  call ...  section[1]  text     calls with marks around their list
```

`frontend/replies/parser.py` follows the marks. A scanner parses what is behind the opening, and finds its end.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.frontend.replies.tagged_scanner import Tags

# DeepSeek's marks use fullwidth bars, and block characters instead of spaces.
_MARKS = ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
_FIRST, _LAST, _BEGIN, _SEP, _END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in _MARKS)
_DSML = "\uff5cDSML\uff5c"
# Names are limited to 256 characters, which bounds the text that is held back while a name is incomplete.
_NAME = '(?P<name>[^"<>\\n]{1,256})'


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of tool calls.

    Attributes:
        opening: Marks, one of which opens a call. A bracket at its end is part of the call.
        closing: The mark behind a call. Empty: the call ends with its list.
        section: The marks around the list of calls. None: calls have none.
        needs_section: Whether only marks inside a section open a call.
        leading: Brackets that open calls if the content starts with one.
        head: Pattern of the text before a call's arguments, with the group `name`. None: calls are JSON objects.
        tags: The tags around each argument. None: arguments are JSON.
        is_python: Whether calls are a list in Python's syntax.
        is_harmony: Whether calls are messages of harmony, which have headers instead of marks.
        call: Four fixed texts of a call: the opening mark, then the texts before the name, before the arguments and
            after them. None: strict schemas of unforced calls are not supported.
        has_numbered_calls: Whether the model's template expects call ids of the form
            `functions.NAME:NUMBER`, numbered across the conversation.
        template: The model's response template, which replaces all other fields. Empty: not known yet.
    """

    opening: tuple[str, ...] = ()
    closing: str = ""
    section: tuple[str, str] | None = None
    needs_section: bool = False
    leading: str = ""
    head: re.Pattern[str] | None = None
    tags: Tags | None = None
    is_python: bool = False
    is_harmony: bool = False
    call: tuple[str, str, str, str] | None = None
    has_numbered_calls: bool = False
    template: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A format of reasoning.

    Attributes:
        opening: Marks, one of which opens the reasoning. A prompt may end with one.
        closing: The mark behind the reasoning.
        is_harmony: Whether reasoning is in messages of harmony, which have headers instead of marks.
        template: As in `CallFormat`. It replaces all but the marks.
    """

    opening: tuple[str, ...] = ()
    closing: str = ""
    is_harmony: bool = False
    template: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around the reasoning that may precede an answer with a grammar.

    Attributes:
        opening, closing: The two marks.
        is_open: Whether the prompt ends with the opening mark. Otherwise reasoning is optional.
    """

    opening: str
    closing: str
    is_open: bool


def _functions(section: tuple[str, str], *, needs_section: bool) -> CallFormat:
    """Return a format with `<function=NAME>` and `<parameter=KEY>`."""
    return CallFormat(
        opening=("<function=",),
        closing="</function>",
        section=section,
        needs_section=needs_section,
        head=re.compile(f"{_NAME}>"),
        tags=Tags(
            "<parameter=", re.compile(r"(?P<key>[^>]{1,256})>"), "</parameter>", is_trimmed=True
        ),
    )


def _invokes(section: str, dsml: str = "", string: str = "") -> CallFormat:
    """Return a format with `<invoke name="NAME">` and `<parameter name="KEY">`."""
    return CallFormat(
        opening=(f'<{dsml}invoke name="',),
        closing=f"</{dsml}invoke>",
        section=(f"<{dsml}{section}>", f"</{dsml}{section}>"),
        needs_section=True,
        head=re.compile(f'{_NAME}"\\s*>'),
        tags=Tags(
            f'<{dsml}parameter name="',
            re.compile(rf'(?P<key>[^"]{{1,256}})"{string}\s*>'),
            f"</{dsml}parameter>",
        ),
    )


_IS_STRING = r'(?:\s+string="(?P<string>true|false)")?'

# The parser of the model's own response template.
OWN = "hf"
TOOL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        opening=("<tool_call>",),
        closing="</tool_call>",
        call=("<tool_call>", '\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
    ),
    # Models leave out `<tool_call>` at times.
    "qwen3_coder": _functions(("<tool_call>", "</tool_call>"), needs_section=False),
    "seed_oss": _functions(("<seed:tool_call>", "</seed:tool_call>"), needs_section=True),
    "glm45": CallFormat(
        opening=("<tool_call>",),
        closing="</tool_call>",
        head=re.compile(r"\s*(?P<name>[^\s<]{1,256})(?=[\s<])"),
        tags=Tags(
            "<arg_key>",
            re.compile(r"(?P<key>[^<]{1,256})</arg_key>\s*<arg_value>"),
            "</arg_value>",
        ),
    ),
    "minimax_m2": _invokes("minimax:tool_call"),
    # A JSON list up to version 10 of Mistral's tokenizer; since version 11 a mark for each call, and its name.
    "mistral": CallFormat(
        opening=("[TOOL_CALLS]",),
        head=re.compile(
            r"\s*(?P<name>[^\[{\s]{1,256})\s*(?:\[CALL_ID\][^\[]{1,64})?(?:\[ARGS\]|(?=\{))"
        ),
    ),
    "llama3": CallFormat(opening=("<|python_tag|>",), leading="{["),
    "pythonic": CallFormat(leading="[", is_python=True),
    "llama4_pythonic": CallFormat(
        opening=("[",),
        section=("<|python_start|>", "<|python_end|>"),
        needs_section=True,
        leading="[",
        is_python=True,
    ),
    "deepseek_v3": CallFormat(
        opening=(_BEGIN,),
        closing=_END,
        section=(_FIRST, _LAST),
        head=re.compile(rf"function{_SEP}(?P<name>[^\n]{{1,256}})\n```json\n"),
    ),
    "deepseek_v31": CallFormat(
        opening=(_BEGIN,),
        closing=_END,
        section=(_FIRST, _LAST),
        head=re.compile(rf"(?P<name>[^<]{{1,256}}){_SEP}"),
    ),
    "deepseek_v32": _invokes("function_calls", _DSML, _IS_STRING),
    "deepseek_v4": _invokes("tool_calls", _DSML, _IS_STRING),
    "kimi_k2": CallFormat(
        opening=("<|tool_call_begin|>",),
        closing="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        head=re.compile(
            r"\s*(?:functions\.)?(?P<name>[^:<\s]{1,256})(?::\d{1,9})?\s*<\|tool_call_argument_begin\|>"
        ),
        has_numbered_calls=True,
    ),
    # One template asks for `functools`, the other one for marks, which are special tokens.
    "phi4_mini": CallFormat(
        opening=("functools[", "<|tool_call|>"), section=("<|tool_call|>", "<|/tool_call|>")
    ),
    "granite": CallFormat(opening=("<|tool_call|>", "<tool_call>"), leading="["),
    "gpt_oss": CallFormat(closing="<|call|>", is_harmony=True),
    OWN: CallFormat(template={}),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(("<think>",), "</think>"),
    "kimi": ReasoningFormat(("◁think▷",), "◁/think▷"),
    "mistral": ReasoningFormat(("[THINK]",), "[/THINK]"),
    "seed_oss": ReasoningFormat(("<seed:think>",), "</seed:think>"),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), "Here is my response:"
    ),
    "gpt_oss": ReasoningFormat(is_harmony=True),
    OWN: ReasoningFormat(template={}),
}

# Names that SGLang and vLLM use. Dashes count as underscores.
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm": "glm45",
    "glm47": "glm45",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "phi4_mini_json": "phi4_mini",
    "openai": "gpt_oss",
    "response_template": OWN,
}
REASONING_ALIASES = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "ernie45": "think",
    "glm45": "think",
    "glm47": "think",
    "holo2": "think",
    "interns1": "think",
    "kimi_k2": "think",
    "mimo": "think",
    "minimax": "think",
    "minimax_m2": "think",
    "nemotron_3": "think",
    "nemotron_v3": "think",
    "olmo3": "think",
    "qwen3": "think",
    "qwen3_thinking": "think",
    "step3": "think",
    "step3p5": "think",
    "openai_gptoss": "gpt_oss",
    "response_template": OWN,
}
