"""Calculates how many nodes of one kind a role requires for the requests of a load. Pure.

```
 prefill  each prompt waits for the first free node, which computes the tokens that no earlier prompt had
 decode   batch = arrival rate x answer time, and the answer time grows with the batch
```

Each role is sized alone, so the cheapest nodes of both roles make the cheapest cluster. Not modelled: cache
evictions, short prompts that decode computes itself, uneven routing, failures.
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

# The queue of nodes busier than this does not get shorter within a load's duration.
MOST_BUSY = 0.9
# Added to a first token by the router, messages between nodes, and the engine's loop.
OVERHEAD_S = 0.005
# Usable share of a pool: last pages are half full, and answers grow.
POOL_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Latency limits at a percentile; None: no limit.

    Attributes:
        ttft_s: The time to the first token.
        itl_s: The time between two tokens.
    """

    ttft_s: float | None
    itl_s: float | None
    percentile: float = 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of nodes of one kind in one role.

    Attributes:
        num_nodes: 0 if no number of nodes reaches the goal.
        reason: The bottleneck, or the reason that no number of nodes is enough.
        busy: Prefill: the share of time that nodes compute or send. Decode: the mean batch, as a share of
            the largest batch that the goal, the pool and the node's limit allow.
        median_s, percentile_s: Prefill: the time to the first token. Decode: the time between two tokens.
    """

    kind: NodeKind
    reason: str
    num_nodes: int = 0
    busy: float = 0.0
    median_s: float = 0.0
    percentile_s: float = 0.0

    @property
    def cost(self) -> float:
        """The cost of all nodes; infinite if no number of nodes reaches the goal."""
        return self.num_nodes * self.kind.cost or math.inf


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def size_prefill(kind: NodeKind, load: Load, goals: Goals) -> Size:
    """Return how many prefill nodes reach the TTFT goal."""
    pairs = zip(load.prompts.tolist(), load.new.tolist(), strict=True)
    compute_s = np.array([_prompt_s(kind, *each) for each in pairs])
    link_s = load.new * kind.figures.kv_bytes_per_token / kind.link_bytes_per_s
    # Layers are pushed while later layers are computed: a first token waits only for the last layer's push.
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
        num_nodes += 1 + num_nodes // 50  # large steps: each try simulates all requests
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
    """Return the compute seconds of a prompt, with a separate forward for each chunk."""
    times, chunk = kind.profile.prefill, kind.figures.chunked_prefill_size
    starts = range(num_prompt - num_new, num_prompt, chunk)
    return sum(times.forward_s(min(chunk, num_prompt - start), start) for start in starts)


def _waits_s(arrivals_s: Floats, service_s: Floats, num_nodes: int) -> Floats:
    """Return the seconds that each prompt waits in the one queue of all nodes."""
    free_s = [0.0] * num_nodes
    waits_s = []
    for arrival_s, each_s in zip(arrivals_s.tolist(), service_s.tolist(), strict=True):
        begin_s = max(free_s[0], arrival_s)
        heapq.heapreplace(free_s, begin_s + each_s)
        waits_s.append(begin_s - arrival_s)
    return np.array(waits_s)


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def size_decode(kind: NodeKind, load: Load, goals: Goals) -> Size:
    """Return how many decode nodes reach the ITL goal and have enough KV memory."""
    num_output = int(load.outputs.sum())
    # The mean over tokens, not requests: long answers stay in the batch for longer.
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
        # A batch of b answers has steps of base + b * each seconds: b / (base + b * each) tokens per second.
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
    """Return the base seconds of a step, and the seconds that each answer adds."""
    times, figures = kind.profile.decode, kind.figures
    # An overlapped loop prepares the next step during the current step.
    host_ms = 0.0 if figures.is_overlapped else figures.host_step_ms
    each_ms = times.per_request_ms + times.per_context_token_ms * context
    # The lower bound prevents a division by zero for a profile of zeros.
    return (times.base_ms + host_ms) / 1000, max(each_ms / 1000, 1e-9)


def _deviations(percentile: float) -> float:
    """Return how many standard deviations a percentile lies above the mean."""
    return NormalDist().inv_cdf(min(percentile / 100, 0.9999))


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def _least_nodes(work: float) -> int:
    return max(math.ceil(work / MOST_BUSY), 1)


def _too_slow(kind: NodeKind, what: str, goal_s: float) -> Size:
    goal = f"{what}, over the goal of {1000 * goal_s:g} ms: take a faster kind, such as a larger tp"
    return Size(kind=kind, reason=goal)


def _percentile(values: Floats, percentile: float) -> float:
    return float(np.percentile(values, percentile, method="higher"))
