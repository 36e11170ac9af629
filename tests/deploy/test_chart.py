"""What the chart renders to: manifests that Kubernetes takes, and that agree with each other."""

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
    Manifest,
    helm,
    of_kind,
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
    """Raise unless a manifest, as JSON, is one of that version, without a field that it does not know.

    What is not Kubernetes' own goes by the fields of its operator that the chart uses.
    """
    manifest = json.loads(text)
    schema = CUSTOM.get(f"{manifest['kind']} {manifest['apiVersion']}")
    if schema is None:
        kubernetes_validate.validate(manifest, version, strict=True)
    else:
        jsonschema.validate(manifest["spec"], {**schema, "definitions": CUSTOM["definitions"]})


@pytest.mark.parametrize("major", [3, 4])
def test_both_majors_of_helm_find_nothing_to_complain_of(major):
    for sets in ((), EVERYTHING):
        flags = [flag for each in sets for flag in ("--set", each)]
        ran = helm(major, "lint", "--strict", str(CHART), *flags)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@over_all_values
def test_both_majors_of_helm_render_the_same(sets, values):
    def by_name(major):
        manifests = rendered(*sets, values=values, major=major)
        return {(each["kind"], each["metadata"]["name"]): each for each in manifests}

    assert by_name(3) == by_name(4)


@over_all_values
def test_kubernetes_takes_every_manifest(sets, values):
    for manifest in rendered(*sets, values=values):
        check(json.dumps(manifest, sort_keys=True), "1.37.0")


def test_so_does_the_oldest_version_whose_schemas_are_kept():
    for manifest in rendered(*EVERYTHING, version="1.25.0"):
        check(json.dumps(manifest, sort_keys=True), "1.25.0")


def test_an_old_cluster_gets_the_same_in_the_versions_that_it_has():
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


def test_everything_is_everything_that_the_templates_make():
    kinds = {each["kind"] for each in rendered(*EVERYTHING)}
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*.yaml"))
    assert kinds == set(re.findall(r"^kind: (\w+)$", templates, re.MULTILINE))


@over_all_values
def test_every_selector_takes_the_pods_of_its_component_and_no_others(sets, values):
    manifests = rendered(*sets, values=values)
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(manifests)}
    for each in manifests:
        spec, own = each.get("spec", {}), each["metadata"]["labels"]["app.kubernetes.io/component"]
        selector = spec.get("podSelector") or spec.get("selector")
        if each["kind"] == "PodMonitor" or selector is None:
            continue
        wanted = selector if "matchLabels" in selector else {"matchLabels": selector}
        assert [name for name in labels if selects(wanted, labels[name])] == [own], each["kind"]


def test_the_monitor_scrapes_every_serving_pod_at_a_port_that_it_has():
    manifests = rendered(*EVERYTHING)
    (monitor,) = of_kind(manifests, "PodMonitor").values()
    # The job's name, by which an alert knows our targets.
    for _, pod in pods(manifests):
        assert pod["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "tandem"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression == {
        "key": "app.kubernetes.io/component",
        "operator": "In",
        "values": list(SERVING),
    }
    for component, pod in pods(manifests):
        assert selects(monitor["spec"]["selector"], pod["metadata"]["labels"])
        assert (endpoint["port"] in ports(pod)) == (component in SERVING)


@over_all_values
def test_services_lead_to_ports_that_the_pods_have(sets, values):
    manifests = rendered(*sets, values=values)
    by_component = dict(pods(manifests))
    for service in of_kind(manifests, "Service").values():
        pod = by_component[service["spec"]["selector"]["app.kubernetes.io/component"]]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(pod)
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports(pod)[port["targetPort"]]  # no proxy to translate it


def allowed(manifests, role):
    """Return who may connect to a node, each with the ports."""
    rules = of_kind(manifests, "NetworkPolicy")[f"blue-tandem-{role}"]["spec"]["ingress"]
    found = {}
    for rule in rules:
        for peer in rule["from"]:
            who = peer.get("podSelector", {}).get("matchLabels", {})
            key = who.get("app.kubernetes.io/component", "metrics")
            found[key] = [port.get("endPort", port["port"]) for port in rule["ports"]]
    return found


@pytest.mark.parametrize("role", NODES)
def test_a_policy_opens_the_ports_of_the_pod_each_to_whom_it_is_for(role):
    manifests = rendered(*EVERYTHING)
    opened = allowed(manifests, role)
    assert opened == {
        "router": ["http", "engine"],
        "prefill": ["bootstrap", 60999],
        "decode": ["bootstrap", 60999],
        "metrics": ["http"],
    }
    named = {port for some in opened.values() for port in some if isinstance(port, str)}
    assert named == ports(dict(pods(manifests))[role]).keys()


