"""A server with OpenAI's routes that does what a test scripts."""

import asyncio
import inspect
import json
from contextlib import asynccontextmanager

from aiohttp import web

from tests.http_server import HttpServer


def said(text: str = "yes", status: int = 200, **headers: str) -> web.Response:
    """An answer as servers give it, of five prompt tokens and two more."""
    body = {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": text}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    if status != 200:
        body = {"error": {"message": text}}
    return web.json_response(
        body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


class Stub:
    """Answers each request by `script`, which is given its body.

    Attributes:
        asked: Bodies, in the order in which they came.
        most: Requests that were here at once, at most.
    """

    def __init__(self, script=lambda body: said(body["prompt"])) -> None:
        self.script, self.asked, self.keys = script, [], []
        self.now = self.most = 0
        self.is_asked = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_post("/{path:.*}", self._post)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.is_asked.set()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            answer = self.script(body)
            answer = await answer if inspect.isawaitable(answer) else answer
        finally:
            self.now -= 1
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer

    @property
    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.asked]

    @asynccontextmanager
    async def serving(self, port: int = 0):
        """Serve; yield the URL."""
        server = await HttpServer.start(self.app, port)
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            await server.stop()


def line(name: str, **changed) -> str:
    """A line of an input file, whose prompt is its name."""
    whole = {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": name},
    }
    return json.dumps(whole | changed) + "\n"
