"""What the chart starts is what the product takes: its own parsers read the rendered command lines."""

import pytest

from tandem.kvtransfer.transports.nixl import check_environment
from tandem.node.flags import build_parser, read_config
from tandem.router.arguments import parse
from tests.deploy.container import start
from tests.deploy.helm import (
    CLUSTER_KEY,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    of_kind,
    pods,
    ports,
    rendered,
)

NODES = ("prefill", "decode")
ALL = [None, *EXAMPLES]
KEYS = (
    "auth.apiKeys={client-key-1,client-key-2}",
    "router.keyLimits=[default]\nrequests_in_flight = 4\n",
)


def name(path):
    return path.stem if path else "defaults"


def node_config(manifests, role, root):
    started = start(manifests, dict(pods(manifests))[role], root / role)
    command, *argv = started.args
    assert command == role
    config, _ = read_config(build_parser(command, role, "", 0), role, argv)
    return config


def router_config(manifests, root):
    command, *argv = start(manifests, dict(pods(manifests))["router"], root / "router").args
    assert command == "lb"
    return parse(argv)


@pytest.mark.parametrize("values", ALL, ids=name)
@pytest.mark.parametrize("role", NODES)
def test_a_node_listens_where_its_pod_says_and_drains_as_long_as_it_is_given(
    role, values, tmp_path
):
    manifests = rendered(values=values)
    pod = dict(pods(manifests))[role]
    config = node_config(manifests, role, tmp_path)
    assert ports(pod) == {
        "http": config.port,
        "engine": config.engine_port,
        "bootstrap": config.transfer.bootstrap_port,
    }
    assert pod["spec"]["terminationGracePeriodSeconds"] >= config.drain_timeout_s + 10
    assert config.zone == "zone-a"


@pytest.mark.parametrize("values", ALL, ids=name)
@pytest.mark.parametrize("role", NODES)
def test_a_node_is_split_over_as_many_gpus_as_its_pod_has(role, values, tmp_path):
    manifests = rendered(values=values)
    (container,) = dict(pods(manifests))[role]["spec"]["containers"]
    engine = node_config(manifests, role, tmp_path).engine
    devices = {
        kind: limits.get("nvidia.com/gpu") for kind, limits in container["resources"].items()
    }
    if engine.device == "cpu":
        assert devices == {"requests": None, "limits": None}
    else:
        assert devices == {"requests": str(engine.tp_size), "limits": str(engine.tp_size)}
        assert engine.device == ("cuda" if engine.tp_size > 1 else "cuda:0")


@pytest.mark.parametrize("values", ALL, ids=name)
def test_a_router_listens_where_its_pod_says_and_has_time_to_leave(values, tmp_path):
    manifests = rendered(values=values)
    pod = dict(pods(manifests))["router"]
    config = router_config(manifests, tmp_path)
    assert ports(pod) == {"http": config.port}
    needed_s = config.shutdown_delay_s + config.drain_timeout_s + 10
    assert pod["spec"]["terminationGracePeriodSeconds"] >= needed_s


@pytest.mark.parametrize("values", ALL, ids=name)
def test_the_labels_that_routers_follow_are_those_of_the_nodes_alone(values, tmp_path):
    manifests = rendered(values=values)
    target = router_config(manifests, tmp_path).kubernetes
    for role, selector in (
        ("prefill", target.prefill_selector),
        ("decode", target.decode_selector),
    ):
        wanted = dict(pair.split("=") for pair in selector.split(","))
        found = [
            component
            for component, pod in pods(manifests)
            if wanted.items() <= pod["metadata"]["labels"].items()
        ]
        assert found == [role]


def test_two_releases_of_a_namespace_do_not_follow_each_others_pods(tmp_path):
    target = router_config(rendered(), tmp_path).kubernetes
    assert f"app.kubernetes.io/instance={RELEASE}," in target.prefill_selector
    assert f"app.kubernetes.io/instance={RELEASE}," in target.decode_selector


def test_routers_that_find_nodes_by_dns_ask_for_the_headless_services(tmp_path):
    manifests = rendered("discovery.mode=dns")
    services = of_kind(manifests, "Service")
    config = router_config(manifests, tmp_path)
    assert config.kubernetes is None
    for target in config.dns:
        service = services[target.host.partition(".")[0]]
        assert target.host.endswith(f".{NAMESPACE}.svc.cluster.local")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == target.role
        assert target.port in {port["port"] for port in service["spec"]["ports"]}
    assert [target.role for target in config.dns] == ["prefill", "decode"]
    assert not of_kind(manifests, "ServiceAccount", "Role", "RoleBinding")


def test_all_processes_get_the_same_keys(tmp_path):
    manifests = rendered(*KEYS)
    by_component = dict(pods(manifests))
    configs = [node_config(manifests, role, tmp_path) for role in NODES]
    configs.append(router_config(manifests, tmp_path))
    for config in configs:
        assert config.http.api_keys == ("client-key-1", "client-key-2")
    for component in (*NODES, "router"):
        env = start(manifests, by_component[component], tmp_path / "again" / component).env
        assert env["TANDEM_CLUSTER_KEY"] == CLUSTER_KEY
    assert configs[-1].admission.key_limits is not None


def test_without_a_cluster_key_nodes_are_told_that_this_is_meant(tmp_path):
    manifests = rendered("auth.insecure=true")
    assert not of_kind(manifests, "Secret")
    for role in NODES:
        assert node_config(manifests, role, tmp_path).is_insecure


def test_a_simulated_cluster_takes_its_profile_from_the_values(tmp_path):
    manifests = rendered("simulation.enabled=true", "simulation.profile.prefill.base_ms=5")
    for role in NODES:
        simulation = node_config(manifests, role, tmp_path).engine.simulation
        assert simulation.profile.prefill.base_ms == 5


@pytest.mark.parametrize("values", EXAMPLES, ids=name)
@pytest.mark.parametrize("role", NODES)
def test_what_examples_tell_ucx_is_what_the_transport_takes(role, values, tmp_path, monkeypatch):
    manifests = rendered(values=values)
    for variable, value in start(manifests, dict(pods(manifests))[role], tmp_path).env.items():
        if variable.startswith("UCX_"):
            monkeypatch.setenv(variable, value)
    check_environment()


@pytest.mark.parametrize("role", NODES)
def test_nodes_run_vllm_in_its_image_with_its_flags(role, tmp_path):
    sets = ("engine=vllm", "vllm.image=our/vllm:1", "vllm.args={--enforce-eager,--block-size=64}")
    manifests = rendered(*sets)
    config = node_config(manifests, role, tmp_path)
    assert (config.simulation.engine, config.vllm_args) == (
        "vllm",
        ("--enforce-eager", "--block-size=64"),
    )
    images = {
        name: pod["spec"]["containers"][0]["image"] for name, pod in dict(pods(manifests)).items()
    }
    assert images[role] == "our/vllm:1" != images["router"]
