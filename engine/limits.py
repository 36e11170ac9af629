"""What no honest edge worker asks for, and no column of numbers could hold. Pure."""

import math
from collections.abc import Iterable

from tandem.wire.generation import GenerateRequest, SamplingParams

INT64 = range(-(2**63), 2**63)
FLOAT32_MAX = 3.4028234e38


def absurdity(request: GenerateRequest) -> str:
    """Return what of a request is out of all bounds, or an empty string.

    An edge worker checks what clients send it, and says more; a peer is asked here whatever it sent.
    """
    sampling, wanted = request.sampling, request.logprobs
    integers = [
        ("max_new_tokens", sampling.max_new_tokens, INT64),
        ("min_new_tokens", sampling.min_new_tokens, INT64),
        ("top_k", sampling.top_k, INT64),
        ("priority", request.priority, INT64),
        ("num_prior_tokens", request.num_prior_tokens, range(len(request.prompt_ids) + 1)),
        *(("stop_token_ids", id_, range(2**31)) for id_ in sampling.stop_token_ids),
    ]
    if wanted is not None:
        integers += [
            ("num_top", wanted.num_top, range(1 << 10)),
            ("prompt_start", wanted.prompt_start, INT64),
        ]
    for name, value, bounds in integers:
        if value not in bounds:
            return f"{name} is {value}: it must be in {bounds[0]} ... {bounds[-1]}"
    for name, number in _floats(sampling):
        if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
            return f"{name} is {number}: it must be finite, in 32 bits"
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        return "temperature must not be negative, and repetition_penalty must be positive"
    return ""


def _floats(sampling: SamplingParams) -> Iterable[tuple[str, float]]:
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ):
        yield name, getattr(sampling, name)
    for bias in sampling.logit_bias.values():
        yield "logit_bias", bias
