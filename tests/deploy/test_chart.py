"""What a release of the chart does: valid objects that fit each other, safe pods, updates without an outage."""

import base64
import functools
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.helm import (
    CHART,
    EXAMPLES,
    RELEASE,
    ROOT,
    Manifest,
    helm,
    of_kind,
    open_ports,
    pods,
    ports,
    rendered,
    selects,
    template,
)

NODES = ("prefill", "decode")
SERVING = (*NODES, "router")
# Every part that the chart can make.
EVERYTHING = (
    "model.volume.type=pvc,model.init.image=fetch,model.init.command={fetch}",
    "auth.apiKeys={one},router.keyLimits=[default]",
    "simulation.enabled=true,simulation.profile.decode.base_ms=1",
    "rdma.enabled=true,rdma.hostNetwork=true,rdma.runAsRoot=true",
    "prefill.autoscaling.enabled=true,decode.autoscaling.enabled=true,router.autoscaling.enabled=true",
    "decode.autoscaling.kind=keda,router.ingress.enabled=true,router.ingress.tlsSecret=tls",
    "router.httpRoute.enabled=true,router.httpRoute.parentRefs[0].name=public",
    "networkPolicy.routerFrom[0].podSelector.matchLabels.app=gateway",
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",
    "monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true",
    "monitoring.dashboard.enabled=true",
)
SETS = [((), None), *(((), path) for path in EXAMPLES), (EVERYTHING, None)]
SET_NAMES = ["defaults", *(path.stem for path in EXAMPLES), "everything"]
CUSTOM: dict[str, Manifest] = json.loads(
    Path(__file__).with_name("custom_resources.json").read_text()
)

over_all_values = pytest.mark.parametrize(("sets", "values"), SETS, ids=SET_NAMES)


@functools.cache
def check(text: str, version: str) -> None:
    """Raise unless that version of Kubernetes accepts a manifest, given as JSON, with every field.

    Custom resources are checked against the fields of their operators that the chart uses.
    """
    manifest = json.loads(text)
    schema = CUSTOM.get(f"{manifest['kind']} {manifest['apiVersion']}")
    if schema is None:
        kubernetes_validate.validate(manifest, version, strict=True)
    else:
        jsonschema.validate(manifest["spec"], {**schema, "definitions": CUSTOM["definitions"]})


@pytest.mark.parametrize("major", [3, 4])
def test_helm_lint_passes(major):
    for sets in ((), EVERYTHING):
        flags = [flag for each in sets for flag in ("--set", each)]
        ran = helm(major, "lint", "--strict", str(CHART), *flags)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@over_all_values
def test_helm_3_and_4_render_equal_manifests(sets, values):
    def by_name(major):
        manifests = rendered(*sets, values=values, major=major)
        return {(each["kind"], each["metadata"]["name"]): each for each in manifests}

    assert by_name(3) == by_name(4)


@over_all_values
def test_every_manifest_is_valid(sets, values):
    for manifest in rendered(*sets, values=values):
        check(json.dumps(manifest, sort_keys=True), "1.37.0")


def test_every_manifest_is_valid_for_an_old_cluster():
    for manifest in rendered(*EVERYTHING, version="1.25.0"):
        check(json.dumps(manifest, sort_keys=True), "1.25.0")


def test_kubernetes_1_20_gets_the_same_objects_in_api_versions_it_serves():
    def plain(version):
        manifests = rendered(*EVERYTHING, version=version)
        versions = {each["kind"]: each.pop("apiVersion") for each in manifests}
        for policy in of_kind(manifests, "NetworkPolicy").values():
            for rule in policy["spec"]["ingress"]:
                # Ranges of ports came with 1.22; before it, nodes take each other's on all.
                if any("endPort" in port for port in rule.get("ports", ())):
                    del rule["ports"]
        for budget in of_kind(manifests, "PodDisruptionBudget").values():
            budget["spec"].pop("unhealthyPodEvictionPolicy", None)  # came with 1.27
        return versions, manifests

    old_versions, old = plain("1.20.2")
    versions, new = plain("1.37.1")
    assert old == new
    assert {
        kind: old_versions[kind] for kind in versions if old_versions[kind] != versions[kind]
    } == {
        "PodDisruptionBudget": "policy/v1beta1",
        "HorizontalPodAutoscaler": "autoscaling/v2beta2",
    }


