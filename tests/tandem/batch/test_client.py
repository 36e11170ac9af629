"""The client against servers that do what a test scripts."""

import asyncio
import email.utils
import itertools
import time
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tandem.batch import (
    BatchClient,
    BatchRequest,
    BatchSettings,
    KeyRefused,
    ServerAway,
    run_batch,
)
from tandem.batch import client as client_module
from tandem.batch.client import MAX_RETRY_AFTER_S, retry_after_s
from tandem.wire.errors import ConfigInvalid
from tests.tandem.batch.stub import Stub, said


def requests(number: int):
    return [BatchRequest(f"r{i}", {"prompt": str(i)}, "/v1/completions") for i in range(number)]


async def results_of(url, asked, **settings):
    return [result async for result in BatchClient(url, BatchSettings(**settings)).run(asked)]


async def test_every_request_has_its_own_answer():
    stub = Stub()
    async with stub.serving() as url:
        results = await results_of(f"{url}/v1/", requests(300))
    assert {result.custom_id: result.text for result in results} == {
        f"r{i}": str(i) for i in range(300)
    }
    assert all(result.is_ok and result.request_id == "cmpl-1" for result in results)
    assert sorted(map(int, stub.prompts)) == list(range(300))


async def test_bodies_may_be_text_and_get_fields_that_they_lack():
    asked = [BatchRequest(str(n), b'{"prompt":"%d"}' % n, "/v1/completions") for n in range(3)]
    stub = Stub()
    async with stub.serving() as url:
        results = await results_of(url, asked, extra_body={"prompt": "not so", "top_p": 0.5})
    assert {result.text for result in results} == {"0", "1", "2"}
    assert {body["top_p"] for body in stub.asked} == {0.5}


async def test_never_more_at_once_than_allowed_and_no_more_taken_than_can_be_held():
    stub, num_taken = Stub(), 0

    def counted():
        nonlocal num_taken
        for request in requests(200):
            num_taken += 1
            yield request

    num_read = 0
    async with stub.serving() as url:
        client = BatchClient(url, BatchSettings(max_concurrency=6))
        async for _ in client.run(counted()):
            num_read += 1
            assert num_taken <= num_read + 6
    assert stub.most <= 6
    assert num_read == 200


def answer_to(trouble):
    if trouble == "cut":
        return None
    if isinstance(trouble, bytes):
        answer = said()
        answer.body = trouble
        return answer
    return said("later", status=trouble, Retry_After="0.001")


@pytest.mark.parametrize(
    "trouble", [500, 502, 504, 408, 429, 503, "cut", b"<html>", b'{"id": "\xff"}']
)
async def test_what_may_succeed_later_is_tried_again(trouble):
    troubles = [trouble] * 3
    stub = Stub(lambda body: answer_to(troubles.pop()) if troubles else said())
    async with stub.serving() as url:
        [result] = await results_of(url, requests(1))
    assert result.is_ok
    assert len(stub.asked) == 4


async def test_trying_again_has_an_end_and_the_last_word_is_kept():
    stub = Stub(lambda body: said("broken", status=500))
    async with stub.serving() as url:
        [result] = await results_of(url, requests(1), max_attempts=3)
    assert (len(stub.asked), result.failure) == (3, "HTTP 500")
    stub = Stub(lambda body: None)
    async with stub.serving() as url:
        [result] = await results_of(url, requests(1), max_attempts=2)
    assert (len(stub.asked), result.failure, result.body) == (2, "connection_broken", None)


async def test_an_answer_that_does_not_end_is_too_late():
    async def hang(body):
        await asyncio.Event().wait()

    async with Stub(hang).serving() as url:
        [result] = await results_of(url, requests(1), max_attempts=1, timeout_s=0.05)
    assert result.failure == "timeout"


@pytest.fixture
def looks_take_time(monkeypatch):
    """Let a millisecond pass whenever a client looks at the clock, and none otherwise: patience ends by what is done."""
    clock = itertools.count(1.0, 0.001)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))


@pytest.mark.usefixtures("looks_take_time")
async def test_one_request_that_is_rejected_ends_when_all_others_were_answered():
    def script(body):
        return said(status=429 if body["prompt"] == "7" else 200, Retry_After="0.001")

    async with Stub(script).serving() as url:
        results = await results_of(url, requests(30), max_concurrency=2, patience_s=0.05)
    assert [(r.custom_id, r.failure) for r in results if not r.is_ok] == [("r7", "HTTP 429")]
    assert len(results) == 30


async def test_a_request_that_waits_for_longer_than_its_patience_behind_others_does_not_fail(
    monkeypatch,
):
    now_s = 0.0

    def monotonic() -> float:
        nonlocal now_s
        now_s += 0.0001  # who looks again and again sees time pass
        return now_s

    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=monotonic, time=time.time))

    async def script(body):
        nonlocal now_s
        if stub.now > 1:
            return said(status=429, Retry_After="0.001")
        await asyncio.sleep(0.002)
        now_s += 0.05
        return said()

    stub = Stub(script)
    async with stub.serving() as url:
        results = await results_of(url, requests(40), max_concurrency=10, patience_s=1.5)
    assert all(result.is_ok for result in results)


