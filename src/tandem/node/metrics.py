"""The metrics of a node, from the engine process to Prometheus.

```
 engine process: Measures ── Measured, with a Pong ──▶ HTTP process: NodeCollector ── METRICS ──▶ GET /metrics
```

Each metric is declared once in `METRICS`, with its kind, name, help and the source of its value. docs/metrics.md
explains all of them. Routers balance by `NodeLoad`, which every edge worker receives five times a second and which
must stay small. Only the node's own HTTP process receives `Measured`.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from tandem.engine.scheduling.step import StepCounts
from tandem.kvtransfer.events import ReceiverTimes, SenderTimes
from tandem.node.life.life import NodeState
from tandem.telemetry.histogram import Histogram, Spread
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector
from tandem.wire.errors import TandemError
from tandem.wire.generation import Epoch
from tandem.wire.messages import Measured, NodeLoad

# Bounds in seconds, from a step with a few requests to a step that compiles something.
_STEP_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
PAGE_STATES = ("free", "cached", "held", "granted", "quarantined")
TIER_STATES = ("up", "backing_off", "full")
# Role labels for operators: a colocated node is named after its command.
ROLE_NAMES = {"colocated": "serve"}

# ── in the engine process ────────────────────────────────────────────────────────────────────────


class Measures:
    """The measurements of one engine process.

    `steps`: the engine's counts; `transfers`: the agent's times; `tier_seconds`: returns the waiting times by tier.
    """

    def __init__(
        self,
        steps: StepCounts | None = None,
        transfers: SenderTimes | ReceiverTimes | None = None,
        tier_seconds: Callable[[], Mapping[str, Spread]] = dict,
    ) -> None:
        self._steps, self._transfers = steps or StepCounts(), transfers
        self._tier_seconds = tier_seconds
        self._step_cpu, self._pass = Histogram(_STEP_SECONDS), Histogram(_STEP_SECONDS)
        self._pass_began_s = time.perf_counter()
        self._cpu_s = 0.0  # CPU seconds since the last collected forward
        self._refused: Counter[str] = Counter()
        self.num_lost_edges = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the loop thread's CPU time in a step, excluding forwards that run on the CPU.

        The time counts towards the next collected forward, because forwards can be launched one step before.
        """
        steps, started_s = self._steps, time.thread_time()
        num_before, device_s = steps.num_collected, steps.host_cpu_s
        yield
        self._cpu_s += time.thread_time() - started_s - (steps.host_cpu_s - device_s)
        if steps.num_collected > num_before:
            self._step_cpu.observe(max(0.0, self._cpu_s))
            self._cpu_s = 0.0

    def begin_pass(self, *, is_busy: bool) -> None:
        """Begin a pass of the loop; measure the previous one, unless the loop waited for work after it."""
        now = time.perf_counter()
        if is_busy:
            self._pass.observe(now - self._pass_began_s)
        self._pass_began_s = now

    def count_refused(self, error: TandemError) -> None:
        """Count a rejected request."""
        self._refused[error.code] += 1

    def report(self, epoch: Epoch) -> Measured:
        """Return all measurements, keyed by the names in `METRICS`."""
        return Measured(
            epoch=epoch,
            pid=os.getpid(),
            spreads={
                "step_cpu_seconds": self._step_cpu.spread(),
                "pass_seconds": self._pass.spread(),
                **{f"step_{name}": spread for name, spread in _spreads_of(self._steps)},
                **dict(_spreads_of(self._transfers)),
            },
            counts={
                "lost_edges": self.num_lost_edges,
                "lost_links": 0 if self._transfers is None else self._transfers.num_lost_links,
            },
            refused=dict(self._refused),
            tier_seconds=dict(self._tier_seconds()),
        )


def _spreads_of(source: object | None) -> Iterator[tuple[str, Spread]]:
    """Yield the histograms of an object with their attribute names."""
    for name, value in () if source is None else vars(source).items():
        if isinstance(value, Histogram):
            yield name, value.spread()


# ── in the HTTP process ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NodeScrape:
    """The values of a node at a scrape.

    `facts`: labels of `tandem_node_info`; `measured`: None until the engine has reported.
    """

    role: str
    state: NodeState
    facts: dict[str, str]
    load: NodeLoad
    measured: Measured | None


