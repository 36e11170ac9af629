"""How many nodes of one kind a role takes, by arithmetic over the requests of a load. Pure.

```
 prefill  each prompt waits for the first free node; its work is what no prompt before had
 decode   the batch is arrivals times the time of an answer, which grows with the batch
```

Each role is sized alone, so the cheapest nodes of both make the cheapest cluster. Left out: a cache that
forgets, short prompts that decode computes itself, uneven choices of the router, failures.
"""

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tandem.plan.load import Load
from tandem.plan.nodes import NodeKind

Floats = npt.NDArray[np.float64]

# A queue before nodes that are busier than this does not get shorter within a load's time.
MOST_BUSY = 0.9
# Router, messages between nodes, and what a loop adds to a first token.
OVERHEAD_S = 0.005
# Of a pool: last pages are half full, and answers grow.
POOL_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Times that a percentile must not exceed; None: any time will do.

    Attributes:
        ttft_s: To the first token.
        itl_s: Between two tokens.
    """

    ttft_s: float | None
    itl_s: float | None
    percentile: float = 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Nodes of one kind in one role.

    Attributes:
        num_nodes: 0: no number of them reaches the goal.
        reason: What takes so many, or why none is enough.
        busy: Prefill: share of the time that nodes compute or send. Decode: the mean batch, as a share of
            the largest that the goal and the pool allow.
        median_s, percentile_s: Prefill: time to the first token. Decode: time between two tokens.
    """

    kind: NodeKind
    reason: str
    num_nodes: int = 0
    busy: float = 0.0
    median_s: float = 0.0
    percentile_s: float = 0.0

    @property
    def cost(self) -> float:
        """Of all these nodes; infinite where they do not reach the goal."""
        return self.num_nodes * self.kind.cost or math.inf


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def size_prefill(kind: NodeKind, load: Load, goals: Goals) -> Size:
    """Return how many prefill nodes reach the goal for the first token."""
    pairs = zip(load.prompts.tolist(), load.new.tolist(), strict=True)
    compute_s = np.array([_prompt_s(kind, *each) for each in pairs])
    link_s = load.new * kind.figures.kv_bytes_per_token / kind.link_bytes_per_s
    # Layers are pushed while later ones are computed: a first token waits for the last one's push.
    idle_s = compute_s + OVERHEAD_S + link_s / kind.figures.num_layers
    goal_s = math.inf if goals.ttft_s is None else goals.ttft_s
    if (least_s := _percentile(idle_s, goals.percentile)) > goal_s:
        return _too_slow(kind, f"a first token takes {least_s:.3g} s on an idle node", goal_s)
    service_s = np.maximum(compute_s, link_s)
    reason = "sending KV" if link_s.sum() > compute_s.sum() else "computing prompts"
    work = float(service_s.sum()) / load.lasts_s
    num_nodes = _least_nodes(work)
    while True:
        ttfts_s = idle_s + _waits_s(load.arrivals_s, service_s, num_nodes)
        if (ttft_s := _percentile(ttfts_s, goals.percentile)) <= goal_s:
            break
        num_nodes += 1 + num_nodes // 50  # each try goes through all requests
        reason = "the TTFT goal"
    return Size(
        kind=kind,
        reason=reason,
        num_nodes=num_nodes,
        busy=work / num_nodes,
        median_s=_percentile(ttfts_s, 50),
        percentile_s=ttft_s,
    )


def _prompt_s(kind: NodeKind, num_prompt: int, num_new: int) -> float:
    """Return the seconds that a prompt takes, chunk by chunk, in forwards of its own."""
    times, chunk = kind.profile.prefill, kind.figures.chunked_prefill_size
    starts = range(num_prompt - num_new, num_prompt, chunk)
    return sum(times.forward_s(min(chunk, num_prompt - start), start) for start in starts)


def _waits_s(arrivals_s: Floats, service_s: Floats, num_nodes: int) -> Floats:
    """Return how long each prompt waits in one queue before so many nodes."""
    free_s = [0.0] * num_nodes
    waits_s = []
    for arrival_s, each_s in zip(arrivals_s.tolist(), service_s.tolist(), strict=True):
        begin_s = max(free_s[0], arrival_s)
        heapq.heapreplace(free_s, begin_s + each_s)
        waits_s.append(begin_s - arrival_s)
    return np.array(waits_s)


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def size_decode(kind: NodeKind, load: Load, goals: Goals) -> Size:
    """Return how many decode nodes reach the goal between tokens, and hold the answers."""
    num_output = int(load.outputs.sum())
    # By token, not by request: long answers are in the batch for longer.
    context = float((load.outputs * (load.prompts + load.outputs / 2)).sum()) / num_output
    goal_s = math.inf if goals.itl_s is None else goals.itl_s
    base_s, each_s = _step(kind, context)
    if base_s + each_s > goal_s:
        what = f"a step takes {1000 * (base_s + each_s):.3g} ms for a single answer"
        return _too_slow(kind, what, goal_s)
    most, reason = min(
        (max(POOL_SHARE * kind.figures.num_tokens / context, 1.0), "the KV pool"),
        (float(kind.figures.max_running_requests), "--max-running-requests"),
        ((goal_s - base_s) / each_s, "the ITL goal"),
    )
    tokens_per_s = num_output / load.lasts_s
    num_nodes = _least_nodes(tokens_per_s * each_s)
    while True:
        # A batch b whose steps take base + b each generates b / (base + b each) tokens a second.
        rate = tokens_per_s / num_nodes
        batch = rate * base_s / (1 - rate * each_s)
        peak = batch + _deviations(goals.percentile) * math.sqrt(batch)  # arrivals are random
        if peak <= most:
            break
        num_nodes += 1
    return Size(
        kind=kind,
        reason=reason,
        num_nodes=num_nodes,
        busy=batch / most,
        median_s=base_s + max(batch, 1) * each_s,
        percentile_s=base_s + max(peak, 1) * each_s,
    )


def _step(kind: NodeKind, context: float) -> tuple[float, float]:
    """Return the seconds of a step of no answers, and those that each answer adds."""
    times, figures = kind.profile.decode, kind.figures
    # A loop that overlaps prepares the next step meanwhile.
    host_ms = 0.0 if figures.is_overlapped else figures.host_step_ms
    each_ms = times.per_request_ms + times.per_context_token_ms * context
    # No profile has steps that take no time; one of zeros is divided by here.
    return (times.base_ms + host_ms) / 1000, max(each_ms / 1000, 1e-9)


def _deviations(percentile: float) -> float:
    """Return how many standard deviations above the mean a percentile lies."""
    return NormalDist().inv_cdf(min(percentile / 100, 0.9999))


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def _least_nodes(work: float) -> int:
    return max(math.ceil(work / MOST_BUSY), 1)


def _too_slow(kind: NodeKind, what: str, goal_s: float) -> Size:
    goal = f"{what}, over the goal of {1000 * goal_s:g} ms: take a faster kind, such as a larger tp"
    return Size(kind=kind, reason=goal)


def _percentile(values: Floats, percentile: float) -> float:
    return float(np.percentile(values, percentile, method="higher"))
