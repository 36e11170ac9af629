"""Runs `tandem bench`: warms the server up, sends the loads and writes the report."""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from tandem.bench.client import Sample, drive, headers_of
from tandem.bench.config import BenchConfig, Load, parse
from tandem.bench.report import Limits, LoadReport, Report, render, summarise
from tandem.bench.workload import Job, TraceRow, make_jobs, read_trace
from tandem.long_work import counted
from tandem.telemetry.version import package_version
from tandem.wire.channel import allow_descriptors
from tandem.wire.errors import ConfigInvalid

STOPPED = 130  # the exit status that shells report after Ctrl-C
# Used if the server reports no vocabulary size: nearly every model has at least as many ids.
FALLBACK_VOCAB_SIZE = 10_000
ASK_TIMEOUT_S = 10.0
# Not in the report's settings: fields reported elsewhere, fields without use there, and the secret key.
NOT_SETTINGS = {
    "url",
    "api",
    "model",
    "api_key",
    "concurrency",
    "request_rate",
    "max_concurrency",
    "output_file",
}


class Undriven(Exception):
    """The server does not answer, or every warm-up request failed."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    config = parse(argv)
    rows = read_trace(config.trace, config.num_prompts) if config.trace else []
    _check_writable(config.output_file)
    try:
        report, is_stopped = uvloop.run(_measure(config, rows))
    except Undriven as error:
        sys.stderr.write(f"tandem bench: error: {error}\n")
        return 1
    render(report, Console(markup=False, highlight=False))
    if config.output_file:
        found = msgspec.json.format(msgspec.json.encode(report))
        Path(config.output_file).write_bytes(found + b"\n")
    if is_stopped:
        return STOPPED
    return 0 if all(load.num_done for load in report.loads) else 1


def _check_writable(path: str) -> None:
    """Check that the report can be written, before minutes of load."""
    try:
        if path:
            Path(path).open("ab").close()
    except OSError as error:
        raise ConfigInvalid(f"--output-file {path}: {error.strerror}") from error


async def _measure(config: BenchConfig, rows: list[TraceRow]) -> tuple[Report, bool]:
    """Run every load; return the report, and whether a signal stopped the run."""
    config = await _completed(config)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    await _warm_up(config)
    stop, loads, first_index = _stop_on_signals(), list[LoadReport](), config.warmup_requests
    for load in config.loads:
        if not stop.is_set():
            jobs = make_jobs(config, load, first_index, rows)
            first_index += len(jobs)
            loads.append(await _drive(config, load, jobs, stop))
    fields = msgspec.structs.asdict(config)
    report = Report(
        version=package_version(),
        started_at=started_at,
        url=config.url,
        api=config.api,
        model=config.model,
        settings={name: fields[name] for name in fields if name not in NOT_SETTINGS},
        loads=loads,
    )
    return report, stop.is_set()


async def _completed(config: BenchConfig) -> BenchConfig:
    """Query the server, and fill in the model name and vocabulary size if `config` lacks them.

    Raises:
        Undriven: The server does not answer, or its certificate is not trusted.
        ConfigInvalid: An OpenAI API requires a model name, and the server reports none.
    """
    timeout = aiohttp.ClientTimeout(ASK_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers_of(config), timeout=timeout) as session:
        models = (await _get(session, f"{config.url}/v1/models")).get("data") or [{}]
        info = {} if config.vocab_size else await _get(session, f"{config.url}/model_info")
    model = config.model or str(models[0].get("id", ""))
    if not model and config.api != "native":
        raise ConfigInvalid(f"--model: {config.url} does not report which it serves; name it")
    vocab_size = config.vocab_size or info.get("vocab_size") or FALLBACK_VOCAB_SIZE
    return msgspec.structs.replace(config, model=model, vocab_size=vocab_size)


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the JSON object at a URL, or an empty dict if the body is no JSON object."""
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


async def _warm_up(config: BenchConfig) -> None:
    """Send the warm-up requests, so that no load pays for the server's first-request costs."""
    jobs = [
        Job(index=i, input_tokens=config.input_tokens, output_tokens=config.output_tokens)
        for i in range(config.warmup_requests)
    ]
    samples = await drive(config, jobs, concurrency=1)
    if samples and all(sample.failure for sample in samples):
        first = samples[0]
        raise Undriven(f"{config.url} failed the warm-up ({first.failure}): {first.error}")


async def _drive(
    config: BenchConfig, load: Load, jobs: Sequence[Job], stop: asyncio.Event
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

        samples = await drive(config, jobs, load.concurrency, ended=ended, stop=stop)
    limits = Limits(ttft_ms=config.slo_ttft_ms, itl_ms=config.slo_itl_ms)
    return summarise(
        load,
        samples,
        time.process_time() - cpu_s,
        limits=None if limits == Limits() else limits,
        is_stopped=stop.is_set(),
    )


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first Ctrl-C or SIGTERM sets; a second signal ends the command."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    return stop
