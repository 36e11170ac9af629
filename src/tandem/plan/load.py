"""The load of a plan, replayed from a trace or drawn at random. Pure: equal flags give equal loads."""

import math
from collections.abc import Sequence

import numpy as np

from tandem.bench.workload import BLOCK_TOKENS, TraceRow, arrival_times, due_times
from tandem.wire.errors import ConfigInvalid

# 1,000 requests leave ten beyond the 99th percentile; most answers take less than 30 s.
LEAST_REQUESTS, LEAST_S = 1000, 30.0
# The 99th percentile of the standard normal distribution.
_Z99 = 2.3263478740408408
LENGTH_EXAMPLES = "4000, uniform:500:4000, or lognormal:1200:8000 (median and 99th percentile)"


def draw_lengths(text: str, flag: str, rng: np.random.Generator, count: int) -> list[int]:
    """Draw token counts from the distribution that a flag describes.

    Raises:
        ConfigInvalid: The text is no valid distribution.
    """
    kind, *numbers = text.split(":") if ":" in text else ("uniform", text, text)
    values = [int(number) for number in numbers if number.isdecimal()]
    is_whole = len(values) == len(numbers) == 2 and 0 < values[0] <= values[1]
    if kind not in ("uniform", "lognormal") or not is_whole:
        raise ConfigInvalid(
            f"{flag} {text}: give tokens such as {LENGTH_EXAMPLES}", topic="plan#the-load"
        )
    low, high = values
    if kind == "uniform":
        drawn: list[int] = rng.integers(low, high + 1, count).tolist()
        return drawn
    sigma = math.log(high / low) / _Z99
    return [max(round(each), 1) for each in rng.lognormal(math.log(low), sigma, count).tolist()]


def draw(prompt: str, output: str, *, rate: float, system_tokens: int) -> list[TraceRow]:
    """Return requests that arrive as a Poisson process.

    Args:
        prompt: The distribution of prompt tokens, without the system prompt.
        output: The distribution of answer tokens.
        rate: Requests per second.
        system_tokens: The tokens at the start of every prompt. Prompts share whole blocks of these tokens.

    Raises:
        ConfigInvalid: A distribution is invalid.
    """
    count = max(LEAST_REQUESTS, round(rate * LEAST_S))
    rng = np.random.default_rng(0)
    lengths = (
        draw_lengths(prompt, "--prompt", rng, count),
        draw_lengths(output, "--output", rng, count),
    )
    shared = list(range(system_tokens // BLOCK_TOKENS))
    return [
        TraceRow(1000 * arrival_s, system_tokens + num_prompt, num_output, shared)
        for arrival_s, num_prompt, num_output in zip(
            arrival_times(rate, 1.0, count, 0), *lengths, strict=True
        )
    ]


def replay(rows: Sequence[TraceRow], rate: float) -> list[TraceRow]:
    """Return the requests of a trace, the first at time 0.

    Args:
        rate: The average requests per second, reached by scaling the times; 0: as recorded.
    """
    lasts_s = (rows[-1].timestamp - rows[0].timestamp) / 1000
    speed = rate * lasts_s / len(rows) if rate and lasts_s else 1.0
    return [
        TraceRow(1000 * due_s, row.input_length, row.output_length, row.hash_ids)
        for row, due_s in zip(rows, due_times(list(rows), speed), strict=True)
    ]


class Load:
    """Requests that fit a node, in order of arrival.

    Args:
        most_tokens: The limit of a request's prompt plus answer. Longer requests are left out and counted.

    Attributes:
        arrivals_s, prompts, outputs: Arrival time, prompt tokens and answer tokens. Shape (num_requests,).
        new: The tokens of each prompt that an infinite prefix cache leaves to compute, at least 1.

    Raises:
        ConfigInvalid: No request fits.
    """

    def __init__(self, rows: Sequence[TraceRow], most_tokens: int) -> None:
        self.rows = [row for row in rows if row.input_length + row.output_length <= most_tokens]
        self.num_too_long = len(rows) - len(self.rows)
        if not self.rows:
            raise ConfigInvalid(
                f"no request of the load fits a node, which holds {most_tokens:,} tokens of one"
            )
        self.arrivals_s = np.array([row.timestamp for row in self.rows]) / 1000
        self.prompts = np.array([row.input_length for row in self.rows])
        self.outputs = np.array([row.output_length for row in self.rows])
        self.new = np.array(_new_tokens(self.rows))
        # At least 1 s, so that a load that arrives at one moment has a finite rate.
        self.lasts_s = max(float(self.arrivals_s[-1]), 1.0)
        self.rate = len(self.rows) / self.lasts_s


def _new_tokens(rows: Sequence[TraceRow]) -> list[int]:
    seen: set[int] = set()
    found = []
    for row in rows:
        # The last id of a row may stand for a partial block.
        blocks = row.hash_ids[: row.input_length // BLOCK_TOKENS]
        known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        found.append(max(row.input_length - known * BLOCK_TOKENS, 1))
    return found
