"""The rendered command lines, read by Tandem's own parsers."""

import pytest

from tandem.frontend.options import read_keys
from tandem.kvtransfer.transports.nixl import ucx_settings
from tandem.node.flags import build_parser, read_options
from tandem.router.arguments import parse
from tests.deploy.container import start
from tests.deploy.helm import (
    CLUSTER_KEY,
    EXAMPLES,
    NAMESPACE,
    of_kind,
    pods,
    ports,
    rendered,
    selects,
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
    config, _ = read_options(build_parser(command, role, "", 0), role, argv)
    return config


def router_config(manifests, root):
    command, *argv = start(manifests, dict(pods(manifests))["router"], root / "router").args
    assert command == "lb"
    return parse(argv)


@pytest.mark.parametrize("values", ALL, ids=name)
@pytest.mark.parametrize("role", NODES)
def test_a_node_listens_on_its_pods_ports_and_has_time_to_drain(role, values, tmp_path):
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
def test_tp_equals_the_gpus_of_the_pod(role, values, tmp_path):
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


@pytest.mark.parametrize("role", NODES)
def test_a_hub_name_alone_gives_a_cpu_cluster_its_model(role, tmp_path):
    manifests = rendered("model.path=Qwen/Qwen2.5-0.5B-Instruct")
    config = node_config(manifests, role, tmp_path)
    assert config.model == "Qwen/Qwen2.5-0.5B-Instruct"
    spec = dict(pods(manifests))[role]["spec"]
    assert "initContainers" not in spec
    assert spec["containers"][0]["resources"]["limits"].keys() == {"memory"}  # no GPU


@pytest.mark.parametrize("values", ALL, ids=name)
def test_a_router_listens_on_its_pods_port_and_has_time_to_drain(values, tmp_path):
    manifests = rendered(values=values)
    pod = dict(pods(manifests))["router"]
    config = router_config(manifests, tmp_path)
    assert ports(pod) == {"http": config.port}
    needed_s = config.shutdown_delay_s + config.drain_timeout_s + 10
    assert pod["spec"]["terminationGracePeriodSeconds"] >= needed_s


@pytest.mark.parametrize("values", ALL, ids=name)
def test_routers_resolve_the_headless_service_of_each_role(values, tmp_path):
    manifests = rendered(values=values)
    by_name, services = dict(pods(manifests)), of_kind(manifests, "Service")
    targets = router_config(manifests, tmp_path).dns
    assert [target.role for target in targets] == ["prefill", "decode"]
    for target in targets:
        service, _, domain = target.host.partition(".")
        assert domain == f"{NAMESPACE}.svc.cluster.local."
        spec = services[service]["spec"]
        assert spec["clusterIP"] == "None"
        # A pod that loads or drains stays in DNS: the router checks nodes itself.
        assert spec["publishNotReadyAddresses"]
        assert target.port == ports(by_name[target.role])["http"]
        selected = [
            component
            for component, pod in by_name.items()
            if selects({"matchLabels": spec["selector"]}, pod["metadata"]["labels"])
        ]
        assert selected == [target.role]


def test_two_releases_in_a_namespace_do_not_share_nodes():
    ours, theirs = rendered(), rendered(release="green")
    for service in of_kind(ours, "Service").values():
        selector = {"matchLabels": service["spec"]["selector"]}
        assert not any(selects(selector, pod["metadata"]["labels"]) for _, pod in pods(theirs))


def test_all_processes_get_the_cluster_key_and_api_keys(tmp_path):
    manifests = rendered(*KEYS)
    by_component = dict(pods(manifests))
    configs = [node_config(manifests, role, tmp_path) for role in NODES]
    configs.append(router_config(manifests, tmp_path))
    for config in configs:
        assert read_keys(config.http) == ("client-key-1", "client-key-2")
    for component in (*NODES, "router"):
        env = start(manifests, by_component[component], tmp_path / "again" / component).env
        assert env["TANDEM_CLUSTER_KEY"] == CLUSTER_KEY
    assert configs[-1].admission.key_limits


def test_auth_insecure_starts_nodes_without_a_cluster_key(tmp_path):
    manifests = rendered("auth.insecure=true")
    assert not of_kind(manifests, "Secret")
    for role in NODES:
        assert node_config(manifests, role, tmp_path).is_insecure


def test_simulated_nodes_use_the_profile_of_the_values(tmp_path):
    manifests = rendered("simulation.enabled=true", "simulation.profile.prefill.base_ms=5")
    for role in NODES:
        simulation = node_config(manifests, role, tmp_path).engine.simulation
        assert simulation.profile.prefill.base_ms == 5


@pytest.mark.parametrize("values", EXAMPLES, ids=name)
@pytest.mark.parametrize("role", NODES)
def test_the_transport_accepts_the_ucx_settings_of_examples(role, values, tmp_path, monkeypatch):
    manifests = rendered(values=values)
    for variable, value in start(manifests, dict(pods(manifests))[role], tmp_path).env.items():
        if variable.startswith("UCX_"):
            monkeypatch.setenv(variable, value)
    ucx_settings("")


@pytest.mark.parametrize("role", NODES)
def test_vllm_nodes_get_their_image_and_flags(role, tmp_path):
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