MetricKind = type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
Values = Iterable[tuple[tuple[str, ...], float | Spread]]


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric.

    Attributes:
        name: The name without the prefix `tandem_`.
        values: Returns the values, each with its labels except the role.
        labels: Names of those labels.
    """

    kind: MetricKind
    name: str
    help: str
    values: Callable[[NodeScrape], Values]
    labels: tuple[str, ...] = ()

    def family(self, view: NodeScrape) -> Metric:
        """Return the metric family of a scrape."""
        role = ROLE_NAMES.get(view.role, view.role)
        family = self.kind(f"tandem_{self.name}", self.help, labels=["role", *self.labels])
        for labels, value in self.values(view):
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Spread)
                family.add_metric([role, *labels], _buckets(value), value.total)
            else:
                assert not isinstance(value, Spread)
                family.add_metric([role, *labels], value)
        return family


def _buckets(spread: Spread) -> list[tuple[str, float]]:
    ends = [*(str(float(bound)) for bound in spread.bounds), "+Inf"]
    return [
        (end, float(count))
        for end, count in zip(ends, itertools.accumulate(spread.counts), strict=True)
    ]


_G, _C, _H = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily


# Fields of `NodeLoad` whose metrics have other names.
_NAMES = {
    "num_running": "requests_running",
    "num_waiting": "requests_waiting",
    "num_transferring": "requests_transferring",
    "max_running": "requests_running_limit",
    "page_size": "page_tokens",
    "ending_s": "hand_off_ending_seconds",
}


def _load(kind: MetricKind, field: str, help_text: str) -> Declared:
    """Declare a metric for a field of `NodeLoad`; -1 (not reported yet) is shown as 0."""
    name = _NAMES.get(field, field.removeprefix("num_"))
    return Declared(kind, name, help_text, lambda view: [((), max(0, getattr(view.load, field)))])


def _tier(kind: MetricKind, field: str, help_text: str) -> Declared:
    return Declared(
        kind,
        f"kv_tier_{field.removeprefix('num_')}",
        help_text,
        lambda view: [((tier.name,), getattr(tier, field)) for tier in view.load.tiers],
        ("tier",),
    )


def _spread(name: str, help_text: str) -> Declared:
    return Declared(_H, name, help_text, lambda view: _found(name, _measured(view).spreads))


def _count(name: str, help_text: str) -> Declared:
    return Declared(_C, name, help_text, lambda view: _found(name, _measured(view).counts))


def _found(name: str, values: Mapping[str, float] | Mapping[str, Spread]) -> Values:
    return [((), values[name])] if name in values else ()


def _measured(view: NodeScrape) -> Measured:
    return view.measured or Measured(epoch=Epoch(0), pid=0)


def _node_states(view: NodeScrape) -> Values:
    return [((state.value,), state is view.state) for state in NodeState]


def _pages(view: NodeScrape) -> Values:
    return [((state,), getattr(view.load, f"pages_{state}")) for state in PAGE_STATES]


def _tier_states(view: NodeScrape) -> Values:
    return [((t.name, state), state == t.state) for t in view.load.tiers for state in TIER_STATES]


def _tier_costs(view: NodeScrape) -> Values:
    # -1: not known yet
    return [((t.name,), t.token_cost) for t in view.load.tiers if t.token_cost >= 0]


def _tier_seconds(view: NodeScrape) -> Values:
    return [((tier,), spread) for tier, spread in _measured(view).tier_seconds.items()]


def _refused(view: NodeScrape) -> Values:
    return [((reason,), num) for reason, num in _measured(view).refused.items()]


METRICS = (
    Declared(
        _G, "node_state", "1 for the current state of the node, else 0.", _node_states, ("state",)
    ),
    Declared(_G, "pages", "Pages of KV by state.", _pages, ("state",)),
    _load(_G, "num_running", "Requests that the engine is running."),
    _load(_G, "num_waiting", "Requests that wait for pages, or on prefill for a grant."),
    _load(_G, "num_transferring", "Requests whose pages are granted or being pushed."),
    _load(_G, "max_running", "Maximum number of requests with pages; 0 on prefill."),
    _load(_G, "queued_tokens", "Prompt tokens waiting to be computed."),
    _load(_G, "page_size", "Tokens of KV in one page."),
    _load(
        _G,
        "ending_s",
        "Age in seconds of the oldest failed hand-off whose pages may still be read or written; 0: none.",
    ),
    _load(_G, "num_edges", "Edge workers with requests on this node."),
    _load(_C, "prompt_tokens", "Prompt tokens processed, including cached ones."),
    _load(_C, "cached_tokens", "Prompt tokens found in the prefix cache."),
    _load(_C, "generated_tokens", "Tokens generated by the engine."),
    _load(_C, "pushed_bytes", "Bytes of KV written to decode nodes."),
    _load(_C, "received_bytes", "Bytes of KV received from prefill nodes."),
    _load(
        _C, "saved_bytes", "Bytes of KV not pushed, because decode had them in its prefix cache."
    ),
    _load(_C, "num_corrupted", "Hand-offs with a wrong checksum; they are repeated."),
    _load(
        _C,
        "num_refused_transfers",
        "Transfer messages and writes rejected for lack of a live grant or link.",
    ),
    _load(_C, "num_strangers", "Connections to node links rejected for a wrong secret."),
    _load(_C, "num_invalid", "Invalid frames on node links."),
    _load(_C, "num_aborted", "Requests cancelled before they finished."),
    _load(
        _C,
        "num_retracted",
        "Retractions: running requests that lost their pages and were recomputed.",
    ),
    _load(_C, "num_failed", "Requests that failed with an error."),
    _tier(_G, "num_pages", "Pages of KV in the tier that this node knows of."),
    _tier(_G, "num_bytes", "Bytes of KV in the tier that this node knows of."),
    _tier(_G, "limit_bytes", "Limit of the tier in bytes; 0: set by the store."),
    _tier(_C, "hit_tokens", "Prompt tokens fetched from the tier."),
    _tier(_C, "missed_tokens", "Prompt tokens not found in the tier."),
    _tier(_C, "late_tokens", "Prompt tokens that the tier did not return in time."),
    _tier(_C, "put_bytes", "Bytes of KV written to the tier."),
    _tier(_C, "got_bytes", "Bytes of KV read from the tier."),
    _tier(_C, "num_evicted", "Pages evicted from the tier."),
    _tier(_C, "num_corrupted", "Corrupted entries, which were removed."),
    _tier(_C, "num_failures", "Calls to the tier that failed or timed out."),
    Declared(
        _G,
        "kv_tier_state",
        "1 for the current state of the tier, else 0.",
        _tier_states,
        ("tier", "state"),
    ),
    Declared(
        _G,
        "kv_tier_token_cost_ratio",
        "Fetch time per token divided by compute time per token.",
        _tier_costs,
        ("tier",),
    ),
    Declared(
        _H,
        "kv_tier_fetch_seconds",
        "Seconds that requests waited for tiers, by the slowest tier that returned pages.",
        _tier_seconds,
        ("tier",),
    ),
    _spread(
        "bootstrap_seconds",
        "Seconds from a request's arrival at prefill to decode's grant of pages.",
    ),
    _spread(
        "push_seconds", "Seconds from a prompt's first computed pages to the end of its last write."
    ),
    _spread(
        "push_exposed_seconds",
        "Seconds from the end of a prompt's last chunk to the end of its last write.",
    ),
    _spread(
        "granted_seconds", "Seconds from the grant of pages until the prompt has landed in them."
    ),
    _spread(
        "step_cpu_seconds",
        "CPU seconds of the engine's thread per forward, excluding the computation.",
    ),
    _spread(
        "pass_seconds",
        "Seconds from one pass of the engine's loop to the next, while it has work.",
    ),
    _spread("step_device_seconds", "Device seconds per forward, including sampling."),
    _spread("step_requests", "Requests per forward."),
    _spread("step_tokens", "Tokens per forward."),
    _count("lost_edges", "Edge workers lost because the connection broke or timed out."),
    _count("lost_links", "Links to nodes of the other role lost because they broke or timed out."),
    Declared(_C, "refused_requests", "Rejected requests by error code.", _refused, ("reason",)),
)


def _as_sglang(load: NodeLoad) -> Iterator[Metric]:
    """Yield the gauges by which gateways choose nodes, under SGLang's names, which they read by default."""
    num_used = load.num_pages - load.pages_free - load.pages_cached
    usage = num_used / load.num_pages if load.num_pages else 0.0
    gauges = (
        ("num_running_reqs", "Requests that the engine is running.", load.num_running),
        ("num_queue_reqs", "Requests that wait.", load.num_waiting),
        ("token_usage", "Share of the pages that are neither free nor cached.", usage),
    )
    for name, help_text, value in gauges:
        yield GaugeMetricFamily(f"sglang:{name}", help_text, value=value)
    info = GaugeMetricFamily(
        "sglang:cache_config_info", "Pages of KV; always 1.", labels=["page_size", "num_pages"]
    )
    info.add_metric([str(load.page_size), str(load.num_pages)], 1)
    yield info


class NodeCollector(Collector):
    """Collects the metrics of a node."""

    def __init__(self, view: NodeScrape) -> None:
        self._view = view

    @override
    def collect(self) -> Iterator[Metric]:
        view = self._view
        info = InfoMetricFamily("tandem_node", "Facts about this node as labels; always 1.")
        info.add_metric([], {"role": ROLE_NAMES.get(view.role, view.role), **view.facts})
        yield info
        for declared in METRICS:
            yield declared.family(view)
        yield from _as_sglang(view.load)


def render(view: NodeScrape) -> str:
    """Return a node's metrics in Prometheus' text format."""
    pids = {"http": os.getpid()} | ({} if view.measured is None else {"engine": view.measured.pid})
    registry = CollectorRegistry()
    for collector in (
        NodeCollector(view),
        ProcessesCollector(lambda: pids),
        BuildCollector(),
    ):
        registry.register(collector)
    return generate_latest(registry).decode()
