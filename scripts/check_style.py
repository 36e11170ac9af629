#!/usr/bin/env python
"""Check the English of the documentation and of the help texts.

It finds sentences that are too long (`MAX_WORDS`), and words that the style of this project replaces.
Generated pages, code blocks and inline code are not checked.

    scripts/check_style.py              every page and every help text
    scripts/check_style.py FILE...      these pages only
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tandem.cli.completion import parsers

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"models.md", "fault-matrix.md"}
MAX_WORDS = 30
PROCESS = r"(?:node|router|prefill|decode|worker|engine|peer|server|transport|tier)s?"
RULES = {
    re.compile(rf"\b{PROCESS} (?:\w+ly )?(?:say|says|said|tell|tells|told)\b"): "write 'report'",
    re.compile(rf"\b{PROCESS},? (?:who|whom|whose)\b"): "'who' is a person",
    re.compile(r"^Of (?!course)"): "begin with the subject, not with 'Of'",
    re.compile(r"\bwho(?:m)?ever\b", re.IGNORECASE): "name the actor",
    re.compile(r"\b(?:wait|waits|waiting|are|is|stand|stands) in line\b"): "write 'queued'",
    re.compile(r"\bas ever\b|\bfor want of\b|\bfor the sake of\b"): "write it plainly",
    re.compile(r"\b(?:are|is|was) told\b"): "name who reports what",
}
FENCE = re.compile(r"^([ \t]*)(```|~~~).*?^\1\2\s*?$", re.MULTILINE | re.DOTALL)
MARKUP = [
    (re.compile(r"<[^>]+>|<!--.*?-->", re.DOTALL), " "),
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"`[^`]*`"), "CODE"),
    (re.compile(r"[*_]{1,2}(\S(?:.*?\S)?)[*_]{1,2}"), r"\1"),
]
LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
# A sentence ends before a capital, a digit or code, but not after an abbreviation.
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?:;]['\")]*\s+(?=[A-Z0-9*(\"'])")
WORD = re.compile(r"\w[\w'.,/-]*")


def main(paths: list[str]) -> int:
    """Print each problem; return 1 if there is any."""
    ours = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    pages = [Path(path) for path in paths] or ours
    found = [
        f"{page.name}:{line}: {problem}"
        for page in pages
        if page.name not in GENERATED
        for line, problem in problems_of_page(page.read_text(encoding="utf-8"))
    ]
    if not paths:
        found += [
            f"{source}: {problem}" for source, text in help_texts() for problem in problems(text)
        ]
    print("\n".join(found) or "no problems in the English of docs and help")
    return int(bool(found))


def problems_of_page(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each problem of a page."""
    for line, block in blocks(FENCE.sub(lambda match: "\n" * match[0].count("\n"), markdown)):
        for problem in problems(block):
            yield line, problem


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each paragraph, list item, heading and cell."""
    begin, gathered = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_own = line.startswith(("#", "|")) or not line.strip()
        if (is_own or LIST_ITEM.match(line)) and gathered:
            yield begin, gathered
            gathered = ""
        if line.startswith("|"):
            yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", line))
        elif line.startswith("#"):
            yield number, line.lstrip("# ")
        else:
            begin = begin if gathered else number
            gathered = f"{gathered} {LIST_ITEM.sub('', line).strip()}".strip()


def problems(text: str) -> Iterator[str]:
    """Yield the problems of a text without code blocks."""
    for pattern, plain in MARKUP:
        text = pattern.sub(plain, text)
    for sentence in END.split(" ".join(text.split())):
        num_words = len(WORD.findall(sentence))
        if num_words > MAX_WORDS:
            yield f"{num_words} words: {sentence[:70]}..."
        for pattern, advice in RULES.items():
            if match := pattern.search(sentence):
                yield f"{advice}: ...{sentence[max(0, match.start() - 30) : match.end() + 30]}..."


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each command's description and each flag's help."""
    for name, parser in parsers().items():
        yield f"tandem {name}", parser.description or ""
        for action in parser._actions:
            flag = action.option_strings[-1] if action.option_strings else action.dest
            yield f"tandem {name} {flag}", action.help or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
