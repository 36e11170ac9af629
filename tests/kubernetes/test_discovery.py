"""The source of pods against a real API server: what it knows follows what the server knows."""

import asyncio

import pytest

from tandem.router.config import KubernetesTarget
from tandem.router.discovery import KubernetesSource
from tests.kubernetes.pods import Pods
from tests.patience import PATIENCE_S

SELECTOR = "app=tandem,role=decode"


async def knows(source: KubernetesSource, *addresses: str) -> None:
    """Ask again and again until these are all that it finds."""
    wanted = {f"http://{address}:7000" for address in addresses}
    async with asyncio.timeout(PATIENCE_S):
        while {member.url for member in await source.find()} != wanted:  # noqa: ASYNC110 - the API's work
            await asyncio.sleep(0.05)


@pytest.fixture
def account(control_plane, namespace):
    """Files of a service account that may list pods, as a router's pod has them."""
    common = ("--namespace", namespace)
    verbs = ("--verb", "list", "--resource", "pods")
    control_plane.kubectl("create", "serviceaccount", "router", *common)
    control_plane.kubectl("create", "role", "router", *verbs, *common)
    bound = ("--role", "router", f"--serviceaccount={namespace}:router")
    control_plane.kubectl("create", "rolebinding", "router", *bound, *common)
    return control_plane.service_account(namespace, "router")


def source_of(control_plane, account, selector=SELECTOR) -> KubernetesSource:
    target = KubernetesTarget(api_url=control_plane.url, account_dir=str(account))
    return KubernetesSource(target, "decode", selector)


async def test_a_pod_is_a_node_from_when_it_runs_until_it_is_told_to_end(
    control_plane, namespace, account
):
    pods, source = Pods(control_plane.admin, namespace), source_of(control_plane, account)
    pods.create("first", "decode")
    await knows(source)
    pods.run("first", "10.244.9.1", ready=False)  # the router sees by itself that it serves
    await knows(source, "10.244.9.1")
    pods.create("other-role", "prefill")
    pods.run("other-role", "10.244.9.2")
    pods.create("second", "decode")
    pods.run("second", "10.244.9.3")
    await knows(source, "10.244.9.1", "10.244.9.3")
    pods.run("first", "10.244.9.1", ready=True)

    ending = pods.delete("first")
    assert ending["metadata"]["deletionTimestamp"]
    assert {one["status"] for one in ending["status"]["conditions"]} == {"True"}, "ready still"
    await knows(source, "10.244.9.3")
    pods.forget("first")
    pods.create("first", "decode")  # as a StatefulSet names the one after it
    pods.run("first", "10.244.9.4")
    await knows(source, "10.244.9.3", "10.244.9.4")


async def test_labels_decide_at_any_time_who_is_a_node(control_plane, namespace, account):
    pods, source = Pods(control_plane.admin, namespace), source_of(control_plane, account)
    prefills = source_of(control_plane, account, "app=tandem,role=prefill")
    for index in (1, 2):
        pods.create(f"pod-{index}", "decode")
        pods.run(f"pod-{index}", f"10.244.9.{index}")
    await knows(source, "10.244.9.1", "10.244.9.2")
    pods.label("pod-1", role="prefill")
    await knows(source, "10.244.9.2")
    await knows(prefills, "10.244.9.1")
    pods.label("pod-1", role="decode")
    await knows(prefills)
    await knows(source, "10.244.9.1", "10.244.9.2")
    pods.label("pod-2", app=None)
    await knows(source, "10.244.9.1")
