"""The pages and sections of the documentation, and the lookup of topics.

A topic is a page (`membership`), a section of a page (`membership#dns`), or a unique section name alone
(`out_of_pages`). Section names are the site's anchors. This module reads files and prints nothing.
"""

import difflib
import re
from pathlib import Path

# A heading, or a fenced block, which is matched so that its `#` comments are no headings.
_HEADING = re.compile(
    r"^\s*(```|~~~).*?^\s*\1|^(?P<level>#{1,6})\s+(?P<title>[^\n]+)", re.MULTILINE | re.DOTALL
)
# Marks of tabs, which only the site has.
_TABS = re.compile(r"^///.*\n\n?", re.MULTILINE)
_LINK = re.compile(r"\]\(([\w/-]+)\.md(?:#[\w-]*)?\)")
FRONT = "index"
NUM_SUGGESTIONS = 8


class Page:
    """One page.

    Attributes:
        title: The first heading; the page's name without headings.
        sections: Each heading with its text and subheadings, by anchor, in page order.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text, self.title = name, text, name
        self.sections: dict[str, str] = {}
        heads = [
            (found.start("level"), len(found["level"]), found["title"])
            for found in _HEADING.finditer(text)
            if found["level"]
        ]
        for i, (start, level, heading) in enumerate(heads):
            end = next((at for at, other, _ in heads[i + 1 :] if other <= level), len(text))
            title = heading.strip().replace("`", "")
            self.title = self.title if self.sections else title
            anchor = anchor_of(title)
            number = sum(
                re.fullmatch(rf"{anchor}(_\d+)?", each) is not None for each in self.sections
            )
            self.sections[f"{anchor}_{number}" if number else anchor] = text[start:end]


class Manual:
    """All pages: the front page, the pages that it links, in that order, then the others."""

    def __init__(self, folder: Path) -> None:
        paths = {path.stem: path for path in sorted(folder.rglob("*.md"))}
        texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        pages = {name: Page(name, _TABS.sub("", text)) for name, text in texts.items()}
        front = _LINK.findall(pages[FRONT].text) if FRONT in pages else []
        order = [FRONT, *(link.rpartition("/")[2] for link in front), *pages]
        self.pages = {name: pages[name] for name in dict.fromkeys(order) if name in pages}

    def find(self, topic: str) -> str | None:
        """Return the text of a page or section; None if the topic matches none or several."""
        name, _, anchor = topic.strip().lower().removesuffix(".md").partition("#")
        if (page := self.pages.get(name.rpartition("/")[2])) is not None:
            return page.sections.get(anchor) if anchor else page.text
        found = [text for _, each, text in self._sections() if each == anchor_of(name)]
        return found[0] if len(found) == 1 and not anchor else None

    def suggest(self, topic: str) -> list[str]:
        """Return the topics most similar to this one, best match first."""
        wanted = anchor_of(topic.strip().lower().rpartition("#")[2])
        topics = [(name, name) for name in self.pages]
        topics += [(f"{page}#{anchor}", anchor) for page, anchor, _ in self._sections()]
        near = difflib.get_close_matches(wanted, {last for _, last in topics}, NUM_SUGGESTIONS)
        return [each for last in near for each, its in topics if its == last][:NUM_SUGGESTIONS]

    def _sections(self) -> list[tuple[str, str, str]]:
        """Return the page, anchor and text of each section, except the first section of each page."""
        return [
            (page.name, anchor, text)
            for page in self.pages.values()
            for anchor, text in list(page.sections.items())[1:]
        ]


def shipped() -> Manual:
    """Return the bundled manual: the folder `text` of a wheel, or docs/ of a checkout."""
    here = Path(__file__)
    packed = here.with_name("text")
    return Manual(packed if packed.is_dir() else here.parents[3] / "docs")


def anchor_of(title: str) -> str:
    """Return a heading's anchor in URLs, as Python-Markdown creates it."""
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower()
    return re.sub(r"[\s-]+", "-", words)
