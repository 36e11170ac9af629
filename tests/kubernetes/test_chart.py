"""The Helm chart on a real control plane, its pods real processes: installed, tested, updated under load, scaled, removed."""

import asyncio
import contextlib
import json
import shutil
import subprocess

import pytest

from tests.e2e.clients import generate
from tests.e2e.cluster import ask
from tests.e2e.test_rolling_update import NUM_CLIENTS, under_load
from tests.kubernetes.conftest import CHART, HELM
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.pods import RELEASE
from tests.patience import eventually

NAMESPACE = "serving"
TIMEOUT = "600s"  # what is well takes a tenth of it
VALUES = {
    "model": {"path": "/models/described"},
    "simulation": {
        "enabled": True,
        "kv": "none",
        "profile": {"prefill": {"per_token_ms": 0.05}, "decode": {"base_ms": 8}},
    },
    "prefill": {"replicas": 2},
    "decode": {"replicas": 2},
    "router": {"replicas": 2},
}


class Release:
    """One release of the chart."""

    def __init__(self, control_plane, kubelet: Kubelet, values: str) -> None:
        self._plane, self._kubelet, self._values = control_plane, kubelet, values
        self._api = control_plane.admin

    def helm(self, *argv: str) -> str:
        done = subprocess.run(
            [HELM, *argv, "--namespace", NAMESPACE],
            capture_output=True,
            text=True,
            check=False,
            env=self._plane.environment(),
        )
        assert done.returncode == 0, f"helm {argv}: {done.stderr}{done.stdout}\n{self.state()}"
        return done.stdout

    def install(self) -> None:
        waiting = ("--wait", "--timeout", TIMEOUT)
        self.helm("install", RELEASE, CHART, "--values", self._values, *waiting)

    def upgrade(self, *flags: str) -> None:
        waiting = ("--wait", "--timeout", TIMEOUT)
        self.helm("upgrade", RELEASE, CHART, "--values", self._values, *waiting, *flags)

    def kubectl(self, *argv: str) -> str:
        return self._plane.kubectl("--namespace", NAMESPACE, *argv)

    def state(self) -> str:
        """Return all that helps to see what went wrong."""
        logs = self._kubelet.log_of(RELEASE)
        return f"{self.kubectl('get', 'pods', '-o', 'wide')}\n{self._kubelet.problems}\n{logs}"[
            -12000:
        ]

    def router_url(self) -> str:
        """Return where clients reach the routers: their Service, which every new connection goes through."""
        spec = self._api.get(f"/api/v1/namespaces/{NAMESPACE}/services/{RELEASE}-tandem-router")[
            "spec"
        ]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def pods(self, *components: str) -> dict[str, dict]:
        """Return pods by their uid; without components all that serve."""
        wanted = components or ("prefill", "decode", "router")
        found = self._api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        return {
            pod["metadata"]["uid"]: pod
            for pod in found
            if pod["metadata"]["labels"]["app.kubernetes.io/component"] in wanted
        }

    def up(self) -> set[str]:
        """Return the nodes that a router uses."""
        with contextlib.suppress(OSError):
            told = ask(f"{self.router_url()}/nodes")[1]
            return {node["url"] for node in told["nodes"] if node["state"] == "up"}
        return set()

    def addresses(self, component: str, port: int) -> set[str]:
        return {
            f"http://{pod['status'].get('podIP')}:{port}" for pod in self.pods(component).values()
        }


@pytest.fixture(scope="module")
def described_model(embedded_model, tmp_path_factory):
    """A directory of a host that every user may read: all of the embedded model but its weights."""
    root = tmp_path_factory.mktemp("models")
    root.chmod(0o755)
    directory = root / "described"
    directory.mkdir()
    for pattern in ("*.json*", "*.jinja"):
        for file in embedded_model.glob(pattern):
            shutil.copyfile(file, directory / file.name)
    return directory


@pytest.fixture(scope="module")
def release(control_plane, described_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kubelet")
    volume = {"type": "hostPath", "hostPath": str(described_model.parent)}
    values = {**VALUES, "model": {**VALUES["model"], "volume": volume}}
    file = directory / "values.json"
    file.write_text(json.dumps(values))
    control_plane.kubectl("create", "namespace", NAMESPACE)
    control_plane.wait_for_account(NAMESPACE)
    with Kubelet(control_plane.admin, directory) as kubelet:
        one = Release(control_plane, kubelet, str(file))
        one.install()
        yield one
        assert kubelet.problems == []


def test_an_installed_chart_answers_through_its_service(release):
    answer = generate(release.router_url(), input_ids=[5, 6, 7], max_new_tokens=5)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    nodes = release.addresses("prefill", 7000) | release.addresses("decode", 7001)
    assert len(nodes) == 4
    assert eventually(lambda: release.up() == nodes), release.state()


def test_helm_test_passes(release):
    told = release.helm("test", RELEASE, "--timeout", TIMEOUT)
    assert "Phase:          Succeeded" in told


async def test_an_upgrade_and_a_rollback_under_load_lose_no_request(release, described_model):
    url = release.router_url()
    async with under_load(lambda: url, described_model) as load:
        await load.more(NUM_CLIENTS)
        before = set(release.pods())
        for change in (
            lambda: release.upgrade("--set", "logLevel=debug"),
            lambda: release.helm("rollback", RELEASE, "--wait", "--timeout", TIMEOUT),
        ):
            await asyncio.to_thread(change)
            assert await asyncio.to_thread(eventually, lambda: len(release.pods()) == 6), (
                release.state()
            )
            after = set(release.pods())
            assert not before & after, "each pod was replaced"
            before = after
            await load.more(NUM_CLIENTS)
    assert load.num_answered > 0


async def test_decode_is_scaled_up_and_down_under_load(release, described_model):
    url, stateful_set = release.router_url(), f"statefulset/{RELEASE}-tandem-decode"

    def scale(count: int) -> None:
        release.kubectl("scale", stateful_set, f"--replicas={count}")
        wanted = lambda: release.addresses("decode", 7001)  # noqa: E731
        assert eventually(lambda: len(wanted()) == count), release.state()
        assert eventually(
            lambda: {node for node in release.up() if node.endswith(":7001")} == wanted()
        ), release.state()

    async with under_load(lambda: url, described_model) as load:
        for count in (3, 1, 2):
            await asyncio.to_thread(scale, count)
            await load.more(NUM_CLIENTS)


def test_uninstalling_leaves_nothing(release):
    release.helm("uninstall", RELEASE, "--wait", "--timeout", TIMEOUT)
    assert eventually(lambda: not release.pods()), release.state()
    kinds = release.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith("events")]
    wanted = {"serviceaccount/default", "configmap/kube-root-ca.crt", TEST_POD}
    assert eventually(lambda: left(release, kinds) == wanted), left(release, kinds)
    release.kubectl("delete", TEST_POD)


# Helm leaves it, for `helm test --logs` and whoever wants to read them later.
TEST_POD = f"pod/{RELEASE}-tandem-test"


def left(release: Release, kinds: list[str]) -> set[str]:
    """Return what is in the namespace, tokens of accounts apart."""
    found = release.kubectl("get", ",".join(kinds), "-o", "name").split()
    return {name for name in found if "-token-" not in name}
