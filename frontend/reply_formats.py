"""How models write their calls of tools and their thoughts: as data, by the names people know them under.

Each format is fields of a response template, which transformers' `ResponseParser` follows: what opens a
region, what closes it. Where a name stands in what opens it, or arguments stand in tags, transformers reads
them too, and casts them as the tool's schema says; JSON is read by `frontend/reply_parser.py`.

A name has up to 256 characters, so that what is held back for it has an end.

Formats that write tags in the JSON of other formats, or Python, are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Fields = Mapping[str, Mapping[str, Any]]

# DeepSeek's marks have wide bars, and blocks for blanks.
_MARKS = ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
_FIRST, _LAST, _BEGIN, _SEP, _END = (f"<\uff5ctool\u2581{name}\uff5c>" for name in _MARKS)

_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        fields: Of a response template, beside or instead of `content`, which is all other text.
        opening: The text that puts a model into its thoughts, and that a prompt may end with.
        lost: The part of what opens a call that belongs to it.
        has_numbered_calls: Whether the model's template takes ids of calls for `functions.NAME:NUMBER`,
            with calls numbered over the conversation; else an id may be anything.
    """

    fields: Fields = field(default_factory=dict)
    opening: str = ""
    lost: str = ""
    has_numbered_calls: bool = False


def _tools(**region: Any) -> Format:
    return Format({"tool_calls": {"repeats": True, "content": "text", **region}})


def _listed(last: str, **region: Any) -> Format:
    """Return a format whose calls have marks around all of them: the first may open a call as well.

    The last is a region of its own that closes at once. A mark that may follow a closing one cannot be told
    of in the same pattern: what closes is taken as soon as it is whole.
    """
    tools = _tools(**region, transform=_NAMED)
    return Format({**tools.fields, "marks": {"open": last, "close_pattern": "", "repeats": True}})


def _tagged(pattern: str, **region: Any) -> Format:
    arguments = {"content": "xml-inline", "content_args": {"tag_pattern": pattern}}
    return _tools(**region, **arguments, transform=_NAMED)


def _thoughts(opening: str, closing: str) -> Format:
    region = {"open": opening, "close": closing}
    return Format({"reasoning_content": region}, opening)


# Messages on channels: only the final one is content, and what stands between them is nothing.
_HARMONY_CONTENT = {
    "open_pattern": r"<\|channel\|>(?:final|commentary)(?: <\|constrain\|>\w+)?<\|message\|>",
    "close_pattern": r"<\|(?:end|return)\|>",
    "repeats": True,
}
# A call's recipient stands in the header of its role or behind its channel: models write either.
_RECIPIENT = r"to=functions\.(?P<name>[^\s<]{1,256})"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"

TOOL_FORMATS: Mapping[str, Format] = {
    "hermes": _tools(open="<tool_call>", close="</tool_call>"),
    "qwen3_coder": _tagged(
        r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^>]{1,256})>",
        close_pattern=r"</function>\s*</tool_call>",
    ),
    "glm45": _tagged(
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        open_pattern=r"<tool_call>\s*(?P<name>[^\s<]{1,256})",
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
        open_pattern=rf"(?:{_FIRST}\s*)?{_BEGIN}function{_SEP}(?P<name>[^\n]{{1,256}})\n```json\n",
        close=f"\n```{_END}",
    ),
    "deepseek_v31": _listed(
        _LAST,
        open_pattern=rf"(?:{_FIRST}\s*)?{_BEGIN}(?P<name>[^<]{{1,256}}){_SEP}",
        close=_END,
    ),
    "kimi_k2": replace(
        _listed(
            "<|tool_calls_section_end|>",
            open_pattern=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?:functions\.)?(?P<name>[^:<\s]{1,256})(?::\d+)?\s*<\|tool_call_argument_begin\|>",
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
                "open_pattern": rf"(?:{_RECIPIENT}{_CHANNEL}|{_CHANNEL} {_RECIPIENT})"
                r"[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
                "close": "<|call|>",
                "transform": _NAMED,
            },
        }
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

# As other servers call them, dashes or underscores alike.
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