def test_a_policy_for_routers_lets_in_whom_it_names_scrapers_and_the_test():
    (rule,) = of_kind(rendered(*EVERYTHING), "NetworkPolicy")["blue-tandem-router"]["spec"][
        "ingress"
    ]
    peers = [next(iter(peer.values()))["matchLabels"] for peer in rule["from"]]
    assert peers[:2] == [{"app": "gateway"}, {"name": "monitoring"}]
    assert selects({"matchLabels": peers[2]}, dict(pods(rendered()))["test"]["metadata"]["labels"])


@over_all_values
def test_only_routers_get_a_token_and_it_may_list_pods_alone(sets, values):
    manifests = rendered(*sets, values=values)
    for component, pod in pods(manifests):
        assert pod["spec"]["automountServiceAccountToken"] == (component == "router")
    (role,) = of_kind(manifests, "Role").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    (binding,) = of_kind(manifests, "RoleBinding").values()
    (subject,) = binding["subjects"]
    account = dict(pods(manifests))["router"]["spec"]["serviceAccountName"]
    assert (binding["roleRef"]["name"], subject["name"]) == (role["metadata"]["name"], account)
    assert account in of_kind(manifests, "ServiceAccount")


@over_all_values
def test_no_pod_has_more_rights_than_it_needs(sets, values):
    """What the level `restricted` of the pod security standards asks for, but where RDMA needs root."""
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
def test_every_mount_has_its_volume_and_every_volume_its_object(sets, values):
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


def test_a_node_reads_its_models_and_only_the_init_container_writes_them():
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


def test_probes_wait_for_big_weights_and_then_ask_what_each_is_for():
    for component, pod in pods(rendered("prefill.startupTimeoutSeconds=3601")):
        if component == "test":
            continue
        (container,) = pod["spec"]["containers"]
        probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
        paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        # A router is not killed for nodes that still load.
        first = "/live" if component == "router" else "/health"
        assert paths == {"startup": first, "liveness": "/live", "readiness": "/health"}
        assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
        if component == "prefill":
            assert (
                probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 3601
            )


def test_a_router_is_not_given_up_while_nodes_may_still_load():
    deployment = of_kind(rendered("prefill.startupTimeoutSeconds=3601"), "Deployment")
    assert deployment["blue-tandem-router"]["spec"]["progressDeadlineSeconds"] >= 3601 + 120


def test_what_scales_a_role_names_what_there_is_and_leaves_replicas_to_it():
    manifests = rendered(*EVERYTHING)
    targets = of_kind(manifests, "StatefulSet", "Deployment")
    scalers = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    assert scalers.keys() == targets.keys()
    for name, scaler in scalers.items():
        reference = scaler["spec"]["scaleTargetRef"]
        assert (reference["kind"], reference["name"]) == (targets[name]["kind"], name)
        assert "replicas" not in targets[name]["spec"]


def test_a_prometheus_that_knows_nothing_takes_no_pods_away():
    (scaler,) = of_kind(rendered(*EVERYTHING), "ScaledObject").values()
    asked = [each["metadata"] for each in scaler["spec"]["triggers"] if each["type"] != "cpu"]
    # KEDA's own default reads no data as 0.
    assert [each["ignoreNullValues"] for each in asked] == ["false"] * 2


def test_budgets_are_there_for_what_serves():
    budgets = of_kind(rendered(), "PodDisruptionBudget")
    assert sorted(budgets) == [f"blue-tandem-{component}" for component in sorted(SERVING)]
    # A host can be emptied of pods that load or crash, however many of them there are.
    for budget in budgets.values():
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_an_upgrade_that_changes_nothing_starts_no_pod_anew():
    # Two renderings, each with a key of its own.
    first, second = (yaml.safe_load_all(template().stdout) for _ in range(2))
    assert dict(pods(tuple(first))) == dict(pods(tuple(second)))


@pytest.mark.parametrize(
    "change", ["auth.apiKeys={another}", "auth.clusterKey=another-secret-of-32-digits"]
)
def test_new_keys_start_all_serving_pods_anew(change):
    old, new = dict(pods(rendered())), dict(pods(rendered(change)))
    for component in SERVING:
        assert (
            old[component]["metadata"]["annotations"] != new[component]["metadata"]["annotations"]
        )


def test_a_key_is_made_where_none_is_given_and_is_long_enough():
    found = re.findall(r'cluster-key: "(.+)"', template().stdout + template().stdout)
    assert len(set(found)) == 2
    assert all(len(base64.b64decode(key)) == 48 for key in found)


@pytest.mark.parametrize("major", [3, 4])
def test_the_name_of_a_model_is_all_that_a_cluster_on_cpus_needs(major):
    manifests = rendered("model.path=Qwen/Qwen2.5-0.5B-Instruct", major=major)
    for role in NODES:
        [pod] = [pod for name, pod in pods(manifests) if name.endswith(role)]
        [container] = pod["spec"]["containers"]
        assert "--model=Qwen/Qwen2.5-0.5B-Instruct" in container["args"]
        assert not any("--device" in argument for argument in container["args"])
        assert "initContainers" not in pod["spec"]
