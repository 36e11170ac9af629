"""The requests of a load: when each is due, and its prompt.

Prompts are random token ids, the same for the same seed. Where an API takes no ids they are random words, of
the most common English ones, most of which are one token to most tokenizers.

A trace is in Mooncake's format, a JSON object a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds. A prompt is cut into blocks of 512 tokens, and equal ids stand for equal
blocks, which a prefix cache may find again.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tandem.bench.config import BenchConfig, Load
from tandem.wire.errors import ConfigInvalid

BLOCK_TOKENS = 512
# Requests of a closed loop for each stream, by default: the first ones meet an idle server, the last
# ones an emptying one.
REQUESTS_PER_STREAM = 8
OPEN_REQUESTS = 200
COMMON = "the of and to in is you that it he was for on are as with his they at be this have from or one had by"
WORDS = COMMON.split()
# Streams of random numbers that never meet, whatever the index in them.
_UNIQUE, _PREFIX, _BLOCK = 0, 1, 2


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        index: Unique in a run: the prompt is made from it.
        due_s: When to send it, after the start of the load.
        block_ids: Of a trace: equal ids stand for equal blocks of the prompt.
    """

    index: int
    input_tokens: int
    output_tokens: int
    due_s: float = 0.0
    block_ids: list[int] = []


def prompt_ids(config: BenchConfig, job: Job) -> list[int]:
    """Return `job.input_tokens` ids below `config.vocab_size`, after the shared prefix."""

    def draw(count: int, *stream: int) -> list[int]:
        rng = np.random.default_rng([config.seed, *stream])
        drawn: list[int] = rng.integers(0, config.vocab_size, count).tolist()
        return drawn

    found: list[int] = []
    for block_id in job.block_ids[: -(-job.input_tokens // BLOCK_TOKENS)]:
        found += draw(BLOCK_TOKENS, _BLOCK, block_id)
    found = found[: job.input_tokens]
    own = draw(job.input_tokens - len(found), _UNIQUE, job.index)
    if config.shared_prefix_tokens and not job.block_ids:
        found = draw(config.shared_prefix_tokens, _PREFIX)
    return found + own


def prompt_text(config: BenchConfig, job: Job) -> str:
    """Return the prompt as words, one for each id."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in prompt_ids(config, job))


def make_jobs(
    config: BenchConfig, load: Load, first_index: int, rows: Sequence[TraceRow] = ()
) -> list[Job]:
    """Return the requests of one load.

    Args:
        first_index: Of the jobs; two loads of a run share none, or their prompts repeat.
        rows: Of the trace, if the load replays one.
    """
    if rows:
        return [
            Job(
                index=first_index + i,
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                due_s=due_s,
                block_ids=row.hash_ids,
            )
            for i, (row, due_s) in enumerate(
                zip(rows, due_times(rows, config.trace_speed), strict=True)
            )
        ]
    default = OPEN_REQUESTS if load.rate else load.concurrency * REQUESTS_PER_STREAM
    count = config.num_prompts or default
    rng = np.random.default_rng([config.seed, first_index, count])
    columns = (
        _lengths(rng, config.input_tokens, config.range_ratio, count),
        _lengths(rng, config.output_tokens, config.range_ratio, count),
        arrival_times(load.rate or math.inf, config.burstiness, count, config.seed),
    )
    return [
        Job(index=first_index + i, input_tokens=num_in, output_tokens=num_out, due_s=due_s)
        for i, (num_in, num_out, due_s) in enumerate(zip(*columns, strict=True))
    ]


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    """Draw whole numbers uniformly from mean * (1 - ratio) to mean * (1 + ratio), at least 1."""
    low, high = max(round(mean * (1 - ratio)), 1), max(round(mean * (1 + ratio)), 1)
    drawn: list[int] = rng.integers(low, high + 1, count).tolist()
    return drawn


def arrival_times(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """Return `count` times in seconds, the first at 0, in order.

    The time between two is drawn from a gamma distribution of mean 1 / rate and shape `burstiness`,
    as vLLM's load client draws it: 1 is a Poisson process, less comes in bursts, more is more even.

    Args:
        rate: Requests a second; infinity sends all at once.
        burstiness: Positive; infinity sends at equal distances.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [index / rate for index in range(count)]
    rng = np.random.default_rng([seed, count])
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), max(count - 1, 0))
    times: list[float] = np.concatenate([[0.0], np.cumsum(gaps)])[:count].tolist()
    return times


def read_trace(path: str, limit: int = 0) -> list[TraceRow]:
    """Return the rows of a trace in the order of their time.

    Args:
        limit: Maximum number of rows, from the first; 0: all.

    Raises:
        ConfigInvalid: The file cannot be read, a line is no request, or there is none.
    """
    rows: list[TraceRow] = []
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip() and (not limit or len(rows) < limit):
                    rows.append(_row(line, f"--trace {path}, line {number}"))
    except OSError as error:
        raise ConfigInvalid(f"--trace {path}: {error.strerror}") from error
    if not rows:
        raise ConfigInvalid(f"--trace {path}: has no requests")
    return sorted(rows, key=lambda row: row.timestamp)


def _row(line: bytes, where: str) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{where}: {error}") from error
    if row.input_length < 1 or row.output_length < 1 or min(row.hash_ids, default=0) < 0:
        raise ConfigInvalid(f"{where}: lengths are at least 1 and hash ids not negative")
    return row


def due_times(rows: Sequence[TraceRow], speed: float) -> list[float]:
    """Return when each row is due, in seconds after the first, `speed` times as fast as it was."""
    return [(row.timestamp - rows[0].timestamp) / 1000 / speed for row in rows]
