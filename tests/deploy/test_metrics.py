"""The metrics that each role exports: as docs/metrics.md lists them, bounded in number, and consistent."""

import re
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.metrics_page import documented
from tests.e2e.cluster import ask, running, running_cluster, running_serve
from tests.patience import eventually

FLAGS = ("--engine", "simulated", "--page-size", "8", "--max-total-tokens", "8192")
QUIET = ("--log-level", "warning")
TIERS = ("--kv-tier", "host:64MiB", "--kv-tier-min-tokens", "8")
NUM_NEW = 12
UNITS = ("seconds", "bytes", "tokens", "info", "requests", "generations", "ratio")
# Prometheus wants base units: seconds and not milliseconds, bytes and not megabytes.
NO_UNITS = re.compile(r"_(ms|us|milliseconds|minutes|kb|mb|gb|kib|mib|gib|percent|num)(_|$)")


class Servers:
    """One of each kind: a router, one with several workers, a prefill, a decode and `serve`."""

    def __init__(self, stack):
        cluster = stack.enter_context(running_cluster(*FLAGS, *QUIET))
        nodes = ("--prefill", *cluster.prefill_urls, "--decode", *cluster.decode_urls)
        flags = ("--workers", "2", *QUIET, "--local-prefill-threshold", "0")
        several, _ = stack.enter_context(running("lb", *nodes, *flags))
        self.urls = {
            "router": cluster.url,
            "several": several,
            "prefill": cluster.prefill_urls[0],
            "decode": cluster.decode_urls[0],
            "serve": stack.enter_context(running_serve(*FLAGS, *QUIET, *TIERS)),
        }

    def families(self, name):
        _, text = ask(f"{self.urls[name]}/metrics")
        return {family.name: family for family in text_string_to_metric_families(text)}

    def all_families(self):
        return [family for name in self.urls for family in self.families(name).values()]

    def series(self):
        return {
            (name, sample.name, *sorted(sample.labels.items()))
            for name in self.urls
            for family in self.families(name).values()
            for sample in family.samples
        }

    def value(self, name, sample_name, **labels):
        return sum(
            sample.value
            for family in self.families(name).values()
            for sample in family.samples
            if sample.name == sample_name and labels.items() <= sample.labels.items()
        )

    def processes(self, name):
        samples = self.families(name)["process_resident_memory_bytes"].samples
        return {sample.labels["process"] for sample in samples}

    def num_workers(self):
        return len(self.families("several")["tandem_edge_worker_streams"].samples)

    def generate(self, name, number):
        ids = [10 + (number * 7 + i) % 900 for i in range(40 + number)]
        body = {"rid": f"{name}-{number}", "input_ids": ids, "stream": True}
        body["sampling_params"] = {"max_new_tokens": NUM_NEW}
        ask(f"{self.urls[name]}/generate", body)
        ask(f"{self.urls[name]}/nothing-{number}?x={number}")


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        servers = Servers(stack)
        for name in ("router", "several", "serve"):
            for number in range(4):
                servers.generate(name, number)
        # A second worker may start long after the first one serves.
        assert eventually(lambda: servers.processes("several") == PROCESSES["several"])
        assert eventually(lambda: servers.num_workers() == 2)
        # Engines tell of themselves with the next ping, workers within half a second.
        nodes = ("prefill", "decode", "serve")
        assert eventually(lambda: all(servers.value(name, "tandem_pages") for name in nodes))
        assert eventually(lambda: servers.value("several", GAPS) == 4 * (NUM_NEW - 1))
        assert eventually(lambda: servers.value("prefill", "tandem_push_seconds_count") == 8)
        assert eventually(lambda: servers.value("serve", "tandem_generated_tokens_total") == 48)
        servers.series()  # asking for metrics is a request, with a series of its own
        yield servers


GAPS = "tandem_edge_inter_token_latency_seconds_count"
PROCESSES = {
    "router": {"edge-0"},
    "several": {"edge-0", "edge-1", "parent"},
    "decode": {"http", "engine"},
}


