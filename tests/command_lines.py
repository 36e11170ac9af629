"""Command lines in pages and help texts, checked by the real parsers.

A line of a code block is parsed completely. A command within a sentence may omit values, so only the names of
its flags are checked.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator

from tandem.cli.completion import parsers
from tandem.node.flags import split_argv

PARSERS = parsers() | {"router": parsers()["lb"]}
FENCE = re.compile(r"^([ \t]*)```[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(tandem [a-z][^`\n]*)`")
# A command ends at a shell operator, a comment, or the prose beside it in a help text.
COMMAND = re.compile(
    r"(?:^|[\s(])(tandem [a-z][\w-]*(?![^\s;)|])(?:(?! {3,}| #| \| | && | & |;|\)| > | ─).)*)"
)
PLACEHOLDER = re.compile(r"[A-Z]")


def shown_in_blocks(markdown: str) -> Iterator[str]:
    for _, block in FENCE.findall(markdown):
        yield from shown_in_text(block)


def shown_in_text(text: str) -> Iterator[str]:
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        yield from (command.strip() for command in COMMAND.findall(line))


def shown_in_sentences(markdown: str) -> Iterator[str]:
    yield from INLINE.findall(FENCE.sub("", markdown))


def refusal(line: str) -> str:
    """Return the parser's error for a complete command line; empty if it is valid."""
    _, name, *words = shlex.split(line)
    argv, _ = split_argv(words)  # vLLM's own flags are vLLM's to refuse
    if name not in PARSERS:
        return f"there is no command {name!r}"
    # Replace placeholders by a number, and drop --help, which ends the parser.
    argv = ["1" if PLACEHOLDER.fullmatch(word) else word for word in argv if word != "--help"]
    if "--config" in argv:  # the reader's file does not exist here
        argv[argv.index("--config") + 1] = os.devnull
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            _, extra = PARSERS[name].parse_known_args(argv)
            if extra:
                return f"unknown: {' '.join(extra)}"
        except SystemExit:
            return said.getvalue().strip().splitlines()[-1]
    return ""


def unknown_flags(line: str) -> list[str]:
    """Return the flags of a command line that its parser does not know."""
    _, name, *argv = line.replace("'", "").split()
    if name not in PARSERS:
        return [f"there is no command {name!r}"]
    known = flags_of(PARSERS[name])
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    return [flag for flag in given if flag not in known | {"--help"}]


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}
