"""`tandem docs`: shows a page of the documentation.

On a terminal the page is formatted, and paged if it is longer than the screen. Pipes and files get the
original Markdown.
"""

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

from tandem.manual.pages import Manual, shipped
from tandem.wire.command_line import Parser

EXAMPLES = """\
examples:
  tandem docs                       list the topics
  tandem docs quickstart            a page
  tandem docs membership#dns        a section of it
  tandem docs out_of_pages          a section by its name alone, such as what an error means
  tandem docs cli | grep -e --tp    plain Markdown where no terminal reads it
"""
# Exit at once if the text fits on one screen, keep colours, leave the text on the screen.
LESS_OPTIONS = "-FRX"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem docs",
        description="Show the documentation, which comes with the program.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "topic", nargs="?", default="", metavar="TOPIC", help="nothing: list the topics"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 2 if the topic matches none or several."""
    topic = build_parser().parse_args(argv).topic
    manual = shipped()
    text = manual.find(topic) if topic else _topics(manual)
    if text is None:
        close = "".join(f"  tandem docs {each}\n" for each in manual.suggest(topic))
        hint = f"; did you mean\n{close}" if close else ": `tandem docs` lists them\n"
        sys.stderr.write(f"tandem docs: error: there is no one topic {topic!r}{hint}")
        return 2
    try:
        if topic and sys.stdout.isatty():
            os.environ.setdefault("LESS", LESS_OPTIONS)
            console = Console()
            with console.pager(styles=True):
                console.print(Markdown(text, code_theme="ansi_dark"))
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _topics(manual: Manual) -> str:
    width = max(map(len, manual.pages), default=0)
    rows = "".join(f"{page.name:<{width}}  {page.title}\n" for page in manual.pages.values())
    return f"{rows}\n`tandem docs TOPIC` shows one, `tandem docs TOPIC#SECTION` a part of it.\n"