def exposed_name(family):
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_exported_and_documented_metrics_are_the_same(servers):
    def exported():
        return {exposed_name(family) for family in servers.all_families()}

    assert eventually(lambda: exported() == set(documented())), exported() ^ set(documented())


def test_types_and_labels_match_the_page(servers):
    page = documented()
    for family in servers.all_families():
        row = page[exposed_name(family)]
        assert row.type == family.type, row.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == row.labels, row.name


def test_names_and_help_texts_follow_prometheus_conventions(servers):
    for family in servers.all_families():
        name = exposed_name(family)
        assert len(family.documentation.split()) >= 3, name
        assert family.documentation.endswith("."), name
        assert not NO_UNITS.search(name), name
        if family.type == "histogram":
            assert name.endswith(UNITS), name
        if name.endswith("_seconds") and name.startswith("tandem_"):
            assert "econds" in family.documentation, name


def test_requests_add_no_series(servers):
    before = servers.series()
    told = servers.value("serve", "tandem_generated_tokens_total")
    for number in range(4, 12):
        servers.generate("router", number)
        servers.generate("serve", number)
    # Not before the engine has told of them.
    assert eventually(
        lambda: servers.value("serve", "tandem_generated_tokens_total") == told + 8 * NUM_NEW
    )
    assert servers.series() == before


# What a process tells comes with its next word: counts agree when all of it has come.
def agree(counts):
    return eventually(lambda: len({*counts()}) == 1) and counts()[0] > 0


def test_every_gap_between_tokens_is_counted_once(servers):
    for name in ("several", "serve"):

        def counts(name=name):
            tokens = servers.value(name, "tandem_edge_output_tokens_total")
            generations = servers.value(name, "tandem_edge_generation_seconds_count")
            return servers.value(name, GAPS), tokens - generations

        assert agree(counts), counts()
        gaps = servers.value(name, GAPS.replace("_count", "_sum"))
        assert 0 < gaps < servers.value(name, "tandem_edge_generation_seconds_sum")


def test_a_hand_off_is_timed_on_both_nodes(servers):
    def counts():
        of_prefill = ("push", "bootstrap", "push_exposed")
        return (
            *(servers.value("prefill", f"tandem_{each}_seconds_count") for each in of_prefill),
            servers.value("decode", "tandem_granted_seconds_count"),
        )

    assert agree(counts), counts()
    exposed = servers.value("prefill", "tandem_push_exposed_seconds_sum")
    assert 0 < exposed <= servers.value("prefill", "tandem_push_seconds_sum")


@pytest.mark.parametrize("name", ["prefill", "decode", "serve"])
def test_each_step_has_a_device_and_a_cpu_time(servers, name):
    def counts():
        return tuple(
            servers.value(name, f"tandem_step_{each}_seconds_count", role=name)
            for each in ("device", "cpu")
        )

    assert agree(counts), counts()
    num_steps, _ = counts()
    assert servers.value(name, "tandem_step_cpu_seconds_sum", role=name) > 0
    assert servers.value(name, "tandem_step_requests_sum", role=name) >= num_steps


def test_a_node_exports_its_role_state_and_pages(servers):
    for name in ("prefill", "decode", "serve"):
        assert servers.value(name, "tandem_node_info", role=name, tp_size="1") == 1
        assert servers.value(name, "tandem_node_state", role=name, state="serving") == 1
        assert servers.value(name, "tandem_node_state", role=name) == 1
        assert servers.value(name, "tandem_pages", role=name) == 1024
        assert servers.value(name, "tandem_page_tokens", role=name) == 8


def test_process_metrics_have_a_process_label(servers):
    for name, processes in PROCESSES.items():
        assert servers.processes(name) == processes
        samples = servers.families(name)["process_resident_memory_bytes"].samples
        assert min(sample.value for sample in samples) > 1e6
