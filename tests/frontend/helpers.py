"""Helpers that read answers and events."""

import asyncio
import io
import json

import aiohttp

from tandem.frontend.text.tokenizer import Tokenizer

# The generation routes, each with a minimal body.
ROUTES = {
    "/generate": {"input_ids": [5]},
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


class LoopClock:
    """The clock of the running loop and its timers. It runs normally and can jump forward.

    So a limit that no busy machine reaches passes when what it is to end is under way.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead_s, told = 0.0, loop.time
        loop.time = lambda: told() + self._ahead_s

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds


async def post(client: aiohttp.ClientSession, path: str, body, **kwargs):
    """Return the status and JSON body of an answer."""
    async with client.post(path, json=body, **kwargs) as response:
        return response.status, await response.json()


async def post_large(client: aiohttp.ClientSession, path: str, body):
    """Like `post`, for a body of megabytes, which aiohttp's client accepts without a warning only as a file."""
    async with client.post(path, data=io.BytesIO(json.dumps(body).encode())) as response:
        return response.status, await response.json()


async def events(response: aiohttp.ClientResponse) -> list:
    """Return the JSON of each event, without comments and the final [DONE], which is checked."""
    text = await response.text()
    blocks = text.removesuffix("\n\n").split("\n\n")
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


async def stream(client: aiohttp.ClientSession, path: str, body) -> list:
    async with client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return await events(response)


def each(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """Return the ids of a text, one id per step."""
    return [[token_id] for token_id in tokenizer.encode(text)]
