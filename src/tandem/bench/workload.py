"""The requests of a load: when each is due, and its prompt. Pure.

Prompts are random token ids, the same for the same seed. Where an API takes no ids they are random words, of
the most common English ones, most of which are one token to most tokenizers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.bench.arguments import BenchConfig, Load
from tandem.bench.arrivals import arrival_times
from tandem.bench.trace import BLOCK_TOKENS, TraceRow, due_times

# Requests of a closed loop for each stream, by default: the first ones meet an idle server, the last
# ones an emptying one.
REQUESTS_PER_STREAM = 8
OPEN_REQUESTS = 200

WORDS = (
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "you",
        "that",
        "it",
        "he",
        "was",
        "for",
        "on",
        "are",
        "as",
    ),
    *(
        "with",
        "his",
        "they",
        "at",
        "be",
        "this",
        "have",
        "from",
        "or",
        "one",
        "had",
        "by",
        "word",
        "but",
    ),
    *(
        "not",
        "what",
        "all",
        "were",
        "we",
        "when",
        "your",
        "can",
        "said",
        "there",
        "use",
        "an",
        "each",
    ),
)

# Streams of random numbers that never meet, whatever the index in them.
_UNIQUE, _PREFIX, _BLOCK = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        index: Unique in a run: the prompt is made from it.
        due_s: When to send it, after the start of the load.
        prefix: Number of the shared prefix with which the prompt begins.
        block_ids: Of a trace: equal ids stand for equal blocks of the prompt.
    """

    index: int
    input_tokens: int
    output_tokens: int
    due_s: float = 0.0
    prefix: int = 0
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """What prompts are made of; ids are below `vocab_size`."""

    vocab_size: int
    seed: int = 0
    shared_prefix_tokens: int = 0

    def ids(self, job: Job) -> list[int]:
        """Return the prompt: `job.input_tokens` ids, after the shared prefix."""
        shared = self.shared_prefix_tokens
        found = self._draw(shared, _PREFIX, job.prefix) if shared and not job.block_ids else []
        for block_id in job.block_ids[: -(-job.input_tokens // BLOCK_TOKENS)]:
            found += self._draw(BLOCK_TOKENS, _BLOCK, block_id)
        if job.block_ids:
            found = found[: job.input_tokens]
            return found + self._draw(job.input_tokens - len(found), _UNIQUE, job.index)
        return found + self._draw(job.input_tokens, _UNIQUE, job.index)

    def text(self, job: Job) -> str:
        """Return the prompt as words, one for each id."""
        return " ".join(WORDS[token_id % len(WORDS)] for token_id in self.ids(job))

    def _draw(self, count: int, *stream: int) -> list[int]:
        rng = np.random.default_rng([self.seed, *stream])
        drawn: list[int] = rng.integers(0, self.vocab_size, count).tolist()
        return drawn


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
                block_ids=tuple(row.hash_ids),
            )
            for i, (row, due_s) in enumerate(
                zip(rows, due_times(list(rows), config.trace_speed), strict=True)
            )
        ]
    default = OPEN_REQUESTS if load.rate else load.concurrency * REQUESTS_PER_STREAM
    count = config.num_prompts or default
    due = arrival_times(load.rate or float("inf"), config.burstiness, count, config.seed)
    rng = np.random.default_rng([config.seed, first_index, count])
    inputs = _lengths(rng, config.input_tokens, config.range_ratio, count)
    outputs = _lengths(rng, config.output_tokens, config.range_ratio, count)
    return [
        Job(
            index=first_index + i,
            input_tokens=inputs[i],
            output_tokens=outputs[i],
            due_s=due[i],
            prefix=i % config.num_prefixes,
        )
        for i in range(count)
    ]


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    """Draw whole numbers uniformly from mean * (1 - ratio) to mean * (1 + ratio), at least 1."""
    low, high = max(round(mean * (1 - ratio)), 1), max(round(mean * (1 + ratio)), 1)
    drawn: list[int] = rng.integers(low, high + 1, count).tolist()
    return drawn
