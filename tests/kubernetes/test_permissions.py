"""What a router may ask of the API: it says what it lacks, works once it has it, and the chart gives it no more."""

import json
import subprocess
from contextlib import contextmanager

import pytest

from tandem.up import free_ports
from tests.e2e.cluster import Process, ask, eventually
from tests.kubernetes.conftest import CHART, HELM
from tests.kubernetes.control_plane import ApiError
from tests.kubernetes.pods import Pods

SELECTORS = (
    *("--kubernetes-prefill-selector", "app=tandem,role=prefill"),
    *("--kubernetes-decode-selector", "app=tandem,role=decode"),
)


@contextmanager
def proxy(control_plane, account):
    """`kubectl proxy` as a service account; yields its URL."""
    port = free_ports(1)[0]
    kubeconfig = control_plane.kubeconfig_of((account / "token").read_text())
    command = ["kubectl", "--kubeconfig", str(kubeconfig), "proxy", f"--port={port}"]
    with subprocess.Popen(
        command, env=control_plane.environment(), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it serves
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextmanager
def router(*flags: str):
    """A router's process and URL."""
    port = free_ports(1)[0]
    process = Process("lb", "--port", str(port), *flags)
    url = f"http://127.0.0.1:{port}"
    try:
        yield process, url
    finally:
        process.stop()


def nodes(url: str) -> dict:
    try:
        return ask(f"{url}/nodes")[1]
    except OSError:  # it starts
        return {"sources": [], "nodes": []}


def problems(url: str) -> list[str]:
    return [source["problem"] for source in nodes(url)["sources"] if source["problem"]]


def test_a_router_says_which_permission_it_lacks_and_works_once_it_has_it(control_plane, namespace):
    control_plane.kubectl("create", "serviceaccount", "router", "--namespace", namespace)
    account = control_plane.service_account(namespace, "router")
    pods = Pods(control_plane.admin, namespace)
    for role, address in (("prefill", "127.0.0.1"), ("decode", "127.0.0.2")):
        pods.create(role, role, port=1)
        pods.run(role, address)
    where = ("--discover-kubernetes", "--kubernetes-namespace", namespace, *SELECTORS)
    with (
        proxy(control_plane, account) as api,
        router(*where, "--kubernetes-api", api) as (process, url),
    ):
        assert eventually(lambda: len(problems(url)) == 2), process.output()
        needed = "resources: [pods], verbs: [list]"
        who = f"system:serviceaccount:{namespace}:router"
        for said in (*problems(url), process.output()):
            assert f"may not list pods in namespace '{namespace}'" in said
            assert who in said
            assert needed in said

        bind(control_plane, namespace, "list")
        assert eventually(lambda: not problems(url)), process.output()
        assert {node["url"] for node in nodes(url)["nodes"]} == {
            "http://127.0.0.1:1",
            "http://127.0.0.2:1",
        }


def bind(control_plane, namespace: str, verb: str) -> None:
    """Give the router's account this verb on pods."""
    meta = {"name": "router", "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    role = {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": [verb]}]}
    binding = {
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "router"},
        "subjects": [{"kind": "ServiceAccount", "name": "router", "namespace": namespace}],
    }
    for kind, body in (("Role", role), ("RoleBinding", binding)):
        manifest = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": meta, **body}
        control_plane.kubectl("apply", "--filename", "-", text=json.dumps(manifest))


def test_the_charts_role_lets_routers_follow_pods_and_do_nothing_else(control_plane, namespace):
    rendered = subprocess.run(
        [HELM, "template", "it", CHART, "--namespace", namespace, "-s", "templates/rbac.yaml"],
        capture_output=True,
        text=True,
        check=True,
        env=control_plane.environment(),
    ).stdout
    control_plane.kubectl("apply", "--filename", "-", text=rendered)
    token = (control_plane.service_account(namespace, "it-tandem-router") / "token").read_text()
    router = control_plane.as_who_bears(token)

    def rules(where: str) -> list[tuple]:
        """Return what it may do there, without what everybody may."""
        review = {"spec": {"namespace": where}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        found = router.create(path, review)["status"]["resourceRules"]
        return [
            (rule["apiGroups"], rule["resources"], sorted(rule["verbs"]))
            for rule in found
            if rule["apiGroups"] != ["authorization.k8s.io"]
        ]

    assert eventually(lambda: rules(namespace) == [([""], ["pods"], ["list"])])
    assert rules("kube-system") == []
    assert router.get(f"/api/v1/namespaces/{namespace}/pods")["items"] == []
    for path in (f"namespaces/{namespace}/secrets", "pods", "nodes"):
        with pytest.raises(ApiError, match="forbidden") as refused:
            router.get(f"/api/v1/{path}")
        assert refused.value.status == 403
