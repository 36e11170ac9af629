"""A report as text."""

from rich import box
from rich.console import Console
from rich.table import Table

from tandem.bench.report import Goodput, LoadReport, Report, Times

# A client that is busier than this is late to see tokens: what it measures is itself.
BUSY_SHARE = 0.7
# In less than this, what every load takes once weighs more than its tokens.
SHORT_S = 1.0
# Later than this, arrivals are not those that were asked for.
LATE_MS = 50.0
TIMES = ("TTFT", "ITL", "TPOT", "E2E")


def times_of(load: LoadReport) -> dict[str, Times]:
    """Return the kinds of time by their names, in the order they are shown."""
    return dict(zip(TIMES, (load.ttft_ms, load.itl_ms, load.tpot_ms, load.e2e_ms), strict=True))


def render(report: Report, console: Console) -> None:
    """Print a table of all loads, and what has to be known beside it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("load", "measure"):
        table.add_column(title, no_wrap=True)
    for title in ("mean", "p50", "p90", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for load in report.loads:
        for number, (name, times) in enumerate(times_of(load).items()):
            cells = [f"{v:,.1f}" for v in (times.mean, times.p50, times.p90, times.p99)]
            is_last = number == len(TIMES) - 1
            shown = cells if times.count else ["-"] * 4
            table.add_row("" if number else load.name, f"{name}, ms", *shown, end_section=is_last)
    console.print(table)
    for load in report.loads:
        for line in sentences(load):
            console.print(line, soft_wrap=True)


def sentences(load: LoadReport) -> list[str]:
    """Return what is to be said of a load, the first line of its throughput."""
    counts = f"{load.num_done} of {load.num_requests} requests in {load.duration_s:.1f} s"
    cached = f" ({load.cached_tokens:,} of {load.input_tokens:,} from a cache)"
    lines = [
        f"{load.name}: {counts}; {load.requests_per_s:.2f} requests/s, output "
        f"{load.output_tokens_per_s:,.1f} tokens/s, input {load.input_tokens_per_s:,.1f} tokens/s"
        + (cached if load.cached_tokens else "")
    ]
    if load.is_stopped:
        lines.append(f"  stopped early; {load.num_unfinished} requests were under way")
    if load.goodput is not None:
        lines.append(
            f"  goodput: {load.goodput.share:.1%} of requests met {_objectives(load.goodput)}: "
            f"{load.goodput.requests_per_s:.2f} requests/s"
        )
    lines += [f"  failed, {one.kind}: {one.count}, such as: {one.example}" for one in load.failures]
    return lines + warnings(load)


def warnings(load: LoadReport) -> list[str]:
    """Return what casts doubt on what was measured."""
    client, lines = load.client, []
    if client.busiest_share > BUSY_SHARE and load.duration_s > SHORT_S:
        lines.append(
            f"  warning: the load client is the bottleneck: a process of it was busy "
            f"{client.busiest_share:.0%} of the time ({client.cpu_us_per_token:.1f} µs a token): "
            f"give more than {client.num_processes} --clients, or another machine"
        )
    if load.kind != "closed" and client.late_p99_ms > LATE_MS:
        lines.append(
            f"  warning: 1 % of requests were sent {client.late_p99_ms:.0f} ms or more after they were due: "
            "the client could not keep up"
        )
    return lines


def _objectives(goodput: Goodput) -> str:
    given = {"TTFT": goodput.ttft_ms, "ITL": goodput.itl_ms, "E2E": goodput.e2e_ms}
    return ", ".join(f"{name} ≤ {most:g} ms" for name, most in given.items() if most is not None)
