"""Prometheus metrics of processes and of the build, the same for every role."""

import platform
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from tandem import __version__


class ProcessesCollector(Collector):
    """CPU time, memory and open files of several processes of one server, labelled `process`.

    Args:
        pids: Returns the pid of each process by its name. A dead process has no series.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids

    @override
    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for process, pid in self._pids().items():
            for metric in _of_process(pid):
                name = metric.name
                family = families.setdefault(name, _labelled(metric))
                for sample in metric.samples:
                    family.add_sample(sample.name, {"process": process}, sample.value)
        yield from families.values()

    @override
    def __repr__(self) -> str:
        return f"ProcessesCollector({dict(self._pids())})"


def _of_process(pid: int) -> list[Metric]:
    return list(ProcessCollector(pid=lambda: pid, registry=None).collect())


def _labelled(metric: Metric) -> Metric:
    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.documentation, labels=["process"])


class BuildCollector(Collector):
    """An info metric with the versions of Tandem and Python; its value is 1."""

    @override
    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily("tandem_build", "Versions of Tandem and Python; always 1.")
        info.add_metric([], {"version": __version__, "python": platform.python_version()})
        yield info
