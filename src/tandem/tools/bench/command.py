"""Runs `tandem bench`: warms the server up, sends the load and writes the report."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from tandem import __version__
from tandem.tools.bench.client import drive
from tandem.tools.bench.config import BenchConfig, parse
from tandem.tools.bench.load import WARM_UP
from tandem.tools.bench.processes import send_load
from tandem.tools.bench.report import BenchReport, GoodputLimits, render, summarise
from tandem.tools.query import QueryFailed, query, session_with
from tandem.wire.errors import ConfigInvalid

# Used if the server reports no vocabulary size: nearly every model has at least as many ids.
FALLBACK_VOCAB_SIZE = 10_000


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status.

    Raises:
        ConfigInvalid: A flag is invalid.
        QueryFailed: The server does not answer, or failed the warm-up.
    """
    config = parse(argv)
    try:  # before minutes of load
        if config.output_file:
            Path(config.output_file).open("ab").close()
    except OSError as error:
        raise ConfigInvalid(f"--output-file {config.output_file}: {error.strerror}") from error
    report = _measure(asyncio.run(_prepare(config)))
    render(report, config.load, Console(markup=False, highlight=False))
    if config.output_file:
        text = msgspec.json.format(msgspec.json.encode(report))
        Path(config.output_file).write_bytes(text + b"\n")
    return 0 if report.load.num_done else 1


def _measure(config: BenchConfig) -> BenchReport:
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with Console(stderr=True).status(f"sending: {config.load}"):
        sent = send_load(config)
    limits = GoodputLimits(ttft_ms=config.slo_ttft_ms, itl_ms=config.slo_itl_ms)
    load = summarise(sent.samples, sent.cpu_s, None if limits == GoodputLimits() else limits)
    settings = msgspec.structs.asdict(config)
    del settings["api_key"]
    return BenchReport(version=__version__, started_at=started_at, settings=settings, load=load)


async def _prepare(config: BenchConfig) -> BenchConfig:
    """Fill in the model and the vocabulary size, and send one request that is not part of the load.

    Raises:
        QueryFailed: The server does not answer, or the request failed.
    """
    async with session_with(config.api_key) as session:
        models = await _object(session, config.url, "/v1/models")
        info = await _object(session, config.url, "/model_info")
    [first, *_] = models.get("data") or [{}]
    config = msgspec.structs.replace(
        config,
        model=config.model or str(first.get("id", "")),
        vocab_size=info.get("vocab_size") or FALLBACK_VOCAB_SIZE,
    )
    [sample] = await drive(config, [WARM_UP], 1)
    if sample.failure:
        raise QueryFailed(f"{config.url} failed the warm-up ({sample.failure}): {sample.error}")
    return config


async def _object(session: aiohttp.ClientSession, url: str, path: str) -> dict[str, Any]:
    """Return the JSON object at a path, or an empty one if the server has none there."""
    try:
        return msgspec.json.decode(
            await query(session, url, path, "server", None), type=dict[str, Any]
        )
    except msgspec.MsgspecError:
        return {}
    except QueryFailed as error:
        if error.http_status in (0, 401):
            raise
        return {}