def test_everything_renders_each_kind_of_the_templates():
    kinds = {each["kind"] for each in rendered(*EVERYTHING)}
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*.yaml"))
    assert kinds == set(re.findall(r"^kind: (\w+)$", templates, re.MULTILINE))


@over_all_values
def test_each_selector_matches_the_pods_of_its_component_only(sets, values):
    manifests = rendered(*sets, values=values)
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(manifests)}
    for each in manifests:
        spec, own = each.get("spec", {}), each["metadata"]["labels"]["app.kubernetes.io/component"]
        selector = spec.get("podSelector") or spec.get("selector")
        if each["kind"] == "PodMonitor" or selector is None:
            continue
        wanted = selector if "matchLabels" in selector else {"matchLabels": selector}
        assert [name for name in labels if selects(wanted, labels[name])] == [own], each["kind"]


def test_the_pod_monitor_scrapes_each_serving_pod_under_a_tandem_job():
    manifests = rendered(*EVERYTHING)
    (monitor,) = of_kind(manifests, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    scraped = {
        component: pod["metadata"]["labels"]
        for component, pod in pods(manifests)
        if selects(monitor["spec"]["selector"], pod["metadata"]["labels"])
        and endpoint["port"] in ports(pod)
    }
    assert scraped.keys() == set(SERVING)
    # Alerts select jobs with `tandem` in the name.
    assert {labels[monitor["spec"]["jobLabel"]] for labels in scraped.values()} == {"tandem"}


@over_all_values
def test_services_forward_to_ports_that_pods_listen_on(sets, values):
    manifests = rendered(*sets, values=values)
    by_component = dict(pods(manifests))
    for service in of_kind(manifests, "Service").values():
        pod = by_component[service["spec"]["selector"]["app.kubernetes.io/component"]]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(pod)
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports(pod)[port["targetPort"]]  # no proxy to translate it


def test_inference_pool_of_the_docs_selects_decode_pods_and_their_http_port():
    blocks = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL
    )
    [block] = [block for block in blocks if "kind: InferencePool" in block]
    pool, route = yaml.safe_load_all(block.replace("RELEASE", RELEASE))
    for manifest in (pool, route):
        check(json.dumps(manifest, sort_keys=True), "1.37.0")
    selected = [
        (component, ports(pod)["http"])
        for component, pod in pods(rendered())
        if selects(pool["spec"]["selector"], pod["metadata"]["labels"])
    ]
    assert selected == [("decode", pool["spec"]["targetPorts"][0]["number"])]
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == pool["metadata"]["name"]


@pytest.mark.parametrize("role", NODES)
def test_nodes_accept_routers_peers_and_scrapers_only_on_their_ports(role):
    manifests = rendered(*EVERYTHING)
    by_component = dict(pods(manifests))
    pod = by_component[role]
    listening = ports(pod)

    def opened_to(component):
        labels = by_component[component]["metadata"]["labels"]
        return open_ports(manifests, pod, pod_labels=labels)

    assert opened_to("router") == {listening["http"], listening["engine"]}
    # KV arrives on any port that Linux assigns.
    for peer in NODES:
        assert opened_to(peer) == {listening["bootstrap"], *range(32768, 61000)}
    assert open_ports(manifests, pod, namespace_labels={"name": "monitoring"}) == {
        listening["http"]
    }
    assert opened_to("test") == open_ports(manifests, pod, pod_labels={"app": "gateway"}) == set()


