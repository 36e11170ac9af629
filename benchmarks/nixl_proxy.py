"""`python benchmarks/nixl_proxy.py PORT PREFILL DECODE`: what NixlConnector needs before it.

The prompt goes to prefill for one token; its answer names blocks, with which the request goes to decode.
"""

import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Proxy:
    """Runs the two halves of a completion one after the other."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._session: ClientSession | None = None

    async def start(self, _app: web.Application) -> None:
        """Open the session."""
        self._session = ClientSession(timeout=ClientTimeout(None), connector=TCPConnector(limit=0))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion."""
        assert self._session is not None
        body = await request.json()
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ASK}
        for name in ("stream_options", "min_tokens"):
            first.pop(name, None)
        async with self._session.post(self._prefill + request.path, json=first) as told:
            params = (await told.json())["kv_transfer_params"]
        second = {**body, "kv_transfer_params": params}
        async with self._session.post(self._decode + request.path, json=second) as told:
            answer = web.StreamResponse(status=told.status)
            answer.content_type = told.content_type
            await answer.prepare(request)
            async for chunk in told.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer


def main(port: str, prefill: str, decode: str) -> None:
    """Serve until the process ends."""
    proxy = Proxy(prefill, decode)
    app = web.Application(client_max_size=1 << 26)
    app.on_startup.append(proxy.start)
    app.router.add_post("/v1/completions", proxy.complete)

    async def health(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
