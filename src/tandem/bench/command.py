"""From the command line of `tandem bench` to its exit status."""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from tandem.bench.arguments import BenchConfig, Load, parse
from tandem.bench.client import Sample, Server, drive
from tandem.bench.report import Goodput, LoadReport, Report, render, summarise
from tandem.bench.trace import TraceRow, read_trace
from tandem.bench.workload import Job, PromptRules, make_jobs
from tandem.long_work import counted
from tandem.telemetry.version import package_version
from tandem.wire.channel import allow_descriptors
from tandem.wire.errors import ConfigInvalid

STOPPED = 130  # what shells report of a command that Ctrl-C ended
# If the server does not say: nearly every model has as many ids.
FALLBACK_VOCAB_SIZE = 10_000
ASK_TIMEOUT_S = 10.0
# Elsewhere in the report, or useless in it; the key is secret.
NOT_SETTINGS = {"url", "api", "model", "api_key", "loads", "output_file"}


class Undriven(Exception):
    """The server does not answer, or failed every request of the warm-up."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    try:
        config = parse(argv)
        rows = _rows(config)
        _check_writable(config.output_file)
        report, is_stopped = uvloop.run(_measure(config, rows))
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem bench: error: {error.for_operators}\n")
        return 2
    except Undriven as error:
        sys.stderr.write(f"tandem bench: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("tandem bench: stopped\n")
        return STOPPED
    render(report, Console(markup=False, highlight=False))
    if config.output_file is not None:
        config.output_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
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


def _check_writable(path: Path | None) -> None:
    """Reject, before minutes of load, a report that could not be written."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise ConfigInvalid(f"--output-file {path}: {error.strerror}") from error


async def _measure(config: BenchConfig, rows: list[TraceRow]) -> tuple[Report, bool]:
    """Run every load; return the report, and whether Ctrl-C ended it."""
    server, rules = await find_server(config)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    await _warm_up(config, server, rules)
    stop, loads, first_index = _stop_on_signals(), list[LoadReport](), config.warmup_requests
    for load in config.loads:
        if not stop.is_set():
            jobs = make_jobs(config, load, first_index, rows)
            first_index += len(jobs)
            loads.append(await _drive(config, load, (server, rules), jobs, stop))
    settings = {name: value for name, value in asdict(config).items() if name not in NOT_SETTINGS}
    report = Report(
        version=package_version(),
        started_at=started_at,
        url=config.url,
        api=config.api,
        model=server.model,
        settings=settings | {"trace": str(config.trace or "")},
        loads=loads,
    )
    return report, stop.is_set()


async def find_server(config: BenchConfig) -> tuple[Server, PromptRules]:
    """Ask the server for its model and vocabulary, where flags do not give them.

    Raises:
        Undriven: Nothing answers at the URL.
        ConfigInvalid: An OpenAI API needs the name of the model, and the server does not say it.
    """
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = aiohttp.ClientTimeout(ASK_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        models = (await _get(session, f"{config.url}/v1/models")).get("data") or [{}]
        info = {} if config.vocab_size else await _get(session, f"{config.url}/model_info")
    model = config.model or str(models[0].get("id", ""))
    if not model and config.api != "native":
        raise ConfigInvalid(f"--model: {config.url} does not say which it serves; name it")
    server = Server(
        url=config.url,
        api=config.api,
        model=model,
        api_key=config.api_key,
        is_eos_ignored=config.is_eos_ignored,
        extra_body=config.extra_body,
        timeout_s=config.timeout_s,
    )
    return server, PromptRules(
        vocab_size=config.vocab_size or info.get("vocab_size") or FALLBACK_VOCAB_SIZE,
        seed=config.seed,
        shared_prefix_tokens=config.shared_prefix_tokens,
    )


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the JSON object at a URL; an empty one if the server has none there."""
    try:
        async with session.get(url) as response:
            return msgspec.json.decode(await response.read(), type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
    except aiohttp.ClientConnectorCertificateError as error:
        raise Undriven(
            f"the certificate of {url} is not trusted ({error.certificate_error}): name a file with its "
            "authority in the environment variable SSL_CERT_FILE"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Undriven(
            f"{url} does not answer ({error}): start a server, or give its --url"
        ) from error


async def _warm_up(config: BenchConfig, server: Server, rules: PromptRules) -> None:
    """Pay for everything that a server makes at its first request."""
    jobs = [
        Job(index=i, input_tokens=config.input_tokens, output_tokens=config.output_tokens)
        for i in range(config.warmup_requests)
    ]
    samples = await drive(server, rules, jobs, concurrency=1)
    if samples and all(sample.failure for sample in samples):
        first = samples[0]
        raise Undriven(f"{config.url} failed the warm-up ({first.failure}): {first.error}")


async def _drive(
    config: BenchConfig,
    load: Load,
    target: tuple[Server, PromptRules],
    jobs: Sequence[Job],
    stop: asyncio.Event,
) -> LoadReport:
    allow_descriptors(load.concurrency or len(jobs), "requests at once")
    num_ended = num_failed = num_tokens = 0
    start_s, cpu_s = time.monotonic(), time.process_time()
    with counted(load.name, len(jobs)) as advance:

        def ended(sample: Sample) -> None:
            nonlocal num_ended, num_failed, num_tokens
            num_ended += 1
            num_failed += bool(sample.failure)
            num_tokens += sample.output_tokens
            speed = num_tokens / (time.monotonic() - start_s)
            advance(num_ended, f"{num_failed} failed · {speed:,.0f} tokens/s")

        samples = await drive(*target, jobs, load.concurrency, ended=ended, stop=stop)
    limits = Goodput(ttft_ms=config.slo_ttft_ms, itl_ms=config.slo_itl_ms, e2e_ms=config.slo_e2e_ms)
    return summarise(
        load,
        samples,
        time.process_time() - cpu_s,
        limits=None if limits == Goodput() else limits,
        is_stopped=stop.is_set(),
    )


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first Ctrl-C or SIGTERM sets; a second one ends the command."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    return stop
