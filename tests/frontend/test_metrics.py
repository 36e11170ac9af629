"""What the edge counts of tokens, and how Prometheus is told."""

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from frontend import metrics as metrics_module
from frontend.metrics import FrontendMetrics


def gaps(metrics) -> dict[str, float]:
    name = "tandem_edge_inter_token_latency_seconds"
    (family,) = [
        family for family in text_string_to_metric_families(metrics.render()) if family.name == name
    ]
    return {
        sample.labels.get("le", sample.name.removeprefix(name)): sample.value
        for sample in family.samples
    }


def test_tokens_that_come_together_each_have_their_share(monkeypatch):
    now = iter((100.0, 100.25, 101.0))
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    metrics = FrontendMetrics()
    counted = metrics.token_gaps()
    for num_tokens in (1, 1, 3):
        counted.came(num_tokens)
    assert gaps(metrics)["_count"] == 4
    assert gaps(metrics)["+Inf"] == 4
    assert gaps(metrics)["0.3"] - gaps(metrics)["0.2"] == 4
    assert gaps(metrics)["_sum"] == 1.0


def test_the_first_tokens_of_a_generation_have_no_gap_before_them():
    metrics = FrontendMetrics()
    metrics.token_gaps().came(1)
    assert gaps(metrics)["_count"] == 0
    metrics.token_gaps().came(3)
    assert gaps(metrics)["_count"] == gaps(metrics)["0.001"] == 2
    assert gaps(metrics)["_sum"] == 0


def test_prometheus_is_told_of_each_gap_once():
    metrics = FrontendMetrics()
    counted = metrics.token_gaps()
    for _ in range(5):
        counted.came(1)
        metrics.gather()
    assert gaps(metrics)["_count"] == 4
    buckets = [value for le, value in gaps(metrics).items() if le[0].isdigit()]
    assert buckets == sorted(buckets), "cumulative"
