"""The source of pods, against an API server that speaks the real protocol and says what a test tells it."""

import asyncio
import json
from collections import deque
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tandem.router.config import KubernetesTarget
from tandem.router.discovery_kubernetes import REFUSALS_BEFORE_LIST, ZONE_LABEL, KubernetesSource
from tandem.router.membership import Member
from tandem.wire.errors import ConfigInvalid
from tests.patience import PATIENCE_S

SELECTOR = "app=tandem,role=prefill"


def pod(name: str, ip: str = "", phase="Running", version="1", labels=None, **meta) -> dict:
    port = {"name": "http", "containerPort": 7000, "protocol": "TCP"}
    other = {"name": "bootstrap", "containerPort": 8998}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "resourceVersion": version, "labels": labels or {}, **meta},
        "spec": {"containers": [{"name": "sidecar"}, {"name": "n", "ports": [other, port]}]},
        "status": {"phase": phase, "podIP": ip, "conditions": [{"type": "Ready"}]},
    }


# As a real server sends it.
BOOKMARK = {
    "kind": "Pod",
    "metadata": {"resourceVersion": "15", "creationTimestamp": None},
    "spec": {"containers": None},
    "status": {},
}


def status(code: int, message: str) -> dict:
    return {"kind": "Status", "metadata": {}, "status": "Failure", "code": code, "message": message}


class FakeApi:
    """Pods of one namespace. Each watch takes the next script: events, then what ends it."""

    def __init__(self) -> None:
        self.pods, self.version = [], "10"
        self.refusals: deque = deque()
        self.scripts: deque = deque()
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == SELECTOR
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.refusals:
            refusal = self.refusals.popleft()
            return web.json_response(refusal, status=refusal["code"])
        if "watch" not in request.query:
            self.asked.append("list")
            metadata = {"resourceVersion": self.version}
            return web.json_response({"kind": "PodList", "metadata": metadata, "items": self.pods})
        self.asked.append(f"watch from {request.query['resourceVersion']}")
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.scripts.popleft() if self.scripts else ["wait"]:
            match event:
                case "cut":
                    request.transport.abort()
                    return response
                case "wait":
                    await asyncio.Event().wait()
                case kind, changed:
                    line = json.dumps({"type": kind, "object": changed}).encode() + b"\n"
                    # As it may arrive: in two parts.
                    await response.write(line[:50])
                    await response.write(line[50:])
        return response

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/inference/pods", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@asynccontextmanager
async def watching(api: FakeApi, account_dir: Path, port="http"):
    """Yield a source and a function that returns the hosts it finds next."""
    async with api.serving():
        target = KubernetesTarget(
            api_url=api.url, namespace="inference", port=port, account_dir=str(account_dir)
        )
        source = KubernetesSource(target, "prefill", SELECTOR, first_retry_s=0.01)
        async with asyncio.timeout(PATIENCE_S), aclosing(source.watch()) as findings:

            async def hosts() -> list[str]:
                members = await anext(findings)
                assert all(member.role == "prefill" for member in members)
                return [member.url.removeprefix("http://") for member in members]

            yield source, hosts, findings


