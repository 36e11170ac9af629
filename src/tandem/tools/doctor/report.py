"""The findings of `tandem doctor`, and their table."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.text import Text

from tandem.tools.query import plain

Status = Literal["ok", "warning", "missing", "failed"]
"""`missing`: absent, but not required. `failed`: required, but does not work."""

COLOURS: dict[str, str] = {
    "ok": "green",
    "warning": "yellow",
    "missing": "bright_black",
    "failed": "bold red",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        found: The observed state.
        advice: The remedy; empty if none is required.
    """

    area: str
    name: str
    status: Status = "ok"
    found: str
    advice: str = ""


def render(findings: Sequence[Finding]) -> None:
    """Print one aligned line per finding, without wrapping, then a line with the outcome."""
    console = Console(highlight=False, markup=False, emoji=False)
    lines = [["status", "area", "what", "found", "what to do"]]
    lines += [[each.status, each.area, each.name, each.found, each.advice] for each in findings]
    lines = [[plain(text) for text in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        text = Text("  ".join(padded).rstrip(), style=COLOURS.get(line[0], ""))
        console.print(text, soft_wrap=True)
    failed = [plain(each.name) for each in findings if each.status == "failed"]
    num_warnings = sum(each.status == "warning" for each in findings)
    warned = f"; {num_warnings} warning{'s' * (num_warnings != 1)}" if num_warnings else ""
    verdict = f"does not work: {', '.join(failed)}" if failed else "everything required works"
    style = COLOURS["failed" if failed else "ok"]
    console.print(Text(f"\n{verdict}{warned}", style=style), soft_wrap=True)
