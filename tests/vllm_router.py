"""The requests that vllm-router 0.1.17 sends with `--kv-connector mooncake`, as recorded: prefill first, then decode."""

import uuid
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

_SESSION = web.AppKey("session", aiohttp.ClientSession)
# Limits of the answer's length, by API.
_LIMITS = ("max_tokens", "max_completion_tokens")


def vllm_router(prefill: str, decode: str) -> web.Application:
    """Return a router for one pair of nodes, given by their URLs."""

    async def session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as made:
            app[_SESSION] = made
            yield

    async def forward(request: web.Request) -> web.Response:
        body, nodes, transfer = await request.json(), request.app[_SESSION], str(uuid.uuid4())
        first = body | {name: 1 for name in _LIMITS if name in body}
        first |= {"stream": False, "min_tokens": 1, "kv_transfer_params": first_half(transfer)}
        first.pop("stream_options", None)
        async with nodes.post(prefill + request.path, json=first) as answer:
            if answer.status != 200:
                return web.Response(status=500, text=await answer.text())
            await answer.read()
        async with nodes.get(f"{prefill}/query") as answer:
            engine = (await answer.json())["0"]["engine_id"]
        second = body | {"kv_transfer_params": second_half(transfer, prefill, engine)}
        async with nodes.post(decode + request.path, json=second) as answer:
            kind = answer.content_type
            return web.Response(status=answer.status, body=await answer.read(), content_type=kind)

    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_post("/{path:.*}", forward)
    return app


def first_half(transfer: str) -> dict[str, object]:
    """Return prefill's `kv_transfer_params`."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}


def second_half(transfer: str, prefill: str, engine: str) -> dict[str, object]:
    """Return decode's `kv_transfer_params`. `engine`: prefill's engine id by `GET /query`."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": prefill,
        "remote_engine_id": engine,
    }
