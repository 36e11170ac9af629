"""The chart against running servers: the request of `helm test`, and the metrics for autoscaling."""

import os
import subprocess
import sys

import pytest

from tandem.cli.up import free_ports
from tests.deploy.container import start
from tests.deploy.helm import of_kind, pods, rendered
from tests.e2e import cluster
from tests.e2e.cluster import running_serve
from tests.patience import eventually

KEY = "client-key-1"
LONG_S = 500  # beyond what any machine needs for an answer


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that wants a key."""
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(KEY)
    with running_serve("--engine=simulated", "--sim-kv=none", f"--api-key-file={keys}") as url:
        yield url


def ask(url, root, *sets, timeout_s):
    """Run the pod's command."""
    manifests = rendered(*sets, f"test.timeoutSeconds={timeout_s}")
    pod = dict(pods(manifests))["test"]
    assert pod["spec"]["containers"][0]["command"] == ["python3", "-c"]
    started = start(manifests, pod, root)
    script = started.args[0].replace("/etc/tandem", f"{root}/etc/tandem")
    env = {**started.env, "ROUTER_URL": url, "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_helm_test_succeeds_with_an_answer(url, tmp_path):
    ran = ask(url, tmp_path, f"auth.apiKeys={{{KEY}}}", timeout_s=LONG_S)
    assert ran.returncode == 0, ran.stderr
    assert "answered 32 tokens" in ran.stdout


@pytest.mark.thorough
def test_helm_test_fails_with_the_servers_error(url, tmp_path):
    ran = ask(url, tmp_path, "auth.apiKeys={a-wrong-key}", timeout_s=LONG_S)
    assert ran.returncode == 1
    assert "FAILED" in ran.stderr
    assert "401" in ran.stderr


def test_helm_test_fails_without_a_server(tmp_path):
    (port,) = free_ports(1)
    ran = ask(f"http://127.0.0.1:{port}", tmp_path, timeout_s=1)
    assert ran.returncode == 1
    assert "FAILED" in ran.stderr


@pytest.mark.thorough
def test_autoscalers_use_metrics_that_servers_export(url):
    enabled = [
        f"{component}.autoscaling.enabled=true" for component in ("prefill", "decode", "router")
    ]
    by_metric = rendered(*enabled)
    by_query = rendered(*enabled, *(each.replace("enabled=true", "kind=keda") for each in enabled))
    metrics = {
        metric["pods"]["metric"]["name"]
        for scaler in of_kind(by_metric, "HorizontalPodAutoscaler").values()
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    queries = {
        trigger["metadata"]["query"]
        for scaler in of_kind(by_query, "ScaledObject").values()
        for trigger in scaler["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    }
    assert {query.removeprefix("sum(").partition("{")[0] for query in queries} == metrics
    assert eventually(
        lambda: metrics <= names_of(url)
    )  # an engine tells of itself with its first ping


def names_of(url):
    return {line.partition("{")[0] for line in cluster.ask(f"{url}/metrics")[1].splitlines()}
