"""`tandem docs`: a page of the documentation in the terminal.

On a terminal it is set, and paged where it is longer than the screen; elsewhere it is the Markdown as
written, for `grep` and files.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

from tandem.manual.pages import Manual, shipped

EXAMPLES = """\
examples:
  tandem docs                       which topics there are
  tandem docs quickstart            a page
  tandem docs membership#dns        a section of it
  tandem docs out_of_pages          a section by its name alone, such as what an error means
  tandem docs cli | grep -e --tp    plain Markdown where no terminal reads it
"""
# Ends at once where a page fits, keeps colours, leaves the text on the screen.
LESS_OPTIONS = "-FRX"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="tandem docs",
        description="Show the documentation, which comes with the program.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "topic", nargs="?", default="", metavar="TOPIC", help="nothing: list the topics"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 2 where there is no such topic."""
    topic = build_parser().parse_args(argv).topic
    manual = shipped()
    if not topic:
        sys.stdout.write(topics(manual))
        return 0
    text = manual.find(topic)
    if text is None:
        sys.stderr.write(unknown(manual, topic))
        return 2
    try:
        _show(text)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def topics(manual: Manual) -> str:
    """Return the list of pages."""
    width = max(map(len, manual.pages), default=0)
    rows = "".join(f"{page.name:<{width}}  {page.title}\n" for page in manual.pages.values())
    return f"{rows}\n`tandem docs TOPIC` shows one, `tandem docs TOPIC#SECTION` a part of it.\n"


def unknown(manual: Manual, topic: str) -> str:
    """Say that there is no such topic, and which may be meant."""
    said = f"tandem docs: error: there is no one topic {topic!r}"
    if close := manual.suggest(topic):
        return f"{said}; did you mean\n" + "".join(f"  tandem docs {each}\n" for each in close)
    return f"{said}: `tandem docs` lists them\n"


def _show(text: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    os.environ.setdefault("LESS", LESS_OPTIONS)
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text, code_theme="ansi_dark"))
