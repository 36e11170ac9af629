"""The documentation names existing things, and the program accepts the commands it shows."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from scripts import check_style, reference
from scripts.error_remedies import NOT_OVER_HTTP
from tandem.__main__ import MODULES
from tandem.manual.pages import Manual, Page, shipped
from tandem.parsers import parsers
from tests.command_lines import (
    PARSERS,
    flags_of,
    refusal,
    shown_in_blocks,
    shown_in_sentences,
    shown_in_text,
    unknown_flags,
)

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
OURS = [
    "tandem",
    "router",
    "prefill",
    "decode",
    "node",
    "frontend",
    "engine",
    "kvtransfer",
    "kvtier",
    "wire",
    "telemetry",
]
FILE = re.compile(rf"`((?:{'|'.join(OURS)}|tests|docs|benchmarks)/[\w/.]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
TOPIC = re.compile(r"tandem docs ([a-z][\w-]*(?:#[\w-]+)?)")
LISTED = re.compile(r"^\*\*(Same|Ignored|Not taken)\*\*: (.+)$", re.MULTILINE)
HERE = re.compile(r"\| `(--[\w-]+)` \| (same|ignored|not taken|alias of `(--[\w-]+)`) \|")
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


@each_page
def test_every_file_that_a_page_names_is_there(page):
    named = FILE.findall(page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@each_page
def test_every_link_of_a_page_leads_to_a_page_and_a_section_of_it(page):
    broken = []
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        # A file that is not a page of the site has no URL there: pages may name it, but not link to it.
        is_beyond = DOCS in page.parents and DOCS not in target.resolve().parents
        if not target.exists() or is_beyond or (anchor and anchor not in sections_of(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize(("way", "at_most"), [("request", 12), ("token", 8), ("page", 8)])
def test_every_hop_of_a_drawing_is_a_file_and_there_are_few(way, at_most):
    text = shipped().find(f"architecture#the-way-of-a-{way}")
    hops = re.findall(r"^ +(\d+)  (\w+/\w+) ", text, re.MULTILINE)
    assert [int(number) for number, _ in hops] == list(range(1, at_most + 1))
    missing = [
        hop for _, hop in hops if not any((ROOT / f"{hop}{end}").exists() for end in ("", ".py"))
    ]
    assert missing == []


def sections_of(path):
    return Page(path.stem, path.read_text()).sections


@each_page
def test_every_command_line_of_a_page_is_one_that_the_program_takes(page):
    text = page.read_text()
    wrong = {line: said for line in shown_in_blocks(text) if (said := refusal(line))}
    wrong |= {line: said for line in shown_in_sentences(text) if (said := unknown_flags(line))}
    assert wrong == {}


@pytest.mark.parametrize("name", parsers())
def test_every_example_in_the_help_of_a_command_is_one_that_it_takes(name):
    examples = shown_in_text(PARSERS[name].epilog or "")
    assert {line: refusal(line) for line in examples if refusal(line)} == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tandem prefill --port x", "invalid int value"),
        ("tandem lb --no-such-flag", "unknown: --no-such-flag"),
        ("tandem up --prefills 2 --no-such-flag", "--no-such-flag"),
        ("tandem sevre", "no command 'sevre'"),
    ],
)
def test_a_command_line_that_the_program_would_refuse_is_found(line, said):
    (found,) = shown_in_blocks(f"text\n\n```sh\nexport A=b && {line}   # why\n```\n")
    assert said in refusal(found)


def test_the_site_has_every_page_once_and_no_other():
    def files(nav):
        for entry in nav:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(files(config["nav"])) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


def test_the_front_page_leads_to_every_page():
    text = (DOCS / "index.md").read_text()
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(text)}
    assert {path for path in DOCS.rglob("*.md") if path.stem != "index"} - linked == set()


def test_no_two_pages_are_one_topic():
    names = [path.stem for path in DOCS.rglob("*.md")]
    assert len(names) == len(set(names))


def test_pictures_say_in_words_what_they_show_and_load_nothing():
    for path in DOCS.glob("images/*.svg"):
        text = path.read_text()
        assert "<title" in text
        assert "prefers-color-scheme: dark" in text
        assert re.findall(r"(?:href|src|url)\W+(?:https?:)?//|<script|@import", text) == []


def test_the_pages_of_the_reference_are_current():
    assert reference.stale() == [], "run scripts/reference.py"


def test_every_error_of_ours_is_told_of():
    told = shipped().pages["errors"].sections.keys() | NOT_OVER_HTTP
    codes = {
        fact.value.value
        for path in sources()
        for kind in ast.walk(ast.parse(path.read_text()))
        if isinstance(kind, ast.ClassDef)
        for fact in kind.keywords
        if fact.arg == "code"
    }
    assert {"peer_lost", "node_unknown"} <= codes
    assert codes - told == set()


@pytest.mark.parametrize(
    ("page", "section", "command"),
    [
        ("migrating-from-sglang", "flags-of-a-node", "prefill"),
        ("migrating-from-sglang", "flags-of-a-node", "decode"),
        ("migrating-from-sglang", "flags-of-the-router", "lb"),
        ("migrating-from-vllm", "flags-of-a-node", "prefill"),
        ("migrating-from-vllm", "flags-of-a-node", "decode"),
        ("migrating-from-vllm", "flags-of-the-router", "lb"),
    ],
)
def test_flags_of_other_servers_are_taken_as_the_page_says(page, section, command):
    parser = parsers()[command]
    text = shipped().find(f"{page}#{section}")
    rows = HERE.findall(text)
    for said, flags in LISTED.findall(text):
        rows += [(flag, said.lower(), "") for flag in re.findall(r"`(--[\w-]+)`", flags)]
    assert len(rows) > 5
    assert {flag: said for flag, said, alias in rows if said != taken(parser, flag, alias)} == {}


def taken(parser, flag, alias):
    """Return how a parser accepts a flag, in the wording of the page."""
    action = parser._option_string_actions.get(flag)
    if action is None:
        return "not taken"
    if alias and action is parser._option_string_actions.get(alias):
        return f"alias of `{alias}`"
    is_ignored = type(action).__name__ == "_Ignored" or action.dest.startswith("--")
    return "ignored" if is_ignored else "same"


@pytest.mark.parametrize("page", ["migrating-from-sglang", "migrating-from-vllm"])
def test_a_flag_that_is_named_instead_is_one_of_ours(page):
    known = set().union(*map(flags_of, parsers().values()))
    rows = re.findall(
        r"^\| `--[\w-]+` \| [^|]+ \| (.*) \|$", shipped().pages[page].text, re.MULTILINE
    )
    named = [flag for words in rows for flag in re.findall(r"`(--[\w-]+)", words)]
    assert named
    assert [flag for flag in named if flag not in known] == []


def sources():
    return [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


def topics_in(path):
    """Yield the documentation topics that a file's text and errors refer to."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Constant(value=str(text)):
                yield from TOPIC.findall(text)
            case ast.keyword(arg="topic", value=ast.Constant(value=str(topic))) if topic:
                yield topic
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(topic))):
                if topic and (name == "topic" or re.fullmatch(r"[a-z-]+#[\w-]+", topic)):
                    yield topic


