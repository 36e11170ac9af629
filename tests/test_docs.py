"""The documentation names existing things, and the program accepts the commands it shows."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from scripts import check_style, reference
from scripts.error_remedies import NOT_OVER_HTTP
from tandem.cli.completion import parsers
from tandem.cli.main import MODULES
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.node.command import COMMANDS
from tandem.node.flags import read_options
from tests.command_lines import (
    FENCE,
    PARSERS,
    flags_of,
    refusal,
    shown_in_blocks,
    shown_in_sentences,
    shown_in_text,
    unknown_flags,
)
from tests.pages import anchor_of, find, sections_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
PACKAGE = ROOT / "src" / "tandem"
ROOMS = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
FILE = re.compile(rf"`((?:{'|'.join(ROOMS)}|tests|docs|benchmarks)/[\w/.]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
LISTED = re.compile(r"^\*\*(Same|Ignored|Not taken)\*\*: (.+)$", re.MULTILINE)
HERE = re.compile(r"\| `(--[\w-]+)` \| (same|ignored|not taken|alias of `(--[\w-]+)`) \|")
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


@each_page
def test_every_file_that_a_page_names_is_there(page):
    named = FILE.findall(page.read_text())
    assert [name for name in named if not is_file_of_ours(name)] == []


def is_file_of_ours(name):
    return (ROOT / name).exists() or (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()


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
    text = find(f"docs/architecture.md#the-way-of-a-{way}")
    hops = re.findall(r"^ +(\d+)  (\w+(?:/\w+)+) ", text, re.MULTILINE)
    assert [int(number) for number, _ in hops] == list(range(1, at_most + 1))
    assert [hop for _, hop in hops if not is_file_of_ours(hop)] == []


@each_page
def test_every_command_line_of_a_page_is_one_that_the_program_takes(page):
    text = page.read_text()
    wrong = {line: said for line in shown_in_blocks(text) if (said := refusal(line))}
    wrong |= {line: said for line in shown_in_sentences(text) if (said := unknown_flags(line))}
    assert wrong == {}


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_page_that_installs_activates_the_environment_before_the_first_command(page):
    text = (ROOT / page).read_text()
    makefile = (ROOT / "Makefile").read_text()
    environment = re.search(r"^VENV \?= (\S+)$", makefile, re.MULTILINE)[1]
    before, command, _ = text.partition("\ntandem ")
    assert command
    assert f". {environment}/bin/activate" in FENCE.findall(before + "\n```")[-1][1]


def test_commands_of_the_transports_page_pass_the_checks_of_a_node():
    lines = [shlex.split(line) for line in shown_in_blocks(find("docs/transports.md"))]
    nodes = [(role, argv) for _, role, *argv in lines if role in COMMANDS]
    assert [role for role, _ in nodes] == ["prefill", "decode"]
    for role, argv in nodes:
        config, _ = read_options(COMMANDS[role].build_parser(), role, argv)
        TcpTransport(config.transfer.of_transports(config.host))


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


def test_pictures_say_in_words_what_they_show_and_load_nothing():
    for path in DOCS.glob("images/*.svg"):
        text = path.read_text()
        assert "<title" in text
        assert "prefers-color-scheme: dark" in text
        assert re.findall(r"(?:href|src|url)\W+(?:https?:)?//|<script|@import", text) == []


def test_the_pages_of_the_reference_are_current():
    assert reference.stale() == [], "run scripts/reference.py"


def test_every_error_of_ours_is_told_of():
    told = sections_of(DOCS / "reference/errors.md").keys() | NOT_OVER_HTTP
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
    text = find(f"docs/{page}.md#{section}")
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
    text = find(f"docs/{page}.md")
    rows = re.findall(r"^\| `--[\w-]+` \| [^|]+ \| (.*) \|$", text, re.MULTILINE)
    named = [flag for words in rows for flag in re.findall(r"`(--[\w-]+)", words)]
    assert named
    assert [flag for flag in named if flag not in known] == []


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def pages_in(path):
    """Yield the pages of the documentation, and their sections, that a file's texts name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from NAMED.findall(node.value)


def test_every_page_that_the_program_names_exists():
    named = {(path.name, page) for path in sources() for page in pages_in(path)}
    assert len(named) > 40
    assert {(name, page) for name, page in named if find(page) is None} == set()


def topics_in(path):
    """Yield the pages that a file gives to its errors."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.keyword(arg="topic", value=ast.Constant(value=str(topic))) if topic:
                yield topic
            case ast.Assign(targets=[ast.Name(id="topic")], value=ast.Constant(value=topic)):
                yield from [topic] if topic else []


def test_every_topic_of_an_error_is_a_page():
    topics = {topic for path in sources() for topic in topics_in(path)}
    assert len(topics) > 10
    assert {topic for topic in topics if not NAMED.fullmatch(topic)} == set()


def test_a_page_or_a_section_that_does_not_exist_is_found(tmp_path):
    (tmp_path / "x.py").write_text(
        'raise ConfigInvalid("no", topic="docs/transports.md#nowhere")\nLOG = "see docs/no.md"\n'
    )
    pages = set(pages_in(tmp_path / "x.py"))
    assert pages == {"docs/transports.md#nowhere", "docs/no.md"}
    assert {find(page) for page in pages} == {None}


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("What `x` does: a, b (and _c_)", "what-x-does-a-b-and-_c_"),
        ("Prefill's end", "prefills-end"),
        ("[A link](b.md) - two  spaces", "a-link-two-spaces"),
    ],
)
def test_headings_have_the_anchors_of_the_site(title, anchor):
    assert anchor_of(title) == anchor


def test_every_command_is_in_the_reference():
    assert parsers().keys() == MODULES.keys() - {"router"}  # another name of `lb`


def test_every_command_says_where_to_read_on():
    silent = [
        name for name, parser in parsers().items() if "More: docs/" not in (parser.epilog or "")
    ]
    assert silent == []


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
