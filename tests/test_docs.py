"""What the documentation names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
PACKAGES = "tandem|router|prefill|decode|node|frontend|engine|kvtransfer|wire|telemetry|tests|docs"
FILE = re.compile(rf"`((?:{PACKAGES}|benchmarks)/[\w/.]*)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page):
    named = FILE.findall(page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
