"""How many nodes a load takes at the least, by arithmetic: where a search begins, and below which it does not look.

A bound counts work alone: no line, no uneven moment, a cache that never forgets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.plan.goals import Goals
from tandem.plan.seam import NodeKind, PlannedRequest
from tandem.plan.workload import uncached

# Decode computes short prompts itself (`--local-prefill-threshold`): they are no work of prefill's.
_LOCAL_TOKENS = 128
# A bound is by averages: what the load has in it by chance may be a little less.
_SLACK = 0.95


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one kind of node in one role.

    Attributes:
        least: Nodes; 0 where no number of them would do.
        reason: What asks for so many, or why none would do.
    """

    least: int
    reason: str


def prefill_bound(
    kind: NodeKind, requests: Sequence[PlannedRequest], goals: Goals, lasts_s: float
) -> Bound:
    """Return how many prefills there have to be."""
    new = uncached(requests)
    times = kind.profile.prefill
    alone_s = sorted(_chunks_s(kind, r.num_prompt, n) for r, n in zip(requests, new, strict=True))
    at_goal_s = alone_s[math.ceil(len(alone_s) * goals.percentile / 100) - 1]
    if goals.ttft_s is not None and at_goal_s > goals.ttft_s:
        return Bound(
            0,
            f"{kind.name} computes the prompt of percentile {goals.percentile:g} in {at_goal_s:.3g} s "
            f"when it does nothing else, and the first token is asked for within {goals.ttft_s:g} s",
        )
    work_s = sum(
        times.forward_s(n, r.num_prompt - n) - times.forward_s(1, 0)
        for r, n in zip(requests, new, strict=True)
        if n > _LOCAL_TOKENS
    )
    sent = sum(n for n in new if n > _LOCAL_TOKENS) * kind.kv_bytes_per_token
    by_work, by_link = work_s / lasts_s, sent / kind.link_bytes_per_s / lasts_s
    reason = "computing prompts" if by_work >= by_link else "sending KV"
    return Bound(max(math.ceil(_SLACK * max(by_work, by_link)), 1), reason)


def _chunks_s(kind: NodeKind, num_prompt: int, num_new: int) -> float:
    """Return how long a prompt takes alone, chunk by chunk."""
    done, total_s = num_prompt - num_new, 0.0
    while done < num_prompt:
        count = min(kind.chunked_prefill_size, num_prompt - done)
        total_s += kind.profile.prefill.forward_s(count, done)
        done += count
    return total_s


def decode_bound(
    kind: NodeKind, requests: Sequence[PlannedRequest], goals: Goals, lasts_s: float
) -> Bound:
    """Return how many decodes there have to be."""
    times = kind.profile.decode
    num_output = sum(request.num_output for request in requests)
    # By token, not by request: long answers are in the batch for longer.
    context = sum(r.num_output * (r.num_prompt + r.num_output / 2) for r in requests) / num_output
    if goals.itl_s is not None and (alone_s := times.forward_s(1, int(context))) > goals.itl_s:
        return Bound(
            0,
            f"a step of {kind.name} for a single answer takes {1000 * alone_s:.3g} ms, and "
            f"{1000 * goals.itl_s:g} ms between tokens are asked for",
        )
    batch = min(kind.max_running, kind.num_tokens / context)
    reason = "pages" if batch < kind.max_running else "the size of a batch"
    if goals.itl_s is not None:
        each_s = (times.per_request_ms + times.per_context_token_ms * context) / 1000
        by_pace = (goals.itl_s - times.base_ms / 1000) / each_s if each_s else math.inf
        if by_pace < batch:
            batch, reason = by_pace, "the time between tokens"
    batch = max(batch, 1.0)
    step_s = max(
        times.forward_s(1, 0)
        + (batch * (times.per_request_ms + times.per_context_token_ms * context)) / 1000,
        1e-6,
    )
    return Bound(max(math.ceil(_SLACK * num_output / lasts_s * step_s / batch), 1), reason)
