"""A node's metrics, from the engine process to Prometheus.

```
 engine process: Measures ── Measured, with a Pong ──▶ HTTP process: NodeCollector ── METRICS ──▶ GET /metrics
```

Each metric is declared once in `METRICS`, with its kind, name, help and the source of its value. docs/metrics.md
explains all of them. Routers balance by `NodeLoad`, which goes to every edge worker five times a second and must
stay small. `Measured` goes only to the node's own HTTP process.
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

from tandem.engine.step import StepCounts
from tandem.kvtransfer.events import ReceiverTimes, SenderTimes
from tandem.node.life import State
from tandem.telemetry.histogram import Histogram, Spread
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector
from tandem.wire.errors import TandemError
from tandem.wire.generation import Epoch
from tandem.wire.messages import Measured, NodeLoad

# From a step with a few requests to a step that compiles something.
_CPU_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
PAGE_STATES = ("free", "cached", "held", "granted", "quarantined")
TIER_STATES = ("up", "backing_off", "full")
# Role labels for operators: a colocated node is named after its command.
ROLE_NAMES = {"colocated": "serve"}

# ── in the engine process ────────────────────────────────────────────────────────────────────────


class Measures:
    """The measurements of one engine process.

    `steps`: the engine's counts; `transfers`: the agent's times; `tier_seconds`: waiting times of requests by tier.
    """

    def __init__(
        self,
        steps: StepCounts | None = None,
        transfers: SenderTimes | ReceiverTimes | None = None,
        tier_seconds: Callable[[], Mapping[str, Spread]] = dict,
    ) -> None:
        self._steps, self._transfers = steps or StepCounts(), transfers
        self._tier_seconds = tier_seconds
        self._step_cpu = Histogram(_CPU_SECONDS)
        self._cpu_s = 0.0  # since the last forward was collected
        self._refused: Counter[str] = Counter()
        self.num_lost_edges = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the loop thread's CPU time in a step, excluding forwards that run on the CPU.

        The time is added to the next collected forward, because a forward may be launched one step before.
        """
        steps, started_s = self._steps, time.thread_time()
        num_before, device_s = steps.num_collected, steps.host_cpu_s
        yield
        self._cpu_s += time.thread_time() - started_s - (steps.host_cpu_s - device_s)
        if steps.num_collected > num_before:
            self._step_cpu.observe(max(0.0, self._cpu_s))
            self._cpu_s = 0.0

    def refused(self, error: TandemError) -> None:
        """Count a rejected request."""
        self._refused[error.code] += 1

    def report(self, epoch: Epoch) -> Measured:
        """Return all measurements, keyed by the names in `METRICS`."""
        return Measured(
            epoch=epoch,
            pid=os.getpid(),
            spreads={
                "step_cpu_seconds": self._step_cpu.spread(),
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
    """Yield an object's histograms with their attribute names."""
    for name, value in () if source is None else vars(source).items():
        if isinstance(value, Histogram):
            yield name, value.spread()


# ── in the HTTP process ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NodeView:
    """The values of a node at a scrape.

    `facts`: labels of `tandem_node_info`; `measured`: None until the engine reports it.
    """

    role: str
    state: State
    facts: dict[str, str]
    load: NodeLoad
    measured: Measured | None


Kind = type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
Values = Iterable[tuple[tuple[str, ...], float | Spread]]


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric.

    Attributes:
        name: The name without the prefix `tandem_`.
        values: Returns the values, each with its labels except the role.
        labels: Names of those labels.
    """

    kind: Kind
    name: str
    help: str
    values: Callable[[NodeView], Values]
    labels: tuple[str, ...] = ()

    def family(self, view: NodeView) -> Metric:
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
}


def _load(kind: Kind, field: str, help_text: str) -> Declared:
    """Declare a metric for a field of `NodeLoad`; the value -1 (not reported yet) becomes 0."""
    name = _NAMES.get(field, field.removeprefix("num_"))
    return Declared(kind, name, help_text, lambda view: [((), max(0, getattr(view.load, field)))])


def _tier(kind: Kind, field: str, help_text: str) -> Declared:
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


def _measured(view: NodeView) -> Measured:
    return view.measured or Measured(epoch=Epoch(0), pid=0)


def _node_states(view: NodeView) -> Values:
    return [((state.value,), state is view.state) for state in State]


def _pages(view: NodeView) -> Values:
    return [((state,), getattr(view.load, f"pages_{state}")) for state in PAGE_STATES]


def _tier_states(view: NodeView) -> Values:
    return [((t.name, state), state == t.state) for t in view.load.tiers for state in TIER_STATES]


def _tier_costs(view: NodeView) -> Values:
    # -1: unknown so far
    return [((t.name,), t.token_cost) for t in view.load.tiers if t.token_cost >= 0]


def _tier_seconds(view: NodeView) -> Values:
    return [((tier,), spread) for tier, spread in _measured(view).tier_seconds.items()]


def _refused(view: NodeView) -> Values:
    return [((reason,), num) for reason, num in _measured(view).refused.items()]


METRICS = (
    Declared(
        _G, "node_state", "1 for the state that the node is in, else 0.", _node_states, ("state",)
    ),
    Declared(_G, "pages", "Pages of KV by state.", _pages, ("state",)),
    _load(_G, "num_running", "Requests that take part in steps."),
    _load(_G, "num_waiting", "Requests that wait for pages, or on prefill for a grant."),
    _load(_G, "num_transferring", "Requests whose pages are granted, or still being pushed."),
    _load(_G, "max_running", "Requests that may have pages at a time; 0 on prefill."),
    _load(_G, "queued_tokens", "Prompt tokens that wait to be computed."),
    _load(_G, "page_size", "Tokens of KV in one page."),
    _load(_G, "num_edges", "Edge workers that have requests here."),
    _load(_C, "prompt_tokens", "Prompt tokens taken in, cached ones included."),
    _load(_C, "cached_tokens", "Prompt tokens taken from the prefix cache."),
    _load(_C, "generated_tokens", "Tokens that the engine generated."),
    _load(_C, "pushed_bytes", "Bytes of KV written to decode nodes."),
    _load(_C, "received_bytes", "Bytes of KV that prefill nodes wrote here."),
    _load(_C, "saved_bytes", "Bytes of KV not pushed, as decode had them in its prefix cache."),
    _load(_C, "num_corrupted", "Hand-offs whose bytes arrived changed; they are repeated."),
    _load(
        _C, "num_refused_transfers", "Transfer messages and writes rejected: no live grant or link."
    ),
    _load(_C, "num_strangers", "Connections to node links rejected for a wrong secret."),
    _load(_C, "num_invalid", "Frames on node links that were no message."),
    _load(_C, "num_aborted", "Requests cancelled before their end."),
    _load(_C, "num_retracted", "How often a running request was retracted and computed again."),
    _load(_C, "num_failed", "Requests that ended with an error."),
    _tier(_G, "num_pages", "Pages of KV in the tier, as far as this node knows."),
    _tier(_G, "num_bytes", "Bytes of KV in the tier, as far as this node knows."),
    _tier(_G, "limit_bytes", "Bytes that the tier may hold; 0: the store's own limit."),
    _tier(_C, "hit_tokens", "Prompt tokens that came from the tier."),
    _tier(_C, "missed_tokens", "Prompt tokens that were not in the tier."),
    _tier(_C, "late_tokens", "Prompt tokens that the tier did not bring in time."),
    _tier(_C, "put_bytes", "Bytes of KV put into the tier."),
    _tier(_C, "got_bytes", "Bytes of KV got from the tier."),
    _tier(_C, "num_evicted", "Pages that the tier gave up for others."),
    _tier(_C, "num_corrupted", "Entries whose bytes were wrong; they were removed."),
    _tier(_C, "num_failures", "Calls to the tier that failed or took too long."),
    Declared(
        _G,
        "kv_tier_state",
        "1 for the state that the tier is in, else 0.",
        _tier_states,
        ("tier", "state"),
    ),
    Declared(
        _G,
        "kv_tier_token_cost_ratio",
        "Time to bring a token from the tier by the time to compute one.",
        _tier_costs,
        ("tier",),
    ),
    Declared(
        _H,
        "kv_tier_fetch_seconds",
        "Seconds that requests waited for tiers, by the slowest that had something.",
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
    _spread("granted_seconds", "Seconds from a grant of pages to the prompt in them."),
    _spread(
        "step_cpu_seconds",
        "CPU seconds of the engine's thread for one forward, without computing it.",
    ),
    _spread("step_device_seconds", "Seconds of the device for one forward and its sampling."),
    _spread("step_requests", "Requests that took part in one forward."),
    _spread("step_tokens", "Tokens computed by one forward."),
    _count("lost_edges", "Edge workers whose connection broke, or that fell silent."),
    _count("lost_links", "Links to nodes of the other role that broke or fell silent."),
    Declared(
        _C, "refused_requests", "Rejected requests by the code of the error.", _refused, ("reason",)
    ),
)


class NodeCollector(Collector):
    """Collects the metrics of a node."""

    def __init__(self, view: NodeView) -> None:
        self._view = view

    @override
    def collect(self) -> Iterator[Metric]:
        view = self._view
        info = InfoMetricFamily("tandem_node", "What this node is and has; always 1.")
        info.add_metric([], {"role": ROLE_NAMES.get(view.role, view.role), **view.facts})
        yield info
        for declared in METRICS:
            yield declared.family(view)


def render(view: NodeView) -> str:
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