async def test_pods_come_change_and_go_as_the_api_says(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1"), pod("b", "", "Pending")]
    ending = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    api.scripts.append(
        [
            ("MODIFIED", pod("b", "10.0.0.2", version="11")),
            ("ADDED", pod("c", "fd00::3", version="12")),
            ("BOOKMARK", BOOKMARK),
            ("MODIFIED", pod("a", "10.0.0.1", version="16", **ending)),
            ("DELETED", pod("b", "10.0.0.2", version="17")),
            "wait",
        ]
    )
    async with watching(api, tmp_path) as (_, hosts, _):
        assert await hosts() == ["10.0.0.1:7000"]
        assert await hosts() == ["10.0.0.1:7000", "10.0.0.2:7000"]
        assert await hosts() == ["10.0.0.1:7000", "10.0.0.2:7000", "[fd00::3]:7000"]
        assert await hosts() == ["10.0.0.1:7000", "10.0.0.2:7000", "[fd00::3]:7000"]
        assert await hosts() == ["10.0.0.2:7000", "[fd00::3]:7000"]
        assert await hosts() == ["[fd00::3]:7000"]
        assert api.asked == ["list", "watch from 10"]


async def test_a_problem_is_over_when_the_watch_goes_on_though_nothing_changes(tmp_path: Path):
    api = FakeApi()
    async with watching(api, tmp_path) as (source, hosts, _):
        assert await hosts() == []
        api.refusals.append(status(403, "pods is forbidden"))
        waiting = asyncio.create_task(hosts())
        while "may not watch pods" not in source.problem:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        while source.problem:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.001)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_watch_that_is_cut_or_ends_goes_on_where_it_was(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1")]
    api.scripts.append([("ADDED", pod("b", "10.0.0.2", version="11")), "cut"])
    api.scripts.append([("ADDED", pod("c", "10.0.0.3", version="12"))])
    api.scripts.append([("DELETED", pod("a", version="13")), "wait"])
    async with watching(api, tmp_path) as (source, hosts, _):
        assert [len(await hosts()) for _ in range(3)] == [1, 2, 3]
        assert await hosts() == ["10.0.0.2:7000", "10.0.0.3:7000"]
        assert source.problem == ""
        assert api.asked == ["list", *(f"watch from {version}" for version in (10, 11, 12))]


@pytest.mark.parametrize("is_event", [True, False])
async def test_a_version_that_is_too_old_is_listed_anew(tmp_path: Path, is_event):
    api, gone = FakeApi(), status(410, "too old resource version")
    api.pods = [pod("a", "10.0.0.1")]
    async with watching(api, tmp_path) as (_, hosts, _):
        api.scripts.append([("ERROR", gone)] if is_event else ["cut"])
        assert await hosts() == ["10.0.0.1:7000"]
        api.pods, api.version = [pod("z", "10.0.0.9")], "90"
        if not is_event:
            api.refusals.append(gone)
        assert await hosts() == ["10.0.0.9:7000"]
        api.scripts.append([])
        assert [asked for asked in api.asked if asked == "list"] == ["list", "list"]


async def test_a_version_that_a_restored_server_does_not_know_is_not_asked_for_ever(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1")]
    api.scripts.append(["cut"])
    async with watching(api, tmp_path) as (source, hosts, _):
        assert await hosts() == ["10.0.0.1:7000"]
        api.pods, api.version = [pod("z", "10.0.0.9")], "3"
        unknown = status(500, "resourceVersion: Invalid value: 10: too large")
        api.refusals.extend([unknown] * REFUSALS_BEFORE_LIST)
        assert await hosts() == ["10.0.0.9:7000"]
        assert source.problem == ""


async def test_what_may_not_be_asked_is_told_with_the_role_to_add_and_asked_again(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1")]
    refusal = 'pods is forbidden: User "system:serviceaccount:inference:lb" cannot list resource'
    api.refusals.extend([status(403, refusal)] * 2)
    async with watching(api, tmp_path) as (source, hosts, _):
        told = []
        source._note_problem = told.append
        assert await hosts() == ["10.0.0.1:7000"]
        assert "may not list pods in namespace 'inference'" in told[0]
        assert refusal in told[0]
        assert "resources: [pods], verbs: [list, watch]" in told[0]
        assert told[-1] == ""


async def test_nodes_stay_known_while_the_api_is_away(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1")]
    api.scripts.append(["cut"])
    async with watching(api, tmp_path) as (source, hosts, _):
        assert await hosts() == ["10.0.0.1:7000"]
        api.refusals.extend([status(500, "etcd is away")] * 2)
        api.scripts.append([("ADDED", pod("b", "10.0.0.2", version="11")), "wait"])
        assert await hosts() == ["10.0.0.1:7000", "10.0.0.2:7000"]
        assert source.problem == ""


async def test_the_token_is_read_each_time_since_it_is_renewed(tmp_path: Path):
    api = FakeApi()
    (tmp_path / "token").write_text("first\n")
    api.scripts.append([("ADDED", pod("b", "10.0.0.2", version="11"))])
    api.scripts.append([("ADDED", pod("c", "10.0.0.3", version="12")), "wait"])
    async with watching(api, tmp_path) as (_, hosts, _):
        await hosts()
        await hosts()
        (tmp_path / "token").write_text("second\n")
        await hosts()
        assert api.tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_a_token_that_cannot_be_read_is_told_and_tried_again(tmp_path: Path):
    (tmp_path / "token").mkdir()
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1")]
    async with watching(api, tmp_path) as (source, hosts, _), asyncio.TaskGroup() as tasks:
        found = tasks.create_task(hosts())
        while not source.problem:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.001)
        assert "directory" in source.problem
        (tmp_path / "token").rmdir()
        assert await found == ["10.0.0.1:7000"]


async def test_a_pods_zone_is_known_and_its_port_may_be_a_number(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1", labels={ZONE_LABEL: "eu-1"})]
    async with watching(api, tmp_path, port="7777") as (source, _, findings):
        (member,) = await anext(findings)
        assert member == Member("http://10.0.0.1:7777", "prefill", zone="eu-1", source=source.name)


async def test_a_pod_without_the_named_port_is_no_node(tmp_path: Path):
    api = FakeApi()
    api.pods = [pod("a", "10.0.0.1")]
    async with watching(api, tmp_path, port="grpc") as (_, hosts, _):
        assert await hosts() == []


def test_a_router_that_is_no_pod_is_told_what_to_give(tmp_path: Path):
    target = KubernetesTarget(api_url="https://10.0.0.1:443", account_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigInvalid, match="run the router in a pod with a service account"):
        KubernetesSource(target, "prefill", SELECTOR)
