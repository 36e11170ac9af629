"""A node's load in Prometheus' text format."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from wire.messages import NodeLoad

PAGE_STATES = ("free", "cached", "held", "granted", "quarantined")

GAUGES = {
    "num_running": "Requests with pages.",
    "num_waiting": "Requests that wait for pages.",
    "num_transferring": "Requests whose pages are granted or being pushed.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens, cached ones included.",
    "cached_tokens": "Prompt tokens taken from the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "pushed_bytes": "Bytes of KV written to decode nodes.",
    "received_bytes": "Bytes of KV that prefill nodes wrote here.",
    "saved_bytes": "Bytes of KV of prompts handed off that decode had in its prefix cache already.",
    "num_corrupted": "Hand-offs whose bytes arrived other than they were sent; they are done again.",
    "num_aborted": "Requests cancelled.",
    "num_retracted": "How often a running request gave its pages back, to be computed again.",
    "num_failed": "Requests that ended with an error.",
}


class LoadCollector(Collector):
    """Collects what `load` returns at the time of the scrape."""

    def __init__(self, load: Callable[[], NodeLoad], role: str) -> None:
        self._load = load
        self._role = role

    @override
    def collect(self) -> Iterator[Metric]:
        load = self._load()
        pages = GaugeMetricFamily("tandem_pages", "Pages by state.", labels=["role", "state"])
        for state in PAGE_STATES:
            pages.add_metric([self._role, state], getattr(load, f"pages_{state}"))
        yield pages
        for name, help_text in GAUGES.items():
            gauge = GaugeMetricFamily(f"tandem_{name}", help_text, labels=["role"])
            gauge.add_metric([self._role], getattr(load, name))
            yield gauge
        for name, help_text in COUNTERS.items():
            bare = name.removeprefix("num_")
            counter = CounterMetricFamily(f"tandem_{bare}", help_text, labels=["role"])
            counter.add_metric([self._role], getattr(load, name))
            yield counter


def load_metrics(load: Callable[[], NodeLoad], role: str) -> CollectorRegistry:
    """Return a registry that reports `load`; render it with `render`."""
    registry = CollectorRegistry()
    registry.register(LoadCollector(load, role))
    return registry


def render(registry: CollectorRegistry) -> str:
    """Return the registry's metrics as text."""
    return generate_latest(registry).decode()
