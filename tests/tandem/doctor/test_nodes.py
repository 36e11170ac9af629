"""Which nodes can pair, from answers that were made up and from nodes that answer over HTTP."""

import socket

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem.doctor.nodes import NodeAnswer, ask, check_nodes
from tandem.wire.messages import ModelInfo, NodeInfo
from tests.kept_port import kept_port

DIGEST = "0123456789abcdef"


def answer(role: str, fingerprint=f"Llama-30layers-bfloat16-{DIGEST}", **fields) -> NodeAnswer:
    model = ModelInfo(
        name=fields.pop("name", "m"),
        fingerprint=fingerprint,
        context_length=8,
        vocab_size=8,
        eos_token_ids=[],
    )
    facts = {"version": "1", "transports": ["shm", "tcp"], "tp_size": 1} | fields
    info = NodeInfo(role=role, epoch=1, engine_port=1, model=model, **facts)
    return NodeAnswer(f"http://{role}:1", info, health=200)


def pair(*answers: NodeAnswer):
    [finding] = [each for each in check_nodes(answers) if each.area == "pairs"]
    return finding


def test_two_nodes_of_one_model_can_pair():
    finding = pair(answer("prefill"), answer("decode", transports=["tcp", "nixl"]))
    assert (finding.status, finding.found) == ("ok", "can pair by tcp")


def test_nodes_of_different_models_cannot_pair():
    finding = pair(answer("prefill"), answer("decode", "Qwen3-16layers"))
    assert (finding.status, finding.found) == ("failed", "cannot pair")
    assert f"Llama-30layers-bfloat16-{DIGEST} and Qwen3-16layers: give both" in finding.advice


def test_no_transport_in_common_fails_and_one_that_is_not_told_does_not():
    alone = pair(answer("prefill", transports=["shm"]), answer("decode", transports=["tcp"]))
    assert alone.status == "failed"
    assert "--transfer-backend" in alone.advice
    assert pair(answer("prefill", transports=[]), answer("decode")).status == "ok"


def test_other_versions_and_names_are_warned_of():
    finding = pair(answer("prefill", version="2", name="a"), answer("decode"))
    assert finding.status == "warning"
    assert "versions 2 and 1" in finding.advice
    assert "--served-model-name" in finding.advice


def node_app(info: NodeInfo, health: int) -> web.Application:
    async def server_info(request: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(info))

    async def get_health(request: web.Request) -> web.Response:
        return web.Response(status=health)

    app = web.Application()
    app.add_routes([web.get("/server_info", server_info), web.get("/health", get_health)])
    return app


async def test_nodes_are_asked_and_their_ports_tried(monkeypatch):
    # Longer than a machine stands still; whoever is away refuses at once.
    monkeypatch.setattr("tandem.doctor.nodes.INFO_TIMEOUT_S", 600.0)
    monkeypatch.setattr("tandem.router.node_watch.INFO_TIMEOUT_S", 600.0)
    info = answer("prefill").info
    assert info is not None
    with socket.create_server(("127.0.0.1", 0)) as engine, kept_port() as closed_port:
        info = msgspec.structs.replace(
            info, engine_port=engine.getsockname()[1], bootstrap_port=closed_port
        )
        async with TestServer(node_app(info, 503)) as server:
            url = f"http://127.0.0.1:{server.port}"
            [node, gone] = await ask([url, f"http://127.0.0.1:{closed_port}"])
    assert node.info == info
    assert node.health == 503
    assert len(node.unreachable) == 1
    well, lost = check_nodes([node, gone])
    assert well.status == lost.status == "failed"
    assert f"bootstrap port {closed_port} cannot be reached from here" in well.found
    assert "/health answers 503" in well.found
    assert "Connection refused" in lost.found
