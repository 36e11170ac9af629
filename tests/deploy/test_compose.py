"""The compose files: valid commands, nodes that the router and Prometheus reach, time to drain, isolation."""

import re
import shlex
from urllib.parse import urlsplit

import pytest
import yaml

from tandem.router.config import RouterConfig
from tests.deploy.commands import ROOT, config_of

COMPOSE = ROOT / "deploy/compose"
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
GRACE_S = 10  # what ending takes after the drain


def interpolated(text: str, **variables: str) -> str:
    return VARIABLE.sub(lambda found: variables.get(found[1], found[2] or ""), text)


def compose(*names: str, **variables: str) -> dict:
    """Return the files, later ones over earlier ones as far as these go: one level into each service."""
    merged: dict = {}
    for name in names:
        file = yaml.safe_load(interpolated((COMPOSE / name).read_text(), **variables))
        for key, section in file.items():
            if key == "services":
                for service, given in section.items():
                    merged.setdefault(key, {}).setdefault(service, {}).update(given)
            else:
                merged.setdefault(key, section)
    return merged


@pytest.fixture(
    params=[("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")], ids=["cpu", "gpu"]
)
def files(request):
    return request.param


@pytest.fixture
def secrets(tmp_path):
    (tmp_path / "api_keys").write_text("k" * 32)
    return tmp_path


def configs(files, secrets, **variables: str) -> dict:
    services = compose(*files, **variables)["services"]
    commands = {name: services[name]["command"] for name in ("prefill", "decode", "router")}
    there = {name: text.replace("/run/secrets", str(secrets)) for name, text in commands.items()}
    return {name: config_of(shlex.split(text)) for name, text in there.items()}


def test_commands_are_valid_and_the_router_lists_the_nodes(files, secrets):
    told = configs(files, secrets, TANDEM_NODE_FLAGS="--model /models/llama --page-size 32")
    router = told.pop("router")
    assert isinstance(router, RouterConfig)
    listed = {"prefill": router.prefills[0].url, "decode": router.decodes[0]}
    assert listed == {name: f"http://{name}:{node.port}" for name, node in told.items()}
    assert {node.host for node in [*told.values(), router]} == {"0.0.0.0"}
    assert {node.model for node in told.values()} == {"/models/llama"}
    assert told["prefill"].transfer.backend == told["decode"].transfer.backend
    (published,) = compose(*files)["services"]["router"]["ports"]
    assert published.rpartition(":")[2] == str(router.port)


def test_only_the_gpu_file_uses_gpus(secrets):
    told = configs(["compose.yaml"], secrets)
    assert {told[name].engine.device for name in ("prefill", "decode")} == {"cpu"}
    told = configs(["compose.yaml", "compose.gpu.yaml"], secrets)
    assert [told[name].engine.device for name in ("prefill", "decode")] == ["cuda:0", "cuda:1"]
    services = compose("compose.yaml", "compose.gpu.yaml")["services"]
    assert {services[name]["build"]["args"]["TARGET"] for name in ("prefill", "decode")} == {"cuda"}
    # One pid namespace: process 1, whose command line the health check reads, is decode's.
    health_url = services["prefill"]["environment"]["TANDEM_HEALTH_URL"]
    assert health_url == f"http://127.0.0.1:{told['prefill'].port}"


def test_services_have_time_to_drain_and_start_after_what_they_need(files, secrets):
    services = compose(*files)["services"]
    for name, config in configs(files, secrets).items():
        grace_s = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s >= config.drain_timeout_s + GRACE_S
        assert services[name]["healthcheck"]["test"][-1] == "/health"  # serving, not only alive
    # What depends is stopped first: the router's streams end before the nodes do.
    wanted = services["router"]["depends_on"]
    assert {name: wanted[name]["condition"] for name in ("prefill", "decode")} == dict.fromkeys(
        ("prefill", "decode"), "service_healthy"
    )


def test_nodes_are_not_published_and_others_only_on_loopback(files):
    merged = compose(*files)
    published = {name: s["ports"] for name, s in merged["services"].items() if "ports" in s}
    assert published.keys() == {"router", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert merged["networks"]["nodes"]["internal"]
    assert [merged["services"][name]["networks"] for name in ("prefill", "decode")] == [
        ["nodes"]
    ] * 2


def test_containers_are_read_only_and_gain_no_privileges(files):
    for name in ("prefill", "decode", "router"):
        service = compose(*files)["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_each_named_secret_volume_network_and_file_exists(files):
    merged = compose(*files)
    for service in merged["services"].values():
        assert set(service.get("secrets", ())) <= merged["secrets"].keys()
        assert set(service["networks"]) <= merged["networks"].keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                # The user's models and what this repository brings.
                assert source == "./models" or (COMPOSE / source).exists(), source
            else:
                assert source in merged["volumes"]


def test_prometheus_scrapes_each_role_and_grafana_reads_prometheus(secrets):
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {
        target for job in scraped for each in job["static_configs"] for target in each["targets"]
    }
    told = configs(["compose.yaml"], secrets)
    assert targets == {f"{name}:{config.port}" for name, config in told.items()}
    source = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())
    services = compose("compose.yaml")["services"]
    host = urlsplit(source["datasources"][0]["url"]).hostname
    assert set(services[host]["networks"]) & set(services["grafana"]["networks"])
