"""The report of `tandem doctor`, as JSON and as tables.

The JSON is stable for scripts: new fields have defaults, no field is renamed or reused.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.text import Text

from tandem.asking import plain

Status = Literal["ok", "warning", "missing", "failed"]
"""`missing`: not there, and nothing that was asked for needs it. `failed`: something asked for does."""

Mode = Literal["local", "listen", "connect", "nodes"]

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


class HandOff(msgspec.Struct, frozen=True):
    """The median time of hand-offs of one size, from the grant to the landing of all pages."""

    size_bytes: int
    ms: float


class TransportRow(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one transport between two ends.

    Attributes:
        hand_offs: Ascending by size; empty if the transport could not be measured.
        gigabytes_per_s: The rate of the largest hand-off.
        advice: The reason of a failure, with the remedy if it is known; empty if the transport works.
    """

    name: str
    status: Status
    hand_offs: list[HandOff] = []
    gigabytes_per_s: float | None = None
    advice: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `is_well`: no check has the status `failed`, and the exit status is 0."""

    version: str
    host: str
    mode: Mode
    is_well: bool
    transports: list[TransportRow] = []
    findings: list[Finding] = []


def render(report: Report) -> None:
    """Print the tables, then a line with the outcome."""
    console = Console(highlight=False, markup=False, emoji=False)
    if report.transports:
        sizes = max((row.hand_offs for row in report.transports), key=len)
        heads = [f"{_size(each.size_bytes)}, ms" for each in sizes]
        rows = [_transport(row, len(sizes)) for row in report.transports]
        _print(console, ["status", "transport", *heads, "GB/s", "what to do"], rows)
    if report.findings:
        found = [[f.status, f.area, f.name, f.found, f.advice] for f in report.findings]
        _print(console, ["status", "area", "what", "found", "what to do"], found)
    statuses = [(row.name, row.status) for row in report.transports]
    statuses += [(each.name, each.status) for each in report.findings]
    failed = [plain(name) for name, status in statuses if status == "failed"]
    num_warnings = sum(status == "warning" for _, status in statuses)
    warned = f"; {num_warnings} warning{'s' * (num_warnings != 1)}" if num_warnings else ""
    if failed:
        text = Text(f"does not work: {', '.join(failed)}{warned}", style=COLOURS["failed"])
    else:
        text = Text(f"all that is needed works{warned}", style=COLOURS["ok"])
    console.print(text, soft_wrap=True)


def _transport(row: TransportRow, num_sizes: int) -> list[str]:
    times = [f"{each.ms:.2f}" for each in row.hand_offs] or ["-"] * num_sizes
    rate = "-" if row.gigabytes_per_s is None else f"{row.gigabytes_per_s:.2f}"
    return [row.status, row.name, *times, rate, row.advice]


def _print(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one aligned line per row; long lines are not wrapped."""
    lines = [list(heads), *(list(map(plain, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        text = Text("  ".join(padded).rstrip(), style=COLOURS.get(line[0], ""))
        console.print(text, soft_wrap=True)
    console.print()


def _size(size_bytes: int) -> str:
    is_large = size_bytes >= 1 << 20
    return f"{size_bytes >> 20} MiB" if is_large else f"{size_bytes >> 10} KiB"