def test_routers_accept_named_clients_scrapers_and_helm_test_only():
    manifests = rendered(*EVERYTHING)
    by_component = dict(pods(manifests))
    pod, test = by_component["router"], by_component["test"]["metadata"]["labels"]
    http = {ports(pod)["http"]}
    assert open_ports(manifests, pod, pod_labels={"app": "gateway"}) == http
    assert open_ports(manifests, pod, namespace_labels={"name": "monitoring"}) == http
    assert open_ports(manifests, pod, pod_labels=test) == http
    assert open_ports(manifests, pod, pod_labels={"app": "other"}) == set()
    assert open_ports(rendered(), pod, pod_labels={"app": "other"}) == http  # none named: all


@over_all_values
def test_no_pod_gets_a_token_of_the_kubernetes_api(sets, values):
    manifests = rendered(*sets, values=values)
    assert not any(pod["spec"]["automountServiceAccountToken"] for _, pod in pods(manifests))
    assert not of_kind(manifests, "ServiceAccount", "Role", "RoleBinding")


@over_all_values
def test_pods_meet_the_restricted_pod_security_standard(sets, values):
    """All pods, except nodes whose RDMA needs root and locked memory."""
    for component, pod in pods(rendered(*sets, values=values)):
        spec = pod["spec"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        is_root = spec["securityContext"]["runAsUser"] == 0
        may_lock = is_root and component in NODES
        assert is_root == may_lock
        assert spec["securityContext"].get("runAsNonRoot", False) != is_root
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            context = container["securityContext"]
            locks = {"add": ["IPC_LOCK"]} if may_lock and container["name"] != "models" else {}
            assert context["capabilities"] == {"drop": ["ALL"]} | locks
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
        assert not {"hostPID", "hostIPC"} & spec.keys()


@over_all_values
def test_each_mount_has_a_volume_and_each_volume_its_source(sets, values):
    manifests = rendered(*sets, values=values)
    for _, pod in pods(manifests):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        mounted = {
            mount["name"]
            for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
            for mount in container.get("volumeMounts", ())
        }
        assert mounted == volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind(manifests, "ConfigMap")
            if values is None and "secret" in volume:
                assert volume["secret"]["secretName"] in of_kind(manifests, "Secret")
            if values is None and "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind(manifests, "PersistentVolumeClaim")


def test_a_release_whose_name_dns_refuses_is_rejected():
    assert "set fullnameOverride" in template(release="1st").stderr


@pytest.mark.parametrize(("component", "group"), [("decode", "nodes"), ("router", "router")])
def test_sidecars_run_beside_the_containers_of_the_chart(component, group):
    sidecar = f"{group}.sidecars[0]"
    manifests = rendered(f"{sidecar}.name=proxy,{sidecar}.image=proxy:1")
    _, added = dict(pods(manifests))[component]["spec"]["containers"]
    assert added == {"name": "proxy", "image": "proxy:1"}


def test_openshift_chooses_the_user():
    null = ",".join(
        f"podSecurityContext.{key}=null" for key in ("runAsUser", "runAsGroup", "fsGroup")
    )
    for _, pod in pods(rendered(null)):
        assert pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_downloads_stay_on_a_volume_or_their_disk_is_requested():
    own = "model.path=org/name"
    kept = "nodes.cacheVolume.persistentVolumeClaim.claimName=cache"
    for settings, source, requested in [
        ((own,), {"emptyDir": {"sizeLimit": "20Gi"}}, "20Gi"),
        ((own, kept), {"persistentVolumeClaim": {"claimName": "cache"}}, None),
    ]:
        pod = dict(pods(rendered(*settings)))["prefill"]
        assert {"name": "cache", **source} in pod["spec"]["volumes"]
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["requests"].get("ephemeral-storage") == requested
        assert "ephemeral-storage" not in resources["limits"]


def test_only_the_init_container_can_write_models():
    for component, pod in pods(rendered(*EVERYTHING)):
        if component in NODES:
            mounts = {
                container["name"]: mount
                for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
                for mount in container["volumeMounts"]
                if mount["name"] == "models"
            }
            assert mounts[component]["readOnly"]
            assert not mounts["models"]["readOnly"]


@pytest.mark.parametrize("component", SERVING)
def test_a_pod_that_loads_or_drains_is_unready_but_not_killed(component):
    pod = dict(pods(rendered()))[component]
    (container,) = pod["spec"]["containers"]
    # /health is 503 while a node loads or drains, and while a router has no pair; /live is not.
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    if component == "router":
        assert container["startupProbe"]["httpGet"]["path"] == "/live"
    for kind in ("startup", "liveness", "readiness"):
        assert container[f"{kind}Probe"]["httpGet"]["port"] in ports(pod)


def test_nodes_have_the_startup_timeout_to_load_and_routers_wait_for_them():
    manifests = rendered("prefill.startupTimeoutSeconds=3601")
    (container,) = dict(pods(manifests))["prefill"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3601
    (deployment,) = of_kind(manifests, "Deployment").values()
    assert deployment["spec"]["progressDeadlineSeconds"] >= 3601 + 120


def test_a_rolling_update_starts_a_router_before_it_stops_one():
    (deployment,) = of_kind(rendered("router.replicas=1"), "Deployment").values()
    limits = deployment["spec"]["strategy"]["rollingUpdate"]
    assert (limits["maxUnavailable"], limits["maxSurge"]) == (0, 1)


def test_nodes_load_in_parallel_and_are_replaced_without_manual_deletes():
    for nodes in of_kind(rendered(), "StatefulSet").values():
        assert nodes["spec"]["podManagementPolicy"] == "Parallel"
        assert nodes["spec"]["updateStrategy"]["type"] == "RollingUpdate"


def test_an_autoscaler_owns_the_replicas_of_its_target():
    manifests = rendered(*EVERYTHING)
    targets = of_kind(manifests, "StatefulSet", "Deployment")
    scalers = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    assert scalers.keys() == targets.keys()
    for name, scaler in scalers.items():
        reference = scaler["spec"]["scaleTargetRef"]
        assert (reference["kind"], reference["name"]) == (targets[name]["kind"], name)
        assert "replicas" not in targets[name]["spec"]


def test_keda_keeps_the_replicas_when_prometheus_has_no_data():
    (scaler,) = of_kind(rendered(*EVERYTHING), "ScaledObject").values()
    asked = [each["metadata"] for each in scaler["spec"]["triggers"] if each["type"] != "cpu"]
    # KEDA's own default reads no data as 0.
    assert [each["ignoreNullValues"] for each in asked] == ["false"] * 2


def test_evicting_serving_pods_is_limited_unless_they_are_unhealthy():
    manifests = rendered()
    budgets = of_kind(manifests, "PodDisruptionBudget").values()
    for component, pod in pods(manifests):
        labels = pod["metadata"]["labels"]
        covering = [each for each in budgets if selects(each["spec"]["selector"], labels)]
        assert len(covering) == (component in SERVING)
    # Otherwise pods that load or crash would block draining their host.
    for budget in budgets:
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_an_upgrade_without_changes_restarts_no_pod():
    # Two renderings, each with a key of its own.
    first, second = (yaml.safe_load_all(template().stdout) for _ in range(2))
    assert dict(pods(tuple(first))) == dict(pods(tuple(second)))


@pytest.mark.parametrize(
    "change", ["auth.apiKeys={another}", "auth.clusterKey=another-secret-of-32-digits"]
)
def test_new_keys_restart_all_serving_pods(change):
    old, new = dict(pods(rendered())), dict(pods(rendered(change)))
    for component in SERVING:
        assert (
            old[component]["metadata"]["annotations"] != new[component]["metadata"]["annotations"]
        )


def test_each_install_generates_a_cluster_key_of_48_characters():
    found = re.findall(r'cluster-key: "(.+)"', template().stdout + template().stdout)
    assert len(set(found)) == 2
    assert all(len(base64.b64decode(key)) == 48 for key in found)
