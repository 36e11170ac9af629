"""The chart's values: wrong ones are rejected by name, and each is in the schema and the README."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from tests.deploy.helm import (
    CHART,
    CLUSTER_KEY,
    NAMESPACE,
    RELEASE,
    ROOT,
    helm,
    of_kind,
    rendered,
    template,
)
from tests.deploy.metrics_page import ALERTS, dashboard
from tests.patience import PATIENCE_S

# A setting, and the name and the reason that the messages of both Helm versions contain.
INVALID = [
    ("prefil.replicas=2", "prefil", "not allowed"),
    ("prefill.gpu=4", "gpu", "not allowed"),
    ("prefill.gpus=two", "gpus", "integer"),
    ("decode.replicas=-1", "replicas", "0"),
    ("decode.ports.http=70000", "http", "65"),
    ("decode.drainTimeoutSeconds=100000", "drainTimeoutSeconds", "86"),
    ("prefill.startupTimeoutSeconds=0", "startupTimeoutSeconds", "5"),
    ("prefill.resources.cpu=2", "cpu", "not allowed"),
    ("prefill.resources.limits.memory=lots", "memory", "pattern"),
    ("prefill.args=--page-size=32", "args", "array"),
    ("nodes.sidecars[0].name=proxy", "sidecars", "image"),
    ("nodes.cacheVolume=/srv/cache", "cacheVolume", "object"),
    ("router.httpRoute.hostnames={LLM.example}", "hostnames", "pattern"),
    ("decode.tolerations[0].effect=Never", "effect", "NoExecute"),
    ("decode.topologySpread.whenUnsatisfiable=Maybe", "whenUnsatisfiable", "DoNotSchedule"),
    ("decode.podDisruptionBudget.maxUnavailable=half", "maxUnavailable", "pattern"),
    ("decode.autoscaling.kind=vpa", "kind", "keda"),
    ("decode.autoscaling.metrics.http_requests=3", "http_requests", "not allowed"),
    ("prefill.zone=7", "zone", "string"),
    ("router.policy=best", "policy", "least_load"),
    ("router.workers=0", "workers", "1"),
    ("router.service.type=Headless", "type", "LoadBalancer"),
    ("router.service.loadBalancerSourceRanges={everywhere}", "loadBalancerSourceRanges", "pattern"),
    ("model.volume.type=s3", "type", "emptyDir"),
    ("model.volume.hostPath=models", "hostPath", "pattern"),
    ("model.volume.accessModes={Any}", "accessModes", "ReadWriteMany"),
    ("auth.clusterKey=short", "clusterKey", "16"),
    ("auth.apiKeys={two words}", "apiKeys", "pattern"),
    ("image.digest=sha256:12", "digest", "pattern"),
    ("image.pullPolicy=Sometimes", "pullPolicy", "IfNotPresent"),
    ("discovery.clusterDomain=.local", "clusterDomain", "pattern"),
    ("transfer.backend=TCP", "backend", "pattern"),
    ("transfer.verifyKv=sample", "verifyKv", "always"),
    ("rdma.ucx.NCCL_DEBUG=INFO", "NCCL_DEBUG", "not allowed"),
    ("rdma.resource=hca", "resource", "pattern"),
    ("simulation.profile.prefill.base_ms=-1", "base_ms", "0"),
    ("networkPolicy.transferPorts.to=0", "to", "1"),
    ("monitoring.podMonitor.interval=often", "interval", "pattern"),
    ("monitoring.prometheusUrl=prometheus:9090", "prometheusUrl", "pattern"),
    ("logLevel=verbose", "logLevel", "warning"),
    ("test.timeoutSeconds=0", "timeoutSeconds", "1"),
]
# Settings that are valid alone.
CONTRADICTIONS = [
    ("model.init.image=fetch", "model.volume.type is none"),
    ("model.volume.type=emptyDir", "set model.init.image"),
    ("model.volume.type=hostPath", "set model.volume.hostPath"),
    ("auth.existingSecret=s,auth.apiKeys={one}", "name the entry of API keys in auth.apiKeysEntry"),
    ("auth.apiKeysEntry=keys", "is an entry of auth.existingSecret"),
    ("router.keyLimits=[default]", "set auth.apiKeys"),
    (
        "decode.autoscaling.enabled=true,decode.autoscaling.minReplicas=9",
        "decode.autoscaling.minReplicas",
    ),
    (
        "prefill.autoscaling.enabled=true,prefill.autoscaling.metrics=null",
        "prefill.autoscaling.metrics",
    ),
    ("simulation.enabled=true,decode.gpus=1", "decode.gpus"),
    (
        "rdma.enabled=true,rdma.hostNetwork=true,decode.ports.bootstrap=8998",
        "prefill.ports.bootstrap",
    ),
    (
        "networkPolicy.transferPorts.from=60999,networkPolicy.transferPorts.to=60998",
        "transferPorts",
    ),
    ("monitoring.podMonitor.enabled=true", "networkPolicy.metricsFrom"),
    ("engine=vllm", "vllm.image is empty"),
    ("engine=vllm,vllm.image=i,simulation.enabled=true", "choose one"),
    ("vllm.args={--enforce-eager}", "set engine to vllm"),
    ("decode.gpus=4", "decode.resources is empty"),
    ("prefill.ports.engine=8998", "prefill.ports has the same port twice"),
    ("transfer.backend=nixl\\,cuda_ipc", "cuda_ipc, which moves KV within one host"),
    ("transfer.backend=shm", "shm, which moves KV within one host"),
    ("transfer.backend=rdma", "rdma, which the chart does not know"),
    ("fullnameOverride=llm.prod", "set fullnameOverride"),
    ("router.httpRoute.enabled=true", "router.httpRoute.parentRefs is empty"),
]


REMOVED = [
    ("discovery.mode=kubernetes", "discovery.mode was removed: routers find nodes by DNS"),
    ("discovery.mode=dns", "discovery.mode was removed: routers find nodes by DNS"),
    ("serviceAccount.create=false", "serviceAccount was removed: routers need no permission"),
]


@pytest.mark.parametrize("major", [3, 4])
def test_invalid_values_are_rejected_by_name(major):
    ran = template(*(setting for setting, _, _ in INVALID), major=major)
    assert ran.returncode != 0
    lines = ran.stderr.splitlines()
    for setting, name, reason in INVALID:
        assert any(name in line and reason in line for line in lines), (setting, ran.stderr)
    assert "short" not in ran.stderr  # which was given as a secret


@pytest.mark.parametrize(
    ("settings", "reason"), CONTRADICTIONS, ids=[each for each, _ in CONTRADICTIONS]
)
def test_contradicting_values_are_rejected_with_a_remedy(settings, reason):
    ran = template(settings)
    assert ran.returncode != 0
    assert reason in ran.stderr


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize(("setting", "sentence"), REMOVED, ids=[each for each, _ in REMOVED])
def test_a_removed_value_is_rejected_with_a_remedy(setting, sentence, major):
    ran = template(setting, major=major)
    assert ran.returncode != 0
    assert sentence in ran.stderr


def test_the_schema_has_exactly_the_values():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(values, node, path):
        node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if node.get("additionalProperties") is not False or "patternProperties" in node:
            return
        known = {name for name, part in node["properties"].items() if "deprecated" not in part}
        # `global` is what charts above this one would bring.
        assert values.keys() == known - {"global"}, path
        for name, value in values.items():
            if isinstance(value, dict) and value:
                check(value, node["properties"][name], f"{path}.{name}")

    check(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_readme_and_schema_match_the_comments_of_the_values():
    command = [sys.executable, str(ROOT / "scripts" / "chart"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stdout


def test_dashboard_and_alerts_are_rendered_unchanged():
    manifests = rendered(
        "monitoring.dashboard.enabled=true", "monitoring.prometheusRule.enabled=true"
    )
    shown = of_kind(manifests, "ConfigMap")["blue-tandem-dashboard"]["data"]["tandem.json"]
    assert json.loads(shown) == dashboard()
    (rule,) = of_kind(manifests, "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


def test_the_notes_name_existing_objects():
    settings = ("--set", f"auth.apiKeys={{one}},auth.clusterKey={CLUSTER_KEY}")
    ran = helm(4, "install", RELEASE, str(CHART), "-n", NAMESPACE, "--dry-run=client", *settings)
    assert ran.returncode == 0, ran.stderr
    notes = ran.stdout.partition("NOTES:")[2]
    manifests = rendered("auth.apiKeys={one}")
    named = re.findall(r"(?:statefulset/|service/|get secret )([-\w]+)", notes)
    assert len(named) == 4
    assert set(named) <= of_kind(manifests, "StatefulSet", "Service", "Secret").keys()
    (key,) = re.findall(r"jsonpath=\{\.data\.([-\w]+)\}", notes)
    assert key in of_kind(manifests, "Secret")["blue-tandem"]["data"]
