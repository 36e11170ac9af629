"""The pages of the documentation, their sections, and which of them a topic names.

A topic is a page (`membership`), a section of one (`membership#dns`), or the name of a section alone
(`out_of_pages`). Sections are named as the site names them. Reads files, prints nothing.
"""

import difflib
import re
from pathlib import Path

# Looked for in headings; inside a fence `#` begins a comment.
_HEADING = re.compile(r"(#{1,6})\s+(.+)")
_FENCE = re.compile(r"\s*(```|~~~)")
_LINK = re.compile(r"\]\(([\w/-]+)\.md(?:#[\w-]*)?\)")
FRONT = "index"
NUM_SUGGESTIONS = 8


class Page:
    """One page.

    Attributes:
        title: The first heading.
        sections: Text of each heading and of the smaller ones under it, by anchor, in the order of the page.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text, self.title = name, text, name
        lines = text.splitlines(keepends=True)
        heads = _headings(lines)
        self.title = heads[0][2] if heads else name
        self.sections: dict[str, str] = {}
        for i, (line, level, title) in enumerate(heads):
            end = next((at for at, other, _ in heads[i + 1 :] if other <= level), len(lines))
            anchor, number = anchor_of(title), 0
            while (numbered := f"{anchor}_{number}" if number else anchor) in self.sections:
                number += 1
            self.sections[numbered] = "".join(lines[line:end])


class Manual:
    """All pages: first those that the front page links, in its order."""

    def __init__(self, folder: Path) -> None:
        paths = {path.stem: path for path in sorted(folder.rglob("*.md"))}
        pages = {name: Page(name, path.read_text(encoding="utf-8")) for name, path in paths.items()}
        front = _LINK.findall(pages[FRONT].text) if FRONT in pages else []
        order = [FRONT, *(link.rpartition("/")[2] for link in front), *pages]
        self.pages = {name: pages[name] for name in dict.fromkeys(order) if name in pages}
        # Without the titles of pages, which come first.
        self._sections = [
            (page.name, anchor, text)
            for page in self.pages.values()
            for anchor, text in list(page.sections.items())[1:]
        ]

    def find(self, topic: str) -> str | None:
        """Return the text of a page or a section; None when the topic names none, or several."""
        name, _, anchor = topic.strip().lower().removesuffix(".md").partition("#")
        page = self.pages.get(name.rpartition("/")[2])
        if page is not None:
            return page.sections.get(anchor) if anchor else page.text
        found = [text for _, each, text in self._sections if each == anchor_of(name)]
        return found[0] if len(found) == 1 and not anchor else None

    def suggest(self, topic: str) -> list[str]:
        """Return the topics most like this one, the likeliest first."""
        wanted = anchor_of(topic.strip().lower().rpartition("#")[2])
        topics = [(name, name) for name in self.pages]
        topics += [(f"{page}#{anchor}", anchor) for page, anchor, _ in self._sections]
        near = difflib.get_close_matches(wanted, {last for _, last in topics}, NUM_SUGGESTIONS)
        return [each for last in near for each, its in topics if its == last][:NUM_SUGGESTIONS]


def shipped() -> Manual:
    """Return the manual that came with this program: packed beside it, or docs/ of a checkout."""
    here = Path(__file__)
    packed = here.with_name("text")
    return Manual(packed if packed.is_dir() else here.parents[3] / "docs")


def anchor_of(title: str) -> str:
    """Return the name of a heading in addresses, as Python-Markdown makes it."""
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower()
    return re.sub(r"[\s-]+", "-", words)


def _headings(lines: list[str]) -> list[tuple[int, int, str]]:
    """Return number of line, level and title of each heading."""
    is_fenced, found = False, []
    for number, line in enumerate(lines):
        if _FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced and (match := _HEADING.fullmatch(line.rstrip())):
            found.append((number, len(match[1]), match[2].replace("`", "")))
    return found
