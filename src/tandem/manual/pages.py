"""The pages of the documentation, their sections, and which of them a topic names.

A topic is a page (`membership`), a section of one (`membership#dns`), or the name of a section alone
(`out_of_pages`). Sections are named as the site names them. Reads files, prints nothing.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Looked for in headings; inside a fence `#` begins a comment.
_HEADING = re.compile(r"(#{1,6})\s+(.+)")
_FENCE = re.compile(r"\s*(```|~~~)")
_LINK = re.compile(r"\]\(([\w/-]+)\.md(?:#[\w-]*)?\)")
FRONT = "index"
NUM_SUGGESTIONS = 8


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the text under it, smaller headings included.

    Attributes:
        anchor: Its name in addresses, unique within its page.
        level: 1 for the title of a page.
    """

    anchor: str
    title: str
    level: int
    text: str


class Page:
    """One page.

    Attributes:
        name: Of its file, without the folder.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    @cached_property
    def sections(self) -> Mapping[str, Section]:
        """All sections by anchor, in the order of the page."""
        lines = self.text.splitlines(keepends=True)
        heads = list(_headings(lines))
        found: dict[str, Section] = {}
        for i, (line, level, title) in enumerate(heads):
            end = next((at for at, other, _ in heads[i + 1 :] if other <= level), len(lines))
            anchor = name = anchor_of(title)
            number = 0
            while anchor in found:
                number += 1
                anchor = f"{name}_{number}"
            found[anchor] = Section(anchor, title, level, "".join(lines[line:end]))
        return found

    @property
    def title(self) -> str:
        """The first heading."""
        return next((section.title for section in self.sections.values()), self.name)


class Manual:
    """All pages: first those that the front page links, in its order."""

    def __init__(self, folder: Path) -> None:
        paths = {path.stem: path for path in sorted(folder.rglob("*.md"))}
        pages = {name: Page(name, path.read_text(encoding="utf-8")) for name, path in paths.items()}
        front = _LINK.findall(pages[FRONT].text) if FRONT in pages else []
        order = [FRONT, *(link.rpartition("/")[2] for link in front), *pages]
        self.pages = {name: pages[name] for name in dict.fromkeys(order) if name in pages}

    def find(self, topic: str) -> str | None:
        """Return the text of a page or a section; None when the topic names none, or several."""
        name, _, anchor = topic.strip().lower().removesuffix(".md").partition("#")
        page = self.pages.get(name.rpartition("/")[2])
        if page is not None and not anchor:
            return page.text
        if page is not None:
            section = page.sections.get(anchor)
            return section.text if section else None
        wanted = "" if anchor else anchor_of(name)
        texts = [s.text for _, s in self._sections() if s.anchor == wanted]
        return texts[0] if len(texts) == 1 else None

    def suggest(self, topic: str) -> list[str]:
        """Return the topics most like this one, the likeliest first."""
        name, _, anchor = topic.strip().lower().partition("#")
        wanted = anchor_of(anchor or name)
        topics = [*self.pages, *(f"{page}#{section.anchor}" for page, section in self._sections())]
        last = {each: each.rpartition("#")[2] for each in topics}
        same = [each for each in topics if last[each] == wanted]
        within = [each for each in topics if wanted and wanted in last[each]]
        close = difflib.get_close_matches(wanted, last.values(), n=NUM_SUGGESTIONS)
        alike = [each for word in close for each in topics if last[each] == word]
        return list(dict.fromkeys([*same, *within, *alike]))[:NUM_SUGGESTIONS]

    def _sections(self) -> Iterator[tuple[str, Section]]:
        """Yield the name of its page and each section that is not a whole page."""
        for page in self.pages.values():
            for section in page.sections.values():
                if section.level > 1:
                    yield page.name, section


def shipped() -> Manual:
    """Return the manual that came with this program: packed beside it, or docs/ of a checkout."""
    here = Path(__file__)
    packed = here.with_name("text")
    return Manual(packed if packed.is_dir() else here.parents[3] / "docs")


def anchor_of(title: str) -> str:
    """Return the name of a heading in addresses, as Python-Markdown makes it."""
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower()
    return re.sub(r"[\s-]+", "-", words)


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield number of line, level and title of each heading."""
    is_fenced = False
    for number, line in enumerate(lines):
        if _FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced and (match := _HEADING.fullmatch(line.rstrip())):
            yield number, len(match[1]), match[2].replace("`", "")
