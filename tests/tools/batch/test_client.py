"""The client of `tandem batch` against scripted servers."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from tandem.tools.batch import client as client_module
from tandem.tools.batch.client import BatchClient, BatchError, BatchRequest, retry_after_s
from tandem.tools.query import KeyRefused, QueryFailed
from tests.patience import Clock
from tests.tools.batch.stub import Stub, said


def requests(number: int):
    return [
        BatchRequest(f"r{i}", "POST", "/v1/completions", msgspec.Raw(b'{"prompt":"%d"}' % i))
        for i in range(number)
    ]


async def statuses_of(client, asked) -> list:
    """Return the status or the error of each request, in order of completion."""
    client, found = BatchClient(client) if isinstance(client, str) else client, []
    await client.run(asked, lambda _request, outcome: found.append(outcome))
    return [each.code if isinstance(each, BatchError) else each.status_code for each in found]


@pytest.fixture
def clock(monkeypatch):
    """The client's clock: a read advances it by 1 ms."""
    clock = Clock(1.0, per_read_s=0.001)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=clock))
    return clock


async def test_concurrency_is_bounded():
    is_full = asyncio.Event()

    async def script(body):
        if stub.now == 6:
            is_full.set()
        await is_full.wait()
        return said()

    stub = Stub(script)
    async with stub.serving() as url:
        client = BatchClient(url, max_concurrency=6)
        assert await statuses_of(client, requests(100)) == [200] * 100
    assert stub.most == 6


def answer_to(trouble):
    if trouble == "cut":
        return None
    if isinstance(trouble, bytes):
        answer = said()
        answer.body = trouble
        return answer
    return said("later", status=trouble, Retry_After="0.001")


@pytest.mark.parametrize("trouble", [500, 504, 408, 429, 503, "cut", b"<html>", b'{"id": "\xff"}'])
async def test_temporary_failures_are_retried(trouble):
    troubles = [trouble] * 3
    stub = Stub(lambda body: answer_to(troubles.pop()) if troubles else said())
    async with stub.serving() as url:
        assert await statuses_of(url, requests(1)) == [200]
    assert len(stub.asked) == 4


@pytest.mark.parametrize(("trouble", "result"), [(500, 500), ("cut", "connection_broken")])
async def test_after_the_last_attempt_the_last_outcome_is_the_result(trouble, result):
    stub = Stub(lambda body: answer_to(trouble))
    async with stub.serving() as url:
        assert await statuses_of(url, requests(1)) == [result]
    assert len(stub.asked) == 5


async def test_an_endless_response_is_a_timeout():
    async with Stub(lambda body: asyncio.Event().wait()).serving() as url:
        assert await statuses_of(BatchClient(url, timeout_s=0.05), requests(1)) == ["timeout"]


async def test_a_request_may_be_rejected_for_longer_than_the_patience_behind_others(clock):
    num_answered = 0

    def script(body):
        nonlocal num_answered
        if body["prompt"] == "0" and num_answered < 19:
            return said(status=429, Retry_After="0.001")
        num_answered += 1
        clock.now_s += client_module.PATIENCE_S / 4
        return said()

    async with Stub(script).serving() as url:
        assert await statuses_of(BatchClient(url, max_concurrency=2), requests(20)) == [200] * 20


async def test_patience_counts_from_the_first_rejection_of_a_request(clock):
    answers = iter([200, 429, 200])

    def script(body):
        clock.now_s += 2 * client_module.PATIENCE_S
        return said(status=next(answers), Retry_After="0.001")

    async with Stub(script).serving() as url:
        assert await statuses_of(BatchClient(url, max_concurrency=1), requests(2)) == [200, 200]


async def test_a_request_waits_for_retry_after_and_no_longer(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 1e6)
    times = []

    def script(body):
        times.append(asyncio.get_running_loop().time())
        return said(status=429 if len(times) == 1 else 200, Retry_After="0.2")

    async with Stub(script).serving() as url:
        assert await statuses_of(url, requests(1)) == [200]
    assert times[1] - times[0] >= 0.2


def test_retry_after_is_bounded_and_nonsense_is_ignored():
    assert [retry_after_s(value) for value in ("2.5", "1e9", "inf")] == [2.5, 300, 300]
    assert [retry_after_s(value) for value in ("", "soon", "-3", "nan")] == [0.0] * 4


async def test_no_request_fails_while_the_server_restarts(closed_url, closed_port, monkeypatch):
    is_refused = asyncio.Event()

    def pause_s(_num_failures):
        is_refused.set()
        return 0.001

    monkeypatch.setattr(client_module, "pause_s", pause_s)
    stub, client = Stub(), BatchClient(closed_url)
    async with stub.serving(closed_port):
        await statuses_of(client, requests(1))
    collecting = asyncio.create_task(statuses_of(client, requests(20)))
    await is_refused.wait()
    async with stub.serving(closed_port):
        assert await collecting == [200] * 20
    assert len(stub.asked) == 21


async def test_a_wrong_key_ends_the_run_without_a_result():
    stub = Stub(lambda body: said("no", status=401))
    async with stub.serving() as url:
        with pytest.raises(KeyRefused, match="--api-key"):
            client = BatchClient(url, api_key="wrong", max_concurrency=1)
            await statuses_of(client, requests(50))
    assert stub.keys == ["Bearer wrong"]


@pytest.mark.usefixtures("clock")
async def test_a_server_that_is_silent_for_too_long_ends_the_run(
    closed_url, closed_port, monkeypatch
):
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.03)
    client = BatchClient(closed_url)
    with pytest.raises(QueryFailed, match=f"{closed_url} .*refused.*start a server"):
        await statuses_of(client, requests(3))  # at once, because it was never reached
    async with Stub().serving(closed_port):
        assert await statuses_of(client, requests(1)) == [200]
    with pytest.raises(QueryFailed, match=f"{closed_url} has answered nothing .*refused"):
        await statuses_of(client, requests(3))
    async with Stub(lambda body: said(status=503)).serving() as url:
        with pytest.raises(QueryFailed, match="has no room"):
            await statuses_of(url, requests(3))