@pytest.mark.parametrize("after", ["30", "1e9"])
async def test_nothing_is_sent_before_retry_after_is_over(after):
    stub = Stub(lambda body: said(status=429, Retry_After=after))
    async with stub.serving() as url:
        client = BatchClient(url, BatchSettings(max_concurrency=1))
        running = asyncio.create_task(anext(client.run(requests(5))))
        await asyncio.wait_for(stub.is_asked.wait(), 60)
        while client.num_at_server:  # noqa: ASYNC110 - the loop's other tasks make it so
            await asyncio.sleep(0)
        wait_s = client._retry_at - time.monotonic()
        assert min(float(after), MAX_RETRY_AFTER_S) - 5 < wait_s <= MAX_RETRY_AFTER_S
        assert len(stub.asked) == 1
        client.stop()
        with pytest.raises(StopAsyncIteration):
            await running


async def test_a_server_that_is_full_most_of_the_time_is_asked_again_as_soon_as_it_says(
    monkeypatch,
):
    """Pauses of our own, which grow, do not leave a busy server without work."""
    monkeypatch.setattr("tandem.batch.client.FIRST_PAUSE_S", 1000.0)
    stub = Stub(lambda body: said(status=429 if stub.now > 2 else 200, Retry_After="0.01"))
    async with stub.serving() as url:
        results = await asyncio.wait_for(results_of(url, requests(40), max_concurrency=20), 300)
    assert all(result.is_ok for result in results)


def test_retry_after_is_seconds_or_a_date():
    then = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert retry_after_s("2.5") == 2.5
    assert 50 < retry_after_s(then) <= 60
    assert [retry_after_s(value) for value in ("", "soon", "-3", "nan")] == [0.0] * 4


async def test_a_server_that_comes_back_is_used_again(closed_url, closed_port):
    """No request fails, however long the attempt took that the server's end broke."""
    stub, client = Stub(), BatchClient(closed_url)

    async def collect(asked):
        return [result async for result in client.run(asked)]

    async with stub.serving(closed_port):
        await collect(requests(1))
    collecting = asyncio.create_task(collect(requests(20)))
    while not client.problem:  # noqa: ASYNC110 - the loop's other tasks make it so
        await asyncio.sleep(0)
    async with stub.serving(closed_port):
        results = await collecting
    assert all(result.is_ok for result in results)
    assert (len(results), len(stub.asked)) == (20, 21)


async def test_a_request_that_was_under_way_for_long_outlives_its_server(closed_url, closed_port):
    """Patience counts from the first rejection, not from when the request was first sent."""
    is_over = asyncio.Event()

    async def script(body):
        if body["prompt"] == "0":
            await is_over.wait()
            return None
        return said()

    client = BatchClient(closed_url, BatchSettings(patience_s=1.0, max_concurrency=2))
    results = client.run(requests(2))
    async with Stub(script).serving(closed_port):
        assert (await anext(results)).custom_id == "r1"
        await asyncio.sleep(1.1)  # longer than its patience
        is_over.set()
    last = asyncio.create_task(anext(results))
    while not client.problem:  # noqa: ASYNC110 - the loop's other tasks make it so
        await asyncio.sleep(0)
    async with Stub().serving(closed_port):
        assert (await last).is_ok
    await results.aclose()


async def test_another_key_is_asked_for_once_and_no_answer_is_made_of_that():
    stub = Stub(lambda body: said("no", status=401))
    async with stub.serving() as url:
        with pytest.raises(KeyRefused, match="--api-key"):
            await results_of(url, requests(50), api_key="wrong", max_concurrency=1)
    assert len(stub.asked) == 1
    assert stub.keys == ["Bearer wrong"]


@pytest.mark.usefixtures("looks_take_time")
async def test_it_ends_when_no_server_has_answered_for_too_long(closed_url, closed_port):
    client = BatchClient(closed_url, BatchSettings(patience_s=0.03))
    with pytest.raises(ServerAway, match=f"{closed_url} .*refused.*start a server"):
        await anext(client.run(requests(3)))  # at once: nothing was ever there
    async with Stub().serving(closed_port):
        assert [result.is_ok async for result in client.run(requests(1))] == [True]
    with pytest.raises(ServerAway, match=f"{closed_url} has answered nothing .*refused"):
        await anext(client.run(requests(3)))
    async with Stub(lambda body: said(status=503)).serving() as url:
        with pytest.raises(ServerAway, match="has no room"):
            await results_of(url, requests(3), patience_s=0.03)


async def test_whoever_leaves_early_ends_what_is_under_way():
    stub = Stub(lambda body: said() if body["prompt"] == "0" else asyncio.Event().wait())
    async with stub.serving() as url:
        client = BatchClient(url)
        async with aclosing(client.run(requests(10))) as results:
            await anext(results)
        assert client.num_at_server == 0


async def test_without_a_loop_results_come_in_the_order_of_the_requests():
    def script(body):
        return said(body["prompt"], status=200 if body["prompt"] != "7" else 404)

    async with Stub(script).serving() as url:
        asked = requests(40)
        results = await asyncio.to_thread(run_batch, asked, url)
    assert [result.request for result in results] == asked
    assert [result.status_code for result in results] == [404 if i == 7 else 200 for i in range(40)]


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x"])
def test_a_url_that_is_none_is_rejected(url):
    with pytest.raises(ConfigInvalid, match="URL"):
        BatchClient(url)
