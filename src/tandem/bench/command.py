"""From the command line of `tandem bench` to its exit status."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import msgspec
from rich.console import Console

from tandem.bench.arguments import parse
from tandem.bench.config import BenchConfig, Load
from tandem.bench.live import watching
from tandem.bench.page import page
from tandem.bench.processes import ClientLost, drive
from tandem.bench.records import ClientPlan, PromptRules, Server
from tandem.bench.report import Goodput, LoadReport, Report
from tandem.bench.server import Unreachable, find_server, find_vocab_size
from tandem.bench.statistics import summarise
from tandem.bench.table import render
from tandem.bench.trace import TraceRow, read_trace
from tandem.bench.workload import make_jobs, num_clients, split_plan, warm_up_plan
from tandem.telemetry.version import package_version
from tandem.wire.errors import ConfigInvalid

STOPPED = 130  # what shells say of a command that Ctrl-C ended


class Refused(Exception):
    """Every request of the warm-up failed, so that a load would measure nothing."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    try:
        config = parse(argv)
        rows = _rows(config)
        _check_writable(config)
        report, is_stopped = asyncio.run(_measure(config, rows))
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem bench: error: {error.for_operators}\n")
        return 2
    except (Unreachable, Refused, ClientLost) as error:
        sys.stderr.write(f"tandem bench: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("tandem bench: stopped\n")
        return STOPPED
    render(report, Console(markup=False, highlight=False))
    if config.output_file is not None:
        config.output_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if config.html is not None:
        config.html.write_text(page(report), encoding="utf-8")
    if is_stopped:
        return STOPPED
    return 0 if all(load.num_done for load in report.loads) else 1


def _rows(config: BenchConfig) -> list[TraceRow]:
    if config.trace is None:
        return []
    try:
        with config.trace.open("rb") as lines:
            return read_trace(lines, str(config.trace), config.trace_limit)
    except OSError as error:
        raise ConfigInvalid(f"--trace {config.trace}: {error.strerror}") from error


def _check_writable(config: BenchConfig) -> None:
    """Refuse, before minutes of load, a report that could not be written."""
    for flag, path in (("--output-file", config.output_file), ("--html", config.html)):
        try:
            if path is not None:
                path.open("ab").close()
        except OSError as error:
            raise ConfigInvalid(f"{flag} {path}: {error.strerror}") from error


async def _measure(config: BenchConfig, rows: list[TraceRow]) -> tuple[Report, bool]:
    """Drive every load; return the report, and whether Ctrl-C ended it."""
    server = await asyncio.to_thread(find_server, config)
    rules = PromptRules(
        vocab_size=await asyncio.to_thread(find_vocab_size, config),
        seed=config.seed,
        shared_prefix_tokens=config.shared_prefix_tokens,
    )
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    await _warm_up(config, server, rules)
    stop = _stop_on_signals()
    loads, first_index = list[LoadReport](), config.warmup_requests
    for load in config.loads:
        if not stop.is_set():
            jobs = make_jobs(config, load, first_index, rows)
            first_index += len(jobs)
            plan = ClientPlan(
                server=server,
                rules=rules,
                jobs=jobs,
                concurrency=load.concurrency,
                think_time_s=config.think_time_s,
            )
            loads.append(await _drive(config, load, plan, stop))
    report = Report(
        version=package_version(),
        started_at=started_at,
        url=config.url,
        api=config.api,
        model=server.model,
        settings=_settings(config),
        loads=loads,
    )
    return report, stop.is_set()


async def _warm_up(config: BenchConfig, server: Server, rules: PromptRules) -> None:
    """Send what pays for everything that a server makes at its first request."""
    if not config.warmup_requests:
        return
    measured = await drive([warm_up_plan(config, server, rules)])
    if all(sample.failure for sample in measured.samples):
        first = measured.samples[0]
        raise Refused(f"{config.url} failed the warm-up ({first.failure}): {first.error}")


async def _drive(
    config: BenchConfig, load: Load, plan: ClientPlan, stop: asyncio.Event
) -> LoadReport:
    clients = num_clients(config.clients, load, len(plan.jobs))
    with watching(load.name, sum(len(job.turns) for job in plan.jobs)) as listen:
        measured = await drive(split_plan(plan, clients), listen, stop)
    return summarise(
        load,
        measured.samples,
        measured.cpu_s,
        objectives=_objectives(config),
        is_stopped=stop.is_set(),
    )


def _stop_on_signals() -> asyncio.Event:
    """Return what the first Ctrl-C or SIGTERM sets; a second ends the command."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    return stop


def _objectives(config: BenchConfig) -> Goodput | None:
    given = (config.slo_ttft_ms, config.slo_itl_ms, config.slo_e2e_ms)
    if all(most is None for most in given):
        return None
    return Goodput(ttft_ms=given[0], itl_ms=given[1], e2e_ms=given[2])


def _settings(config: BenchConfig) -> dict[str, object]:
    kept = {name: value for name, value in asdict(config).items() if name not in NOT_SETTINGS}
    return kept | {"trace": str(config.trace or "")}


# Said elsewhere in the report, or of no use in it; the key is nobody's business.
NOT_SETTINGS = {"url", "api", "model", "api_key", "loads", "output_file", "html"}
