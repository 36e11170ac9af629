"""The sources of nodes: a name's addresses, and pods as an API server of the real protocol lists them."""

import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tandem.router.config import DnsTarget, KubernetesTarget
from tandem.router.discovery import (
    ABSENCES_BELIEVED,
    ZONE_LABEL,
    DnsSource,
    KubernetesSource,
    resolve,
)
from tandem.router.membership import Member, SourceFailed
from tandem.wire.errors import ConfigInvalid

NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_SERVER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
SELECTOR = "app=tandem,role=prefill"


def source_of(*answers) -> DnsSource:
    """A source whose resolver answers so, one after the other."""
    script = iter(answers)

    async def answer(host: str, port: int) -> list[str]:
        assert (host, port) == ("prefill.tandem", 7000)
        given = next(script)
        if isinstance(given, Exception):
            raise given
        return given

    return DnsSource(DnsTarget("prefill.tandem", 7000, "prefill"), answer)


async def test_every_address_of_a_name_is_a_node_of_the_role():
    source = source_of(["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.1"])
    assert await source.find() == [
        Member(url, "prefill", source=source.name)
        for url in ("http://10.0.0.1:7000", "http://10.0.0.2:7000", "http://[fd00::1]:7000")
    ]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (NO_SERVER, "Temporary failure in name resolution"),
        (NO_SUCH_NAME, "Name or service not known"),
        (TimeoutError(), "does not answer in time"),
    ],
)
async def test_a_name_that_does_not_resolve_fails_with_the_reason(error, sentence):
    source = source_of(error, ["10.0.0.1"])
    with pytest.raises(SourceFailed, match=sentence):
        await source.find()
    assert len(await source.find()) == 1


async def test_a_name_that_stays_away_is_believed_in_the_end_and_a_dead_name_server_never():
    for error, is_believed in ((NO_SUCH_NAME, True), (NO_SERVER, False)):
        source = source_of(*[error] * (ABSENCES_BELIEVED + 1))
        for _ in range(ABSENCES_BELIEVED):
            with pytest.raises(SourceFailed):
                await source.find()
        if is_believed:
            assert await source.find() == []
        else:
            with pytest.raises(SourceFailed):
                await source.find()


async def test_the_loops_resolver_is_asked():
    assert "127.0.0.1" in await resolve("localhost", 7000)


def pod(name: str, ip: str = "", phase="Running", labels=None, **meta) -> dict:
    port = {"name": "http", "containerPort": 7000, "protocol": "TCP"}
    other = {"name": "bootstrap", "containerPort": 8998}
    return {
        "metadata": {"name": name, "resourceVersion": "1", "labels": labels, **meta},
        "spec": {"containers": [{"name": "sidecar"}, {"name": "n", "ports": [other, port]}]},
        "status": {"phase": phase, "podIP": ip, "conditions": [{"type": "Ready"}]},
    }


@asynccontextmanager
async def api_of(account_dir: Path, answers: list, port="http"):
    """Yield a source whose API gives these answers: pods, or a status with its code."""
    tokens = []

    async def answer(request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == SELECTOR
        tokens.append(request.headers.get("Authorization", ""))
        given = answers.pop(0)
        if isinstance(given, list):
            return web.json_response({"kind": "PodList", "metadata": {}, "items": given})
        return web.json_response(given, status=given["code"])

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/inference/pods", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    target = KubernetesTarget(
        api_url=url, namespace="inference", port=port, account_dir=str(account_dir)
    )
    try:
        yield KubernetesSource(target, "prefill", SELECTOR), tokens
    finally:
        await runner.cleanup()


async def test_pods_that_run_and_are_not_told_to_end_are_nodes(tmp_path: Path):
    zone = {ZONE_LABEL: "eu-1"}
    pods = [
        pod("d", "fd00::3"),
        pod("a", "10.0.0.1", labels=zone),
        pod("b", "", "Pending"),
        pod("c", "10.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    async with api_of(tmp_path, [pods, []]) as (source, _):
        assert await source.find() == [
            Member("http://10.0.0.1:7000", "prefill", zone="eu-1", source=source.name),
            Member("http://[fd00::3]:7000", "prefill", source=source.name),
        ]
        assert await source.find() == []


@pytest.mark.parametrize("items", [7, [7], [{}], [{"metadata": {"name": "a"}}]])
async def test_what_is_no_list_of_pods_is_reported(tmp_path: Path, items):
    async with api_of(tmp_path, [{"code": 200, "items": items}]) as (source, _):
        with pytest.raises(SourceFailed, match="cannot be read"):
            await source.find()


@pytest.mark.parametrize(("port", "urls"), [("7777", ["http://10.0.0.1:7777"]), ("grpc", [])])
async def test_a_port_may_be_a_number_and_a_pod_without_the_named_one_is_no_node(
    tmp_path: Path, port, urls
):
    async with api_of(tmp_path, [[pod("a", "10.0.0.1")]], port) as (source, _):
        assert [member.url for member in await source.find()] == urls


@pytest.mark.parametrize(
    ("code", "message", "sentence"),
    [
        (403, "pods is forbidden", r"may not list pods in namespace 'inference' \(pods is forb"),
        (403, "", r"resources: \[pods\], verbs: \[list\]"),
        (500, "etcd is away", "answers 500: etcd is away"),
    ],
)
async def test_an_api_that_rejects_is_reported_and_asked_again(
    tmp_path: Path, code, message, sentence
):
    refusal = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    async with api_of(tmp_path, [refusal, [pod("a", "10.0.0.1")]]) as (source, _):
        with pytest.raises(SourceFailed, match=sentence):
            await source.find()
        assert len(await source.find()) == 1


async def test_the_token_is_read_each_time_since_it_is_renewed(tmp_path: Path):
    async with api_of(tmp_path, [[], []]) as (source, tokens):
        for token in ("first", "second"):
            (tmp_path / "token").write_text(f"{token}\n")
            await source.find()
        assert tokens == ["Bearer first", "Bearer second"]


async def test_what_cannot_be_read_or_reached_is_reported(tmp_path: Path):
    (tmp_path / "token").mkdir()
    async with api_of(tmp_path, []) as (source, _):
        with pytest.raises(SourceFailed, match="directory"):
            await source.find()
        (tmp_path / "token").rmdir()
    with pytest.raises(SourceFailed, match="Connect"):
        await source.find()


def test_a_router_that_is_no_pod_is_told_what_to_give(tmp_path: Path):
    target = KubernetesTarget(api_url="https://10.0.0.1:443", account_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigInvalid, match="run the router in a pod with a service account"):
        KubernetesSource(target, "prefill", SELECTOR)
