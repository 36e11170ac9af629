"""Our nodes under routers of SGLang and vLLM: the same answers as under our own router."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from tandem.cli.up import free_ports
from tests.e2e.clients import about, essence
from tests.e2e.cluster import START_TIMEOUT_S, ask
from tests.patience import eventually
from tests.vllm_router import vllm_router

PARAMS = {"temperature": 0, "max_new_tokens": 6}
TEXT = "The capital of France is"
COMPLETION = {"model": "default", "temperature": 0, "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], **COMPLETION}


def generate(**fields):
    return "/generate", {"sampling_params": PARAMS, **fields}


CALLS = {
    "a text": generate(text=TEXT),
    "ids": generate(input_ids=[504, 3575, 282]),
    "lists of ids": generate(input_ids=[[504, 3575, 282], [504, 3575]]),
    "a stream": generate(text=TEXT, stream=True),
    "a stream of several": generate(input_ids=[[504, 3575, 282], [504, 3575]], stream=True),
    "log-probabilities": generate(text=TEXT, return_logprob=True, logprob_start_len=0),
    "a completion": ("/v1/completions", {"prompt": TEXT, **COMPLETION}),
    "a completion's stream": ("/v1/completions", {"prompt": TEXT, "stream": True, **COMPLETION}),
    "completions": ("/v1/completions", {"prompt": [TEXT, "Cats and"], **COMPLETION}),
    "two generations": ("/v1/completions", {"prompt": TEXT, "n": 2, **COMPLETION}),
    "a chat": ("/v1/chat/completions", CHAT),
    "a chat's stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "a chat's log-probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True}),
}


async def said(session: aiohttp.ClientSession, url: str, path: str, body: dict) -> list:
    """Return the status, and what was said: of a stream the last event of each index, and its text."""
    async with session.post(url + path, json=body) as response:
        text = await response.text()
        if response.content_type != "text/event-stream":
            return [response.status, json.loads(text)]
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [response.status, _last([json.loads(event) for event in events])]


def _last(events: list[dict]) -> dict:
    """What a stream came to: how many tokens an event has is the network's choice."""
    if "choices" not in events[0]:
        return {event.get("index", 0): event for event in events}
    choices = [event["choices"][0] for event in events]
    said = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    ]
    return {"text": "".join(said), "finish_reason": choices[-1]["finish_reason"]}


async def answers(url: str, model: str, calls: Mapping = CALLS) -> dict:
    """Send all calls at once, to a model by its name: smg knows no `default`."""
    bodies = {
        name: (path, body | ({"model": model} if "model" in body else {}))
        for name, (path, body) in calls.items()
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        made = [said(session, url, path, body) for path, body in bodies.values()]
        return dict(zip(bodies, await asyncio.gather(*made), strict=True))


@pytest.fixture(scope="module")
def model(cluster):
    return ask(f"{cluster.url}/v1/models")[1]["data"][0]["id"]


@pytest.fixture(scope="module")
def expected(cluster, model):
    return asyncio.run(answers(cluster.url, model))


@pytest.fixture
def pair(cluster):
    """The URLs of a prefill and a decode node, and the former's bootstrap port."""
    [prefill], [decode] = cluster.prefill_urls, cluster.decode_urls
    return prefill, decode, ask(f"{prefill}/server_info")[1]["bootstrap_port"]


ROUTERS = {"sglang-router": ["sglang_router.launch_router"], "smg": ["smg", "launch"]}


@contextlib.contextmanager
def router(name: str, prefill: str, decodes: Sequence[str], bootstrap_port: int):
    """The real router, until it serves; yields its URL."""
    port, metrics_port = free_ports(2)
    argv = ["--host", "127.0.0.1", "--port", port, "--policy", "round_robin"]
    argv += ["--pd-disaggregation", "--prefill", prefill, bootstrap_port]
    argv += [word for decode in decodes for word in ("--decode", decode)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *ROUTERS[name], *map(str, argv)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(
                lambda: _is_ready(url) or process.poll() is not None, within_s=START_TIMEOUT_S
            )
            log.seek(0)
            assert process.poll() is None, log.read()
            assert _is_ready(url), log.read()
            yield url
        finally:
            process.kill()  # how it ends is its own affair
            process.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError):
        return ask(f"{url}/readiness")[0] == 200
    return False


def assert_same(found: dict, expected: dict) -> None:
    for name, answer in found.items():
        assert answer[0] == 200, (name, answer)
        assert essence(answer) == about(essence(expected[name])), name


@pytest.mark.parametrize("name", ROUTERS)
def test_router_drives_our_nodes(pair, model, expected, name):
    prefill, decode, bootstrap_port = pair
    with router(name, prefill, [decode], bootstrap_port) as url:
        assert_same(asyncio.run(answers(url, model)), expected)


def test_sequential_halves_of_vllm_router_give_the_same_answers(cluster, pair, model, expected):
    prefill, decode, _ = pair
    calls = {name: call for name, call in CALLS.items() if call[0].startswith("/v1/")}

    async def found():
        async with TestServer(vllm_router(prefill, decode)) as server:
            return await answers(f"http://127.0.0.1:{server.port}", model, calls)

    received = cluster.loads()[1]["received_bytes"]
    assert_same(asyncio.run(found()), expected)
    assert cluster.loads()[1]["received_bytes"] > received, "decode computed the prompts itself"
