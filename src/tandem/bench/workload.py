"""The requests of a load: the due time and the prompt of each.

Prompts are random token ids; equal seeds give equal prompts. For APIs without token ids, prompts are random
common English words: most tokenizers encode most of these as one token.

A trace is in Mooncake's format, one JSON object per line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds. A prompt is cut into blocks of 512 tokens. Equal `hash_ids` stand for equal
blocks, which a prefix cache can reuse.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tandem.bench.config import BenchConfig, Load
from tandem.wire.errors import ConfigInvalid

BLOCK_TOKENS = 512
# Default number of requests per stream of a closed loop. There are several, because the first requests meet
# an idle server and the last ones an emptying server.
REQUESTS_PER_STREAM = 8
OPEN_REQUESTS = 200
COMMON = "the of and to in is you that it he was for on are as with his they at be this have from or one had by"
WORDS = COMMON.split()
# Seeds that keep the random streams independent, whatever index follows.
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
        index: Unique in a run; seeds the prompt.
        due_s: The time to send the request, in seconds after the start of the load.
        block_ids: The `hash_ids` of a trace; empty without a trace.
    """

    index: int
    input_tokens: int
    output_tokens: int
    due_s: float = 0.0
    block_ids: list[int] = []


def prompt_ids(config: BenchConfig, job: Job) -> list[int]:
    """Return the shared prefix, if any, and then `job.input_tokens` ids; all are below `config.vocab_size`."""

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
    """Return the prompt as words, one word per id."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in prompt_ids(config, job))


def make_jobs(
    config: BenchConfig, load: Load, first_index: int, rows: Sequence[TraceRow] = ()
) -> list[Job]:
    """Return the requests of one load.

    Args:
        first_index: The first job's index. Loads of a run must not share indices, or prompts repeat.
        rows: The rows of the trace, if the load replays one.
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
    """Draw integers uniformly from mean * (1 - ratio) to mean * (1 + ratio), at least 1."""
    low, high = max(round(mean * (1 - ratio)), 1), max(round(mean * (1 + ratio)), 1)
    drawn: list[int] = rng.integers(low, high + 1, count).tolist()
    return drawn


def arrival_times(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """Return `count` arrival times in seconds, ascending from 0.

    Gaps follow a gamma distribution with mean 1 / rate and shape `burstiness`, as in vLLM's load client.
    A burstiness of 1 is a Poisson process; lower values are burstier, higher values more even.

    Args:
        rate: Requests per second; infinity: all at once.
        burstiness: A positive number; infinity: equal gaps.
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
    """Return the rows of a trace, sorted by timestamp.

    Args:
        limit: The maximum number of rows, from the start of the file; 0: all.

    Raises:
        ConfigInvalid: The file cannot be read, a line is invalid, or the file has no requests.
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
    """Return the due time of each row, in seconds after the first row, at `speed` times the recorded speed."""
    return [(row.timestamp - rows[0].timestamp) / 1000 / speed for row in rows]