def test_every_topic_that_the_program_sends_its_operators_to_is_there():
    manual = shipped()
    named = {(path.name, topic) for path in sources() for topic in topics_in(path)}
    assert len(named) > 20
    assert {(name, topic) for name, topic in named if manual.find(topic) is None} == set()


def test_every_command_is_in_the_reference():
    assert parsers().keys() == MODULES.keys() - {"router"}  # another name of `lb`


def test_every_command_says_where_to_read_on():
    silent = [
        name for name, parser in parsers().items() if "tandem docs" not in (parser.epilog or "")
    ]
    assert silent == []


def test_a_topic_that_is_not_there_is_found(tmp_path):
    (tmp_path / "x.py").write_text('raise ConfigInvalid("no", topic="transports#nowhere")\n')
    (topic,) = topics_in(tmp_path / "x.py")
    assert Manual(DOCS).find(topic) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("word " * 31 + "end.", "32 words"),
        ("The node says that it drains.", "report"),
        ("Of the two nodes one is lost.", "subject"),
        ("Ask the router, who knows.", "person"),
        ("Whoever drains it waits.", "actor"),
    ],
)
def test_prose_that_breaks_the_style_is_found(text, found):
    ((line, problem),) = check_style.problems_of_page(f"# Title\n\n- item\n- {text}\n")
    assert line == 4
    assert found in problem


def test_code_and_plain_prose_break_no_style():
    page = "The router reports it.\n\n```text\nthe node says no\n```\n\nUse `node says`.\n"
    assert list(check_style.problems_of_page(page)) == []
