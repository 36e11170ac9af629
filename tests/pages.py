"""The pages of docs/, split into sections by the anchors of the site."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A heading, or a fenced block, which is matched so that its `#` comments are no headings.
_HEADING = re.compile(
    r"^\s*(```|~~~).*?^\s*\1|^(?P<level>#{1,6})\s+(?P<title>[^\n]+)", re.MULTILINE | re.DOTALL
)


def sections_of(path: Path) -> dict[str, str]:
    """Return each heading's text with its subheadings, by anchor, in page order."""
    text, sections = path.read_text(), {}
    heads = [
        (found.start("level"), len(found["level"]), found["title"])
        for found in _HEADING.finditer(text)
        if found["level"]
    ]
    for i, (start, level, title) in enumerate(heads):
        end = next((at for at, other, _ in heads[i + 1 :] if other <= level), len(text))
        anchor = anchor_of(title.strip())
        number = sum(re.fullmatch(rf"{anchor}(_\d+)?", each) is not None for each in sections)
        sections[f"{anchor}_{number}" if number else anchor] = text[start:end]
    return sections


def anchor_of(title: str) -> str:
    """Return a heading's anchor in URLs, as Python-Markdown creates it."""
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower()
    return re.sub(r"[\s-]+", "-", words)


def find(page: str) -> str | None:
    """Return the text of a page such as `docs/transports.md`, or of its section `#flags`; None: there is none."""
    name, _, anchor = page.partition("#")
    path = ROOT / name
    if not path.is_file():
        return None
    return sections_of(path).get(anchor) if anchor else path.read_text()
