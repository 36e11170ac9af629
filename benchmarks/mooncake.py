"""Requests in the shape of Mooncake's conversation trace: read from its file, or made up from a seed.

The trace is that of "Mooncake: Trading More Storage for Less Computation" (Qin et al., FAST '25): an hour
of 12,031 requests, about 12,000 prompt and 340 answer tokens each on average, prompts as numbers of blocks
of 512 tokens, of which 40 % were seen before. What is made up here is synthetic. It has these figures and
what one sees in the file: all prompts begin with the same block, nearly half of the requests go on with a
conversation after minutes, lengths span three orders of magnitude.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK_TOKENS = 512
# The file's clock ticks every 3 s; requests of one tick are spread over it.
TICK_S = 3.0
MAX_PROMPT_TOKENS = 126_000
GOES_ON = 0.45
FIRST_MEDIAN, FIRST_SIGMA = 4_600, 1.25
TURN_MEDIAN, TURN_SIGMA = 1_700, 1.2
PAUSE_MEDIAN_S, PAUSE_SIGMA = 120, 1.1
# A fifth of the answers are a few words.
SHORT_SHARE, SHORT_TOKENS, LONG_TOKENS = 0.2, 30, 420


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        blocks: Numbers of its whole blocks; equal numbers mean equal prefixes.
        session: Which conversation it belongs to.
    """

    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...]
    session: int


def made_up(seed: int, count: int, duration_s: float, shortening: float) -> list[TraceRequest]:
    """Return requests of a cluster that has served for long, by arrival.

    Args:
        count: About how many.
        shortening: What the pauses within conversations are divided by.
    """
    rng = random.Random(seed)
    # Conversations begin before the first request that counts, so that some of it are later turns.
    lead_s = 3 * PAUSE_MEDIAN_S / shortening
    num_sessions = round(count * (1 - GOES_ON) * (duration_s + lead_s) / duration_s)
    next_block, requests = 1, list[TraceRequest]()
    for session in range(num_sessions):
        at_s, blocks = rng.uniform(-lead_s, duration_s), [0]
        num_prompt = _lognormal(rng, FIRST_MEDIAN, FIRST_SIGMA)
        while at_s < duration_s:
            num_prompt = min(num_prompt, MAX_PROMPT_TOKENS)
            num_new = max(0, num_prompt // BLOCK_TOKENS - len(blocks))
            blocks += range(next_block, next_block + num_new)
            next_block += num_new
            kept = tuple(blocks[: num_prompt // BLOCK_TOKENS])
            if at_s >= 0:
                requests.append(TraceRequest(at_s, num_prompt, _answer(rng), kept, session))
            if rng.random() > GOES_ON:
                break
            num_prompt += _lognormal(rng, TURN_MEDIAN, TURN_SIGMA)
            at_s += _lognormal(rng, PAUSE_MEDIAN_S * 1000, PAUSE_SIGMA) / 1000 / shortening
    return sorted(requests, key=lambda request: request.at_s)


def read(path: Path, duration_s: float, seed: int) -> list[TraceRequest]:
    """Return the requests of a trace file, its time stretched or squeezed to `duration_s`."""
    rng, owners = random.Random(seed), dict[int, int]()
    found: list[TraceRequest] = []
    for session, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        whole = entry["hash_ids"][: entry["input_length"] // BLOCK_TOKENS]
        # A block of its own that was seen before tells the conversation; the first is everybody's.
        known = next((owners[block] for block in reversed(whole[1:]) if block in owners), session)
        owners.update(dict.fromkeys(whole[1:], known))
        at_s = entry["timestamp"] / 1000 + rng.uniform(0, TICK_S)
        length, answer = entry["input_length"], max(1, entry["output_length"])
        found.append(TraceRequest(at_s, length, answer, tuple(whole), known))
    found.sort(key=lambda request: request.at_s)
    stretch = duration_s / (found[-1].at_s - found[0].at_s)
    return [replace(each, at_s=(each.at_s - found[0].at_s) * stretch) for each in found]


def shared_share(requests: list[TraceRequest]) -> float:
    """Return which share of prompt tokens was in an earlier prompt: what one endless cache would find."""
    seen, num_shared = set[int](), 0
    for request in requests:
        num_shared += sum(1 for _ in _leading(request.blocks, seen)) * BLOCK_TOKENS
        seen.update(request.blocks)
    return num_shared / sum(request.num_prompt for request in requests)


def _leading(blocks: tuple[int, ...], seen: set[int]) -> Iterator[int]:
    for block in blocks:
        if block not in seen:
            return
        yield block


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(median * math.exp(rng.gauss(0, sigma))))


def _answer(rng: random.Random) -> int:
    mean = SHORT_TOKENS if rng.random() < SHORT_SHARE else LONG_TOKENS
    return max(1, round(rng.gammavariate(4, mean / 4)))
