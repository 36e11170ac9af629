"""Measurements of an engine process."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.engine.scheduling.step import Outcome, StepCounts
from tandem.node.life.life import NodeState
from tandem.node.metrics import Measures, NodeScrape, render
from tandem.wire.generation import Epoch
from tandem.wire.messages import NodeLoad


def forward(device_s, host_cpu_s=0.0, num_decodes=2, chunks=()):
    batch = SimpleNamespace(
        decodes=[None] * num_decodes, chunks=[SimpleNamespace(num_tokens=n) for n in chunks]
    )
    return batch, Outcome(np.zeros(0, np.int64), device_s, host_cpu_s)


@pytest.fixture
def steps():
    return StepCounts()


@pytest.fixture
def measures(steps):
    return Measures(steps)


def spreads(measures):
    return measures.report(Epoch(3)).spreads


def test_forward_counts_requests_tokens_and_device_time(steps, measures):
    steps.record(*forward(0.25, chunks=(100, 28)))
    told = spreads(measures)
    assert told["step_device_seconds"].total == 0.25
    assert told["step_requests"].total == 4
    assert told["step_tokens"].total == 130


def test_launch_cpu_time_counts_towards_the_next_collected_forward(steps, measures, monkeypatch):
    now = iter((10.0, 10.25, 20.0, 20.5))
    monkeypatch.setattr(time, "thread_time", lambda: next(now))
    with measures.step():
        pass  # a forward is launched
    assert sum(spreads(measures)["step_cpu_seconds"].counts) == 0
    with measures.step():
        steps.record(*forward(1.0))
    told = spreads(measures)["step_cpu_seconds"]
    assert (sum(told.counts), told.total) == (1, 0.75)


def test_cpu_time_of_a_step_counts_towards_one_forward_only(steps, measures, monkeypatch):
    now = iter((10.0, 10.25, 20.0, 20.5))
    monkeypatch.setattr(time, "thread_time", lambda: next(now))
    for _ in range(2):
        with measures.step():
            steps.record(*forward(1.0))
    told = spreads(measures)["step_cpu_seconds"]
    assert (sum(told.counts), told.total) == (2, 0.75)


def test_pass_is_measured_unless_the_loop_waited_for_work_after_it(steps, monkeypatch):
    now = iter((0.0, 5.0, 5.25, 9.0, 9.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    measures = Measures(steps)
    for is_busy in (False, True, False, True):
        measures.begin_pass(is_busy=is_busy)
    told = spreads(measures)["pass_seconds"]
    assert (sum(told.counts), told.total) == (2, 0.75)


def test_cpu_forward_counts_as_device_time_not_host_time(steps, measures, monkeypatch):
    now = iter((10.0, 11.5))
    monkeypatch.setattr(time, "thread_time", lambda: next(now))
    with measures.step():
        steps.record(*forward(device_s=1.3, host_cpu_s=1.25))
    assert spreads(measures)["step_cpu_seconds"].total == 0.25


def test_gateways_read_load_and_kv_use_under_sglangs_names():
    load = NodeLoad(
        num_running=3,
        num_waiting=2,
        num_pages=100,
        pages_free=50,
        pages_cached=25,
        pages_held=25,
        page_size=16,
    )
    found = render(NodeScrape("decode", NodeState.SERVING, {}, load, None)).splitlines()
    for line in (
        "sglang:num_running_reqs 3.0",
        "sglang:num_queue_reqs 2.0",
        "sglang:token_usage 0.25",
        'sglang:cache_config_info{num_pages="100",page_size="16"} 1.0',
    ):
        assert line in found


def test_node_without_pages_uses_none_of_them():
    found = render(NodeScrape("decode", NodeState.LOADING, {}, NodeLoad(), None))
    assert "sglang:token_usage 0.0" in found
