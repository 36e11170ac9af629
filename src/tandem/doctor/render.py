"""A report as tables: with colours on a terminal, as aligned text elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.doctor.report import Finding, Report, Status, TransportRow

COLOURS: dict[str, str] = {
    "ok": "green",
    "warning": "yellow",
    "missing": "bright_black",
    "failed": "bold red",
}


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    is_number: bool = False
    is_wrapped: bool = False


TRANSPORT_COLUMNS = (
    _Column("status"),
    _Column("transport"),
    _Column("GB/s", is_number=True),
    _Column("limit"),
    _Column("of limit", is_number=True),
    _Column("a page, µs", is_number=True),
    _Column("what to do", is_wrapped=True),
)
FINDING_COLUMNS = (
    _Column("status"),
    _Column("area"),
    _Column("what", is_wrapped=True),
    _Column("found", is_wrapped=True),
    _Column("what to do", is_wrapped=True),
)


def render(report: Report, console: Console) -> None:
    """Print the tables and one last line that says what it comes to."""
    draw = _draw if console.is_terminal else _align
    if report.transports:
        console.print(_title(report), style="bold", soft_wrap=True)
        draw(console, TRANSPORT_COLUMNS, [_transport(row) for row in report.transports])
    if report.findings:
        draw(console, FINDING_COLUMNS, [_finding(each) for each in report.findings])
    console.print(_verdict(report), soft_wrap=True)


def make_console() -> Console:
    """Return a console for standard output that takes text as it is."""
    return Console(highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Return text of a peer without what would steer a terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _draw(console: Console, columns: Sequence[_Column], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=not column.is_wrapped,
            overflow="fold",
        )
    for status, *others in rows:
        table.add_row(Text(status, style=COLOURS[status]), *others)
    console.print(table)


def _align(console: Console, columns: Sequence[_Column], rows: Sequence[Sequence[str]]) -> None:
    """One line a row, whatever its length: for files, pipes and logs."""
    lines = [[column.title for column in columns], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            text.rjust(width) if column.is_number else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ]
        console.print("  ".join(cells).rstrip(), soft_wrap=True)
    console.print()


def _title(report: Report) -> str:
    ends = " to ".join(printable(end) for end in report.between)
    limits = report.limits
    parts = []
    if limits.memcpy_gigabytes_per_s:
        parts.append(f"memcpy {limits.memcpy_gigabytes_per_s:.1f} GB/s")
    if limits.socket_gigabytes_per_s:
        parts.append(
            f"one bare TCP stream {limits.socket_gigabytes_per_s:.2f} GB/s "
            f"({limits.page_us or 0:.0f} µs a page, {limits.round_trip_us or 0:.0f} µs round trip)"
        )
    if limits.rdma_gigabytes_per_s:
        parts.append(f"RDMA port {limits.rdma_gigabytes_per_s:.1f} GB/s")
    size_kib = report.page_bytes >> 10
    return (
        f"{ends}, scattered pages of {size_kib} KiB; limits: {', '.join(parts) or 'none measured'}"
    )


def _transport(row: TransportRow) -> list[str]:
    return [
        row.status,
        printable(row.name),
        _number(row.gigabytes_per_s, ".2f"),
        printable(row.limit) or "-",
        _number(row.of_limit, ".2f"),
        _number(row.latency_us, ".0f"),
        printable(row.advice),
    ]


def _finding(each: Finding) -> list[str]:
    texts = (each.area, each.name, each.found, each.advice)
    return [each.status, *map(printable, texts)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _verdict(report: Report) -> Text:
    statuses: list[tuple[str, Status]] = [(row.name, row.status) for row in report.transports]
    statuses += [(each.name, each.status) for each in report.findings]
    failed = [printable(name) for name, status in statuses if status == "failed"]
    num_warnings = sum(status == "warning" for _, status in statuses)
    warned = f"; {num_warnings} warning{'s' * (num_warnings != 1)}" if num_warnings else ""
    if failed:
        return Text(f"does not work: {', '.join(failed)}{warned}", style=COLOURS["failed"])
    return Text(f"all that is needed works{warned}", style=COLOURS["ok"])
