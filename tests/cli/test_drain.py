"""`tandem drain` against a scripted node."""

import asyncio

import pytest
from aiohttp import web

from tandem.cli import drain
from tandem.cli.drain import DrainConfig, DrainFailed
from tests.http_server import HttpServer


async def drain_node(*states: str, remaining_s: float = 0.0) -> None:
    """Drain a node that reports these states in turn and then drops connections."""
    left = list(states)

    async def answer(request: web.Request) -> web.StreamResponse:
        if not left:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status = {"state": left.pop(0), "detail": "up", "num_left": 2, "remaining_s": remaining_s}
        return web.json_response(status)

    app = web.Application()
    app.router.add_route("*", "/drain", answer)
    server = await HttpServer.start(app)
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with asyncio.timeout(60):
            await drain._run(DrainConfig(url=url, api_key="k"))
    finally:
        await server.stop()


async def test_drain_waits_until_the_node_is_drained(capsys):
    await drain_node("draining", "draining", "drained")
    out = capsys.readouterr().out
    assert "2 requests left" in out
    assert "is drained: nothing runs on it" in out


async def test_leaving_node_that_exits_is_a_success(capsys):
    await drain_node("draining", "leaving")
    assert "has exited" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (["draining"], "does not answer as a node"),
        (["draining", "serving"], "the drain of .* was cancelled"),
    ],
)
async def test_interrupted_drain_is_a_failure(states, reason):
    with pytest.raises(DrainFailed, match=reason):
        await drain_node(*states)


async def test_drain_waits_until_the_deadline_that_the_node_reports(monkeypatch):
    monkeypatch.setattr(drain, "GRACE_S", 0.0)
    await drain_node("draining", "draining", "drained", remaining_s=3600.0)
    with pytest.raises(DrainFailed, match="still has 2 requests"):
        await drain_node("draining", "draining", "drained")
