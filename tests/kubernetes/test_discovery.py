"""Discovery by DNS through the chart's headless Services, against a real endpoints controller."""

import subprocess

import pytest
import yaml

from tandem.router.config import DnsTarget
from tandem.router.membership.membership import SourceFailed
from tandem.router.membership.sources import DnsSource
from tests.kubernetes.conftest import CHART, HELM
from tests.kubernetes.name_server import DOMAIN
from tests.kubernetes.pods import RELEASE, Pods
from tests.patience import until_async

PORTS = {"prefill": 7000, "decode": 7001}


@pytest.fixture
def sources(control_plane, namespace):
    """What a router resolves, by role; the headless Services are there."""
    where = (RELEASE, CHART, "--namespace", namespace, "-s", "templates/services.yaml")
    rendered = subprocess.run(
        [HELM, "template", *where], capture_output=True, text=True, check=True
    ).stdout
    headless = [
        service
        for service in yaml.safe_load_all(rendered)
        if service["spec"].get("clusterIP") == "None"
    ]
    control_plane.kubectl("apply", "--filename", "-", text=yaml.safe_dump_all(headless))
    return {
        role: DnsSource(
            DnsTarget(f"{RELEASE}-tandem-{role}.{namespace}.svc.{DOMAIN}.", PORTS[role], role)
        )
        for role in PORTS
    }


async def found(source: DnsSource) -> set[str]:
    try:
        return {member.url for member in await source.find()}
    except SourceFailed:  # the name has no address
        return set()


async def has(source: DnsSource, *urls: str) -> None:
    """Resolve again and again until these are all the nodes."""

    async def are_found() -> bool:
        return await found(source) == set(urls)

    await until_async(are_found)


async def test_a_pod_is_a_node_while_it_loads_serves_and_drains(control_plane, namespace, sources):
    pods, source = Pods(control_plane.admin, namespace), sources["decode"]
    pods.create("first", "decode")
    pods.create("second", "decode")
    pods.run("second", "10.244.9.3", ready=True)
    await has(source, "http://10.244.9.3:7001")
    pods.run("first", "10.244.9.1", ready=False)
    await has(source, "http://10.244.9.1:7001", "http://10.244.9.3:7001")
    pods.run("first", "10.244.9.1", ready=True)
    assert pods.delete("first")["metadata"]["deletionTimestamp"]
    pods.run("first", "10.244.9.1", ready=False)  # /health is 503 during a drain
    pods.create("third", "decode")
    pods.run("third", "10.244.9.4")  # the controller has seen the drain once this one is there
    await has(source, *(f"http://10.244.9.{index}:7001" for index in (1, 3, 4)))
    pods.forget("first")
    await has(source, "http://10.244.9.3:7001", "http://10.244.9.4:7001")


async def test_each_role_has_a_name_of_its_own(control_plane, namespace, sources):
    pods = Pods(control_plane.admin, namespace)
    pods.create("one", "prefill")
    pods.run("one", "10.244.9.1")
    pods.create("other", "decode")
    pods.run("other", "10.244.9.2")
    await has(sources["prefill"], "http://10.244.9.1:7000")
    await has(sources["decode"], "http://10.244.9.2:7001")
    [member] = await sources["prefill"].find()
    assert (member.role, member.bootstrap_port) == ("prefill", None)


async def test_a_name_without_pods_does_not_resolve(sources):
    with pytest.raises(SourceFailed, match="not known"):
        await sources["decode"].find()
