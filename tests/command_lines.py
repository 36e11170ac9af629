"""Command lines as pages and help texts show them, and what the real parsers say of each.

A line of a code block is parsed whole; one within a sentence may leave values out, so that only the names of
its flags are looked up.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator

from tandem.parsers import parsers

PARSERS = parsers() | {"router": parsers()["lb"]}
FENCE = re.compile(r"^([ \t]*)```[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(tandem [a-z][^`\n]*)`")
# Up to what ends a command in a shell, a comment, or the prose that a help text sets beside it.
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
    """Return what the parser says against a whole command line; empty if it takes it."""
    _, name, *argv = shlex.split(line)
    if name not in PARSERS:
        return f"there is no command {name!r}"
    # A number in place of N; a parser that is asked for help ends.
    argv = ["1" if PLACEHOLDER.fullmatch(word) else word for word in argv if word != "--help"]
    if "--config" in argv:  # the file is the reader's
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
