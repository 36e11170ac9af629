"""How models write their tool calls and their thoughts, as data, by well-known names.

A format is the fields of a response template for transformers' `ResponseParser`: what opens a region and
what closes it. `frontend/reply_parser.py` reads the calls in it.

A name has at most 256 characters, which bounds the text held back for it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.frontend.tagged_scanner import Tags

Fields = Mapping[str, Mapping[str, Any]]

# DeepSeek's marks have wide bars, and blocks for blanks.
_MARKS = ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
_FIRST, _LAST, _BEGIN, _SEP, _END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in _MARKS)


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        fields: Fields of a response template. `content`, if not among them, is all other text.
        opening: The text that opens the model's thoughts. A prompt may end with it.
        head: What stands before a call's arguments, with its name, where a call is a name and its arguments alone.
        tags: The tags around each argument, where arguments are no JSON.
        lost: The part of a call's opening that belongs to the call.
        call: The mark that begins a call, and what stands before the name, before and after the arguments; where a
            grammar can hold calls to their schemas.
        has_numbered_calls: Whether the model's template expects ids of calls like
            `functions.NAME:NUMBER`, numbered over the conversation.
    """

    fields: Fields = field(default_factory=dict)
    opening: str = ""
    head: re.Pattern[str] | None = None
    tags: Tags | None = None
    lost: str = ""
    call: tuple[str, str, str, str] | None = None
    has_numbered_calls: bool = False


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What a model may write before an answer that a grammar binds.

    Attributes:
        opening, closing: The marks around it.
        is_open: Whether the prompt ends with the opening. Otherwise the model may leave thoughts out.
    """

    opening: str
    closing: str
    is_open: bool


def _tools(**region: Any) -> Format:
    return Format({"tool_calls": {"repeats": True, "content": "text", **region}})


def _listed(last: str, head: str, **region: Any) -> Format:
    """Return a format with marks around the list of calls. The first mark may open a call as well.

    The last mark is a region of its own that closes at once: it cannot be part of the pattern that
    closes a call, which matches as soon as it can.
    """
    fields = {"marks": {"open": last, "close_pattern": "", "repeats": True}}
    return Format({**_tools(**region).fields, **fields}, head=re.compile(head))


def _tagged(head: str, tags: Tags, **region: Any) -> Format:
    return replace(_tools(**region), head=re.compile(head), tags=tags)


def _thoughts(opening: str, closing: str) -> Format:
    region = {"open": opening, "close": closing}
    return Format({"reasoning_content": region}, opening)


# Messages on channels: only the final one is content, and text between them is dropped.
_HARMONY_CONTENT = {
    "open_pattern": r"<\|channel\|>(?:final|commentary)(?: <\|constrain\|>\w+)?<\|message\|>",
    "close_pattern": r"<\|(?:end|return)\|>",
    "repeats": True,
}
# Models write a call's recipient in the header of its role, or behind its channel.
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"

TOOL_FORMATS: Mapping[str, Format] = {
    "hermes": replace(
        _tools(open="<tool_call>", close="</tool_call>"),
        call=("<tool_call>", '\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
    ),
    # The name belongs to the region, for it streams from there: openings only look ahead to it.
    "qwen3_coder": _tagged(
        r"(?P<name>[^<>]{1,256})>",
        Tags(
            re.compile(r"<parameter=(?=[^>])"),
            re.compile(r"(?P<key>[^>]+)>"),
            "</parameter>",
            is_trimmed=True,
        ),
        open_pattern=r"<tool_call>\s*<function=(?=[^<>]{1,256}>)",
        close_pattern=r"</function>\s*</tool_call>",
    ),
    "glm45": _tagged(
        r"(?P<name>[^\s<]{1,256})(?=[\s<])",
        Tags(
            re.compile("<arg_key>"),
            re.compile(r"(?P<key>.*?)</arg_key>\s*<arg_value>", re.DOTALL),
            "</arg_value>",
        ),
        open_pattern=r"<tool_call>\s*(?=[^\s<])",
        close="</tool_call>",
    ),
    # Before and since version 11 of its tokenizer: a list, or a name and [ARGS] for each call.
    "mistral": _tools(open="[TOOL_CALLS]"),
    # An answer that begins with an object is a call, or several.
    "llama3": Format(
        {
            "tool_calls": {
                "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?\{",
                "content": "text",
            }
        },
        lost="{",
    ),
    "deepseek_v3": _listed(
        _LAST,
        r"(?P<name>[^\n]{1,256})\n```json\n",
        open_pattern=rf"(?:{_FIRST}\s*)?{_BEGIN}function{_SEP}",
        close=f"\n```{_END}",
    ),
    "deepseek_v31": _listed(
        _LAST,
        rf"(?P<name>[^<]{{1,256}}){_SEP}",
        open_pattern=rf"(?:{_FIRST}\s*)?{_BEGIN}",
        close=_END,
    ),
    "kimi_k2": replace(
        _listed(
            "<|tool_calls_section_end|>",
            r"\s*(?:functions\.)?(?P<name>[^:<\s]{1,256})(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            open_pattern=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
            close="<|tool_call_end|>",
        ),
        has_numbered_calls=True,
    ),
    "gpt_oss": Format(
        {
            "content": _HARMONY_CONTENT,
            "tool_calls": {
                "repeats": True,
                "content": "text",
                "open_pattern": rf"(?:{_CHANNEL} )?to=functions\.",
                "close": "<|call|>",
            },
        },
        head=re.compile(
            rf"(?P<name>[^\s<]{{1,256}})(?:{_CHANNEL})?[^<]*(?:<\|constrain\|>\w+)?<\|message\|>"
        ),
    ),
}

REASONING_FORMATS: Mapping[str, Format] = {
    "think": _thoughts("<think>", "</think>"),
    "kimi": _thoughts("◁think▷", "◁/think▷"),
    "mistral": _thoughts("[THINK]", "[/THINK]"),
    "gpt_oss": Format(
        {
            "content": _HARMONY_CONTENT,
            "reasoning_content": {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "repeats": True,
            },
        }
    ),
}

# Names of other servers, with dashes or underscores.
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm": "glm45",
    "glm47": "glm45",
    "llama3_json": "llama3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "openai": "gpt_oss",
}
REASONING_ALIASES = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "qwen3": "think",
    "qwen3_thinking": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "minimax": "think",
    "openai_gptoss": "gpt_oss",
}
