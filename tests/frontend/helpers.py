"""Reading answers and events in tests."""

import asyncio
import io
import json

import aiohttp

from tandem.frontend.tokenizer import Tokenizer

# The routes that generate, each with the least body.
ROUTES = {
    "/generate": {"input_ids": [5]},
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


class LoopClock:
    """The clock of the running loop, and of its timers: it goes on by itself, and jumps where a test says so.

    So a limit that no busy machine reaches passes when what it is to end is under way.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead_s, told = 0.0, loop.time
        loop.time = lambda: told() + self._ahead_s

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds


async def post(client: aiohttp.ClientSession, path: str, body, **kwargs):
    """Return the status and the JSON of an answer."""
    async with client.post(path, json=body, **kwargs) as response:
        return response.status, await response.json()


async def post_large(client: aiohttp.ClientSession, path: str, body):
    """As `post`, for a body of megabytes: aiohttp's client warns unless it is a file."""
    async with client.post(path, data=io.BytesIO(json.dumps(body).encode())) as response:
        return response.status, await response.json()


async def events(response: aiohttp.ClientResponse) -> list:
    """Return the JSON of each event; the last is checked to be [DONE] and left out."""
    text = await response.text()
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


async def stream(client: aiohttp.ClientSession, path: str, body) -> list:
    async with client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return await events(response)


def each(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """The ids of a text, one a step."""
    return [[token_id] for token_id in tokenizer.encode(text)]
