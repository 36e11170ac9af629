"""What a node's engine tells of itself, for Prometheus. Each name is explained in docs/metrics.md."""

import itertools
import os
from collections.abc import Callable, Iterator
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

from tandem.node.life import State
from tandem.node.tier_metrics import tier_families
from tandem.telemetry.histogram import Spread
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector
from tandem.wire.messages import Measured, NodeLoad

PAGE_STATES = ("free", "cached", "held", "granted", "quarantined")
# As operators call it: by the command that starts it.
ROLE_NAMES = {"colocated": "serve"}

# Field of `NodeLoad`: name without `tandem_`, help.
GAUGES = {
    "num_running": ("requests_running", "Requests that take part in steps."),
    "num_waiting": ("requests_waiting", "Requests that wait for pages, or on prefill for a grant."),
    "num_transferring": (
        "requests_transferring",
        "Requests whose pages are granted, or computed and still being pushed.",
    ),
    "max_running": (
        "requests_running_limit",
        "Requests that may have pages at a time; 0: told by decode alone.",
    ),
    "queued_tokens": ("queued_tokens", "Prompt tokens that wait to be computed."),
    "page_size": ("page_tokens", "Tokens of KV in one page."),
    "num_edges": ("edges", "Edge workers that have requests here."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens taken in, cached ones included."),
    "cached_tokens": ("cached_tokens", "Prompt tokens taken from the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens that the engine generated."),
    "pushed_bytes": ("pushed_bytes", "Bytes of KV written to decode nodes."),
    "received_bytes": ("received_bytes", "Bytes of KV that prefill nodes wrote here."),
    "saved_bytes": (
        "saved_bytes",
        "Bytes of KV of prompts handed off that decode had in its prefix cache already.",
    ),
    "num_corrupted": (
        "corrupted",
        "Hand-offs whose bytes arrived other than they were sent; they are done again.",
    ),
    "num_refused_transfers": (
        "refused_transfers",
        "Writes, grants and words about KV outside a live grant or link; refused.",
    ),
    "num_strangers": (
        "strangers",
        "Connections to node links turned away: another secret, or none.",
    ),
    "num_invalid": ("invalid", "Frames on node links that were no message."),
    "num_aborted": ("aborted", "Requests cancelled before their end."),
    "num_retracted": (
        "retracted",
        "How often a running request gave its pages back, to be computed again.",
    ),
    "num_failed": ("failed", "Requests that ended with an error."),
}
# Of `Measured.spreads` and `Measured.counts`, by the name without `tandem_`.
HISTOGRAMS = {
    "bootstrap_seconds": "Seconds from a request's arrival at prefill to decode's grant of pages.",
    "push_seconds": "Seconds from a prompt's first computed pages to the end of its last write into decode's memory.",
    "push_exposed_seconds": "Seconds from the end of a prompt's last chunk to the end of its last write.",
    "granted_seconds": "Seconds for which pages were granted before the prompt had landed in them.",
    "step_cpu_seconds": "CPU seconds of the engine's thread for one forward, beside computing it.",
    "step_device_seconds": "Seconds that the device took for one forward and the choice of tokens.",
    "step_requests": "Requests that took part in one forward.",
    "step_tokens": "Tokens computed by one forward.",
}
COUNTS = {
    "lost_edges": "Edge workers lost: their connection broke, or they fell silent.",
    "lost_links": "Links to nodes of the other role lost: broken, silent or cut off.",
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """What is known of a node at the time of a scrape.

    Attributes:
        facts: Labels of `tandem_node_info`, but for the role.
        measured: None until the engine has told.
    """

    role: str
    state: State
    facts: dict[str, str]
    load: NodeLoad
    measured: Measured | None


class NodeCollector(Collector):
    """Collects what `view` returns at the time of the scrape."""

    def __init__(self, view: Callable[[], NodeView]) -> None:
        self._view = view

    @override
    def collect(self) -> Iterator[Metric]:
        view = self._view()
        role = ROLE_NAMES.get(view.role, view.role)
        yield from _of_node(view, role)
        yield from _of_load(view.load, role)
        seconds = {} if view.measured is None else view.measured.tier_seconds
        yield from tier_families(view.load.tiers, seconds, role, _buckets)
        if view.measured is not None:
            yield from _of_engine(view.measured, role)

    @override
    def __repr__(self) -> str:
        return f"NodeCollector({self._view()!r})"


def _of_node(view: NodeView, role: str) -> Iterator[Metric]:
    info = InfoMetricFamily("tandem_node", "What this node is and has; always 1.")
    info.add_metric([], {"role": role, **view.facts})
    yield info
    states = GaugeMetricFamily(
        "tandem_node_state",
        "1 for the state that the node is in, else 0.",
        labels=["role", "state"],
    )
    for state in State:
        states.add_metric([role, state.value], state is view.state)
    yield states


def _of_load(load: NodeLoad, role: str) -> Iterator[Metric]:
    pages = GaugeMetricFamily("tandem_pages", "Pages of KV by state.", labels=["role", "state"])
    for state in PAGE_STATES:
        pages.add_metric([role, state], getattr(load, f"pages_{state}"))
    yield pages
    for field, (name, help_text) in GAUGES.items():
        gauge = GaugeMetricFamily(f"tandem_{name}", help_text, labels=["role"])
        gauge.add_metric([role], max(0, getattr(load, field)))  # -1: not told yet
        yield gauge
    for field, (name, help_text) in COUNTERS.items():
        counter = CounterMetricFamily(f"tandem_{name}", help_text, labels=["role"])
        counter.add_metric([role], getattr(load, field))
        yield counter


def _of_engine(measured: Measured, role: str) -> Iterator[Metric]:
    for name, help_text in HISTOGRAMS.items():
        if (spread := measured.spreads.get(name)) is not None:
            histogram = HistogramMetricFamily(f"tandem_{name}", help_text, labels=["role"])
            histogram.add_metric([role], _buckets(spread), spread.total)
            yield histogram
    for name, help_text in COUNTS.items():
        counter = CounterMetricFamily(f"tandem_{name}", help_text, labels=["role"])
        counter.add_metric([role], measured.counts.get(name, 0))
        yield counter
    refused = CounterMetricFamily(
        "tandem_refused_requests",
        "Requests that were not taken, by why.",
        labels=["role", "reason"],
    )
    for reason, num in measured.refused.items():
        refused.add_metric([role, reason], num)
    yield refused


def _buckets(spread: Spread) -> list[tuple[str, float]]:
    ends = [*(str(float(bound)) for bound in spread.bounds), "+Inf"]
    return [
        (end, float(count))
        for end, count in zip(ends, itertools.accumulate(spread.counts), strict=True)
    ]


def node_metrics(view: Callable[[], NodeView]) -> CollectorRegistry:
    """Return a registry that reports a node; render it with `render`."""

    def pids() -> dict[str, int]:
        measured = view().measured
        engine = {} if measured is None else {"engine": measured.pid}
        return {"http": os.getpid(), **engine}

    registry = CollectorRegistry()
    for collector in (NodeCollector(view), ProcessesCollector(pids), BuildCollector()):
        registry.register(collector)
    return registry


def render(registry: CollectorRegistry) -> str:
    """Return the registry's metrics as text."""
    return generate_latest(registry).decode()
