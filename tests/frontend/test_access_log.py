"""What is recorded of each request by its id and key: the access log, and metrics by key."""

import asyncio
import hashlib

import pytest

from tandem.frontend.http import metrics
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.wire.errors import Overloaded
from tests.frontend.conftest import serve
from tests.frontend.fakes import say
from tests.patience import PATIENCE_S, until_async

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}


def options(*keys: str, access_log: bool = True) -> FrontendOptions:
    return FrontendOptions(http=HttpOptions(api_keys=keys, access_log=access_log))


def name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def lines(logs) -> list[dict]:
    return [entry for entry in logs if entry["event"] == "http.request"]


async def generate(client, key: str = "", **body):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client.post("/generate?secret=1", json=BODY | body, headers=headers) as response:
        await response.read()
        return response


async def test_access_log_is_off_by_default(backend, logs):
    async with serve(backend) as client:
        await generate(client)
    assert not lines(logs)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_access_log_names_the_id_the_key_and_the_status_of_a_request(
    backend, logs, is_stream
):
    async with serve(backend, options("one", "two")) as client:
        await generate(client, "one", rid="mine", stream=is_stream)
        unnamed = await generate(client, "two", stream=is_stream)
        await generate(client, "wrong")
        await generate(client)
        backend.script = say(Overloaded("the queue is full"))
        await generate(client, "two", rid="late", stream=is_stream)
    recorded = [(line["request_id"], line["key"], line["status"]) for line in lines(logs)]
    assert recorded[:2] == [
        ("mine", name_of("one"), 200),
        (unnamed.headers["X-Request-Id"], name_of("two"), 200),
    ]
    assert [each[1:] for each in recorded[2:4]] == [(name_of("wrong"), 401), ("", 401)]
    assert recorded[4:] == [("late", name_of("two"), 429)]
    assert "secret" not in repr(lines(logs))
    for line in lines(logs):
        assert (line["method"], line["path"], line["remote"]) == ("POST", "/generate", "127.0.0.1")
        assert line["duration_s"] > 0


async def test_access_log_has_clients_that_left_with_499(backend, logs):
    backend.script = say([5], asyncio.Event())
    async with serve(backend, options()) as client:
        asking = asyncio.ensure_future(generate(client, rid="left"))
        async with asyncio.timeout(PATIENCE_S):
            await backend.until(lambda: backend.num_yielded)
            asking.cancel()
            await until_async(lambda: lines(logs))
    assert [(line["request_id"], line["status"]) for line in lines(logs)] == [("left", 499)]


async def recorded_of_keys(client) -> list[str]:
    async with client.get("/metrics") as response:
        text = await response.text()
    return [line for line in text.splitlines() if line.startswith("tandem_edge_key_")]


async def test_metrics_by_key_count_generations_and_tokens(backend):
    async with serve(backend, options("one")) as client:
        await generate(client, "one")
        await generate(client, "wrong")
        backend.script = say([5], Overloaded("lost"))
        await generate(client, "one")
        one = name_of("one")
        assert await recorded_of_keys(client) == [
            f'tandem_edge_key_generations_total{{key="{one}",outcome="finished"}} 1.0',
            f'tandem_edge_key_generations_total{{key="{one}",outcome="failed"}} 1.0',
            f'tandem_edge_key_tokens_total{{key="{one}",kind="prompt"}} 6.0',
            f'tandem_edge_key_tokens_total{{key="{one}",kind="output"}} 3.0',
        ]


async def test_metrics_by_key_are_bounded_and_absent_without_keys(backend, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_KEYS", 1)
    async with serve(backend, options("one", "two", "three")) as client:
        for key in ("one", "two", "three"):
            await generate(client, key)
        generations = [line for line in await recorded_of_keys(client) if "generations" in line]
        assert generations == [
            f'tandem_edge_key_generations_total{{key="{name_of("one")}",outcome="finished"}} 1.0',
            'tandem_edge_key_generations_total{key="other",outcome="finished"} 2.0',
        ]
    async with serve(backend) as client:
        await generate(client)
        assert not await recorded_of_keys(client)
