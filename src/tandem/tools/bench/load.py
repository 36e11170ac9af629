"""The requests of a load: when each is due, and its body. Prompts are random token ids; equal seeds draw equal ids."""

import msgspec
import numpy as np

from tandem.tools.bench.config import BenchConfig

# Requests per stream of a closed loop. There are several, because the first requests meet an idle server and the
# last ones an emptying server.
REQUESTS_PER_STREAM = 8
OPEN_REQUESTS = 200


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        index: Unique in a run; seeds the prompt.
        due_s: The time to send the request, in seconds after the start of the load.
    """

    index: int
    due_s: float = 0.0


WARM_UP = PlannedRequest(0)


def planned(config: BenchConfig) -> list[PlannedRequest]:
    """Return the requests of the load, in the order of their due times."""
    default = OPEN_REQUESTS if config.request_rate else config.concurrency * REQUESTS_PER_STREAM
    times = arrival_times(config.request_rate, config.num_prompts or default, config.seed)
    return [PlannedRequest(index, due_s) for index, due_s in enumerate(times, WARM_UP.index + 1)]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Return `count` arrival times of a Poisson process in seconds, ascending from 0.

    Args:
        rate: Requests per second; 0: all at once.
    """
    if not rate:
        return [0.0] * count
    gaps = np.random.default_rng([seed, count]).exponential(1 / rate, count)
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times


def prompt_ids(config: BenchConfig, request: PlannedRequest) -> list[int]:
    """Return `config.input_tokens` random ids below `config.vocab_size`."""
    rng = np.random.default_rng([config.seed, request.index])
    ids: list[int] = rng.integers(0, config.vocab_size, config.input_tokens).tolist()
    return ids


def body_of(config: BenchConfig, request: PlannedRequest) -> bytes:
    """Return the body of a request, which asks for exactly `config.output_tokens` tokens."""
    ids, length = prompt_ids(config, request), config.output_tokens
    if config.api == "native":
        sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        return msgspec.json.encode({"input_ids": ids, "sampling_params": sampling, "stream": True})
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": config.model, "prompt": ids, "max_tokens": length, "temperature": 0}
    return msgspec.json.encode(
        {**body, "ignore_eos": True, "stream": True, "stream_options": usage}
    )
