#!/usr/bin/env python3
"""Find resources that a built site loads from other hosts. The site must be readable without a network.

scripts/check_site.py site
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from typing_extensions import override

ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s;]+)", re.IGNORECASE)
# Attributes that a browser loads without a click, unlike `a` and `link rel=canonical`.
LOADING = {"src", "srcset", "poster", "data", "action"}
LOADING_RELATIONS = {
    "stylesheet",
    "preload",
    "prefetch",
    "preconnect",
    "icon",
    "manifest",
    "modulepreload",
    "dns-prefetch",
}


class Loads(HTMLParser):
    """Collects the URLs on other hosts that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = LOADING & given.keys()
        if tag == "link" and LOADING_RELATIONS & set(given.get("rel", "").split()):
            names = names | {"href"}
        self.found += [given[name] for name in sorted(names) if ELSEWHERE.match(given[name])]
        self.found += IN_STYLE.findall(given.get("style", ""))


def loads(path: Path) -> Iterator[str]:
    """Yield the URLs on other hosts that a file loads."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        page = Loads()
        page.feed(text)
        yield from page.found
    yield from IN_STYLE.findall(re.sub(r"<pre.*?</pre>|<code.*?</code>", "", text, flags=re.DOTALL))


def main() -> int:
    """Print the resources found; return 1 if there is any, or if the site has no page."""
    paths = [p for p in Path(sys.argv[1]).rglob("*") if p.suffix in {".html", ".css", ".svg"}]
    found = [(path, address) for path in paths for address in loads(path)]
    for path, address in found:
        print(f"{path}: loads {address}")
    if not any(path.suffix == ".html" for path in paths):
        print(f"{sys.argv[1]} has no HTML page")
        return 1
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
