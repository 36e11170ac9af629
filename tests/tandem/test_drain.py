"""`tandem drain` before a node that does what a test scripts."""

import asyncio

import pytest
from aiohttp import web

from tandem import drain
from tandem.drain import DrainConfig, DrainFailed


async def watched(*states: str) -> None:
    """Drain a node that reports these states in turn, and is then gone."""
    left = list(states)

    async def answer(request: web.Request) -> web.StreamResponse:
        if not left:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.json_response({"state": left.pop(0), "detail": "up", "num_left": 2})

    app = web.Application()
    app.router.add_route("*", "/drain", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with asyncio.timeout(60):
            await drain._run(DrainConfig(url=url, api_key="k"))
    finally:
        await runner.cleanup()


async def test_a_node_is_watched_until_it_is_drained(capsys):
    await watched("draining", "draining", "drained")
    told = capsys.readouterr().out
    assert "2 requests left" in told
    assert "is drained: nothing runs on it" in told


async def test_a_node_that_ends_because_it_was_told_to_is_no_failure(capsys):
    await watched("draining", "leaving")
    assert "has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (["draining"], "does not answer as a node"),
        (["draining", "serving"], "the drain of .* was ended"),
    ],
)
async def test_a_drain_that_did_not_come_to_its_end_is_a_failure(states, reason):
    with pytest.raises(DrainFailed, match=reason):
        await watched(*states)
