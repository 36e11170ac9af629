"""What tests ask of running clusters, and what they read of nodes and of their processes."""

import asyncio
import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.simulated import answer_key, read_model, tokens_at
from tests.e2e.cluster import START_TIMEOUT_S, ask, info_of

# Nodes whose engine only takes time.
SIMULATED = ("--engine", "simulated", "--page-size", "8", "--max-total-tokens", "8192")
QUIET = ("--log-level", "warning")
PROMPTS = [[5 + i, 6, 7, 8] * 20 for i in range(6)]
NUM_NEW = 300
# What differs between two calls of the same, or between one engine and two.
CHANGING = {"id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details", "model"}


# ── processes and nodes ──────────────────────────────────────────────────────────────────────────


def load_of(url: str) -> dict:
    """Return the load that a node told by itself, twice a second; `load_now` asks for it."""
    return info_of(url)["load"]


def unaccounted(node: str | dict) -> int:
    """Return how many pages of a node, or of a load, are neither free nor cached."""
    load = load_of(node) if isinstance(node, str) else node
    return load["num_pages"] - load["pages_free"] - load["pages_cached"]


def nodes_of(router: str) -> list[dict]:
    return ask(f"{router}/server_info")[1]["nodes"]


def are_up(router: str) -> bool:
    """Tell whether a router, which serves with its first pair, has all its nodes."""
    return all(node["is_up"] for node in nodes_of(router))


def is_told(url: str, status: int, *words: str) -> bool:
    """Tell whether `url` answers with this status and all these words."""
    try:
        got, answer = ask(url)
    except OSError:
        return False
    return got == status and all(word in str(answer) for word in words)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def generate(url: str, **body) -> dict:
    """Return what /generate answers, be it an error."""
    return ask(f"{url}/generate", body)[1]


async def post(session: aiohttp.ClientSession, url: str, path: str, body: dict) -> tuple[int, dict]:
    async with session.post(url + path, json=body) as response:
        return response.status, await response.json()


def ask_all(url: str, calls: dict[str, tuple[str, dict]]) -> dict[str, tuple[int, dict]]:
    """Send all calls at once; return status and body of each, by name."""

    async def send():
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            answers = [post(session, url, path, body) for path, body in calls.values()]
            return dict(zip(calls, await asyncio.gather(*answers), strict=True))

    return asyncio.run(send())


async def stream(
    session, url: str, prompt, started: asyncio.Event, num_new: int = NUM_NEW, **fields
) -> list[int]:
    """Return all tokens of one stream; `started` is set when some have come."""
    params = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True, **fields}
    token_ids: list[int] = []
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                reason = event["meta_info"]["finish_reason"]
                assert reason is None or reason["type"] == "length", reason
                assert event["output_ids"][: len(token_ids)] == token_ids
                token_ids = event["output_ids"]
                if len(token_ids) > 10:
                    started.set()
    return token_ids


async def stream_all(
    url: str, when_all_flow=None, num_new: int = NUM_NEW, prompts=PROMPTS, **fields
) -> list[list[int]]:
    """Return the tokens of all prompts."""
    timeout = aiohttp.ClientTimeout(total=START_TIMEOUT_S)  # it guards against a hang alone
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        started = [asyncio.Event() for _ in prompts]
        streams = [
            tasks.create_task(stream(session, url, prompt, event, num_new, **fields))
            for prompt, event in zip(prompts, started, strict=True)
        ]
        for event in started:
            await event.wait()
        if when_all_flow is not None:
            when_all_flow()
    return [task.result() for task in streams]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def expected(model: Path | str, prompt: list[int], num_new: int, seed: int = 0) -> list[int]:
    """Return what a simulated engine answers: arithmetic on the prompt."""
    _, ordinary = read_model(EngineConfig(model_dir=str(model)), "none")
    keys = np.full(num_new, answer_key(prompt, seed), np.uint64)
    return tokens_at(keys, np.arange(num_new), ordinary).tolist()


def essence(value):
    """Drop what may differ."""
    if isinstance(value, dict):
        return {key: essence(item) for key, item in value.items() if key not in CHANGING}
    return [essence(item) for item in value] if isinstance(value, list) else value


def about(value):
    """Allow for log-probabilities that were summed in another order."""
    if isinstance(value, dict):
        return {key: about(item) for key, item in value.items()}
    if isinstance(value, list):
        return [about(item) for item in value]
    return pytest.approx(value, abs=2e-3) if isinstance(value, float) else value


def assert_same(answer, expected_answer) -> None:
    assert essence(answer) == about(essence(expected_answer))
