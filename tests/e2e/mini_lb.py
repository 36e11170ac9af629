"""The smallest router of SGLang's kind: sends one body to both halves and answers what decode answers.

As its mini load balancer does it: adds `bootstrap_host`, `_port` and `_room`, lists of them for a batch,
and puts the prompt's log-probabilities, which prefill tells, before those of decode.
"""

import asyncio
import json
import random
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

MERGED = ("input_token_logprobs", "input_top_logprobs")


class MiniLb:
    """Forwards to one prefill and one decode node."""

    def __init__(self, prefill: str, bootstrap_port: int, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._bootstrap = urlsplit(prefill).hostname, bootstrap_port

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._forward)
        return app

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body |= self._fields(body)
        async with aiohttp.ClientSession() as session:
            halves = [
                _post(session, node + request.path, body) for node in (self._prefill, self._decode)
            ]
            (_, _, first), (status, kind, answer) = await asyncio.gather(*halves)
        if body.get("return_logprob"):
            merge = _merged_events if body.get("stream") else _merged
            answer = merge(first, answer)
        return web.Response(text=answer, status=status, content_type=kind)

    def _fields(self, body: dict) -> dict:
        prompts = body.get("text") or body.get("input_ids") or body.get("prompt") or ""
        is_ids = "prompt" in body or "input_ids" in body
        is_batch = isinstance(prompts, list) and not (is_ids and isinstance(prompts[0], int))
        host, port = self._bootstrap
        rooms = [random.getrandbits(63) for _ in (prompts if is_batch else [0])]
        values = [[host] * len(rooms), [port] * len(rooms), rooms]
        names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        return dict(zip(names, values if is_batch else [value[0] for value in values], strict=True))


async def _post(session: aiohttp.ClientSession, url: str, body: dict) -> tuple[int, str, str]:
    async with session.post(url, json=body) as response:
        return response.status, response.content_type, await response.text()


def _merged(first: str, answer: str) -> str:
    ours, theirs = json.loads(answer), json.loads(first)
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
    for one, other in pairs:
        _merge(one, other)
    return json.dumps(ours)


def _merged_events(first: str, answer: str) -> str:
    told = json.loads(first.partition("\n\n")[0].removeprefix("data: "))
    return "\n\n".join(_merged_event(event, told) for event in answer.split("\n\n"))


def _merged_event(event: str, told: dict) -> str:
    if not event.startswith("data: {"):
        return event
    one = json.loads(event.removeprefix("data: "))
    _merge(one, told)
    return f"data: {json.dumps(one)}"


def _merge(one: dict, other: dict) -> None:
    for name in MERGED:
        if name in one["meta_info"]:
            one["meta_info"][name] = other["meta_info"][name] + one["meta_info"][name]
