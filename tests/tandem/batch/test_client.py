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
    BatchResult,
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
    async with BatchClient(url, BatchSettings(**settings)) as client:
        return [result async for result in client.run(asked)]


async def until(is_so) -> None:
    while not is_so():  # noqa: ASYNC110 - the loop's other tasks make it so, and tell nobody
        await asyncio.sleep(0)


async def test_every_request_has_its_own_answer():
    stub = Stub()
    async with stub.serving() as url:
        results = await results_of(f"{url}/v1/", requests(300))
    assert {result.custom_id: result.text for result in results} == {
        f"r{i}": str(i) for i in range(300)
    }
    assert all(result.is_ok and result.num_attempts == 1 for result in results)
    assert {(r.prompt_tokens, r.output_tokens, r.request_id) for r in results} == {(5, 2, "cmpl-1")}
    assert sorted(map(int, stub.prompts)) == list(range(300))


async def test_requests_may_be_made_as_they_are_needed_and_bodies_may_be_text():
    async def made():
        for number in range(3):
            await asyncio.sleep(0)
            yield BatchRequest(str(number), b'{"prompt":"%d"}' % number, "/v1/completions")

    stub = Stub()
    async with stub.serving() as url:
        results = await results_of(url, made(), extra_body={"prompt": "not so", "top_p": 0.5})
    assert {result.text for result in results} == {"0", "1", "2"}
    assert {body["top_p"] for body in stub.asked} == {0.5}


async def test_never_more_at_once_than_allowed_and_no_more_taken_than_can_be_held():
    stub, num_taken = Stub(), 0

    def counted():
        nonlocal num_taken
        for request in requests(200):
            num_taken += 1
            yield request

    async with (
        stub.serving() as url,
        BatchClient(url, BatchSettings(max_concurrency=6)) as client,
        aclosing(client.run(counted())) as results,
    ):
        num_read = 0
        async for _ in results:
            num_read += 1
            assert num_taken <= num_read + 6
    assert stub.most <= 6
    assert num_read == 200


@pytest.mark.parametrize("trouble", [500, 502, 504, 408, 429, 503, "cut", "no JSON"])
async def test_what_may_succeed_later_is_tried_again(trouble):
    troubles = iter([trouble] * 3)

    def script(body):
        match next(troubles, None):
            case None:
                return said()
            case "cut":
                return None
            case "no JSON":
                answer = said()
                answer.text = "<html>"
                return answer
            case status:
                return said("later", status=status, Retry_After="0.001")

    stub = Stub(script)
    async with stub.serving() as url:
        [result] = await results_of(url, requests(1))
    assert result.is_ok
    assert result.num_attempts == len(stub.asked) == 4


async def test_trying_again_has_an_end_and_the_last_word_is_kept():
    async with Stub(lambda body: said("broken", status=500)).serving() as url:
        [result] = await results_of(url, requests(1), max_attempts=3)
    assert (result.num_attempts, result.failure) == (3, "HTTP 500")
    async with Stub(lambda body: None).serving() as url:
        [result] = await results_of(url, requests(1), max_attempts=2)
    assert (result.num_attempts, result.failure, result.body) == (2, "connection_broken", None)


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
async def test_one_request_that_is_refused_ends_when_others_were_answered_meanwhile():
    is_over = False

    def asked():
        yield BatchRequest("no", {"prompt": "no"}, "/v1/completions")
        while not is_over:
            yield BatchRequest("yes", {"prompt": "yes"}, "/v1/completions")

    stub = Stub(lambda body: said(status=429 if body["prompt"] == "no" else 200))
    settings = BatchSettings(max_concurrency=2, patience_s=0.2)
    results = []
    async with (
        stub.serving() as url,
        BatchClient(url, settings) as client,
        aclosing(client.run(asked())) as ended,
    ):
        async for result in ended:
            results.append(result)
            is_over |= not result.is_ok
    failed = [result for result in results if not result.is_ok]
    assert [(result.custom_id, result.failure) for result in failed] == [("no", "HTTP 429")]
    assert len(results) > len(failed)


def sending(limit: float, in_flight: int, **settings) -> BatchClient:
    client = BatchClient("http://one", BatchSettings(**settings))
    client.limit, client.in_flight = limit, in_flight
    return client


def count(client: BatchClient, status: int, sent_at: float | None = None, retry_after="") -> None:
    kind = "answered" if status == 200 else "full"
    result = BatchResult(requests(1)[0], status)
    client._count(kind, result, time.monotonic() if sent_at is None else sent_at, retry_after)


def test_the_limit_doubles_in_a_round_until_the_first_rejection_then_grows_by_one():
    one = sending(16, 16)
    for _ in range(16):
        count(one, 200)
    assert one.limit == 32
    one.in_flight = 32
    count(one, 429)
    assert one.limit == 16
    for _ in range(16):
        count(one, 200)
    assert 16.9 < one.limit <= 17
    bounded = sending(16, 0, max_concurrency=17)
    for _ in range(9):
        count(bounded, 200)
    assert bounded.limit == 17


def test_a_rejection_halves_the_limit_once_for_all_requests_of_its_time():
    one = sending(64, 64)
    began = time.monotonic()
    for _ in range(40):
        count(one, 503, began)
    assert one.limit == 32
    one.in_flight = 0
    count(one, 503)
    assert one.limit == 1, "what was not in use does not count"


def test_nothing_is_sent_before_retry_after_is_over():
    one = sending(8, 1)
    count(one, 429, retry_after="30")
    assert 29 < one._retry_at - time.monotonic() <= 30
    count(one, 429, 0.0, retry_after="1e9")
    assert one._retry_at - time.monotonic() <= MAX_RETRY_AFTER_S


def test_retry_after_is_seconds_or_a_date():
    then = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert retry_after_s("2.5") == 2.5
    assert 50 < retry_after_s(then) <= 60
    assert [retry_after_s(value) for value in ("", "soon", "-3")] == [0.0, 0.0, 0.0]


async def test_a_server_that_comes_back_is_used_again(closed_url, closed_port):
    stub = Stub()
    async with BatchClient(closed_url) as client:
        async with stub.serving(closed_port):
            await collect(client, requests(1))
        collecting = asyncio.create_task(collect(client, requests(20)))
        await until(lambda: client.problem)
        async with stub.serving(closed_port):
            results = await collecting
    assert len(results) == 20
    assert len(stub.asked) == 21


async def collect(client, asked):
    return [result async for result in client.run(asked)]


async def test_another_key_is_asked_for_once_and_no_answer_is_made_of_that():
    stub = Stub(lambda body: said("no", status=401))
    async with stub.serving() as url:
        with pytest.raises(KeyRefused, match="--api-key"):
            await results_of(url, requests(50), api_key="wrong", max_concurrency=1)
    assert len(stub.asked) == 1
    assert stub.keys == ["Bearer wrong"]


@pytest.mark.usefixtures("looks_take_time")
async def test_it_ends_when_no_server_has_answered_for_too_long(closed_url, closed_port):
    async with BatchClient(closed_url, BatchSettings(patience_s=0.03)) as client:
        with pytest.raises(ServerAway, match=f"{closed_url} .*refused.*start a server"):
            await collect(client, requests(3))  # at once: nothing was ever there
        async with Stub().serving(closed_port):
            await collect(client, requests(1))
        with pytest.raises(ServerAway, match=f"{closed_url} has answered nothing .*refused"):
            await collect(client, requests(3))
    async with Stub(lambda body: said(status=503)).serving() as url:
        with pytest.raises(ServerAway, match="has no room"):
            await results_of(url, requests(3), patience_s=0.03)


async def test_whoever_leaves_early_ends_what_is_under_way():
    stub = Stub(lambda body: said() if body["prompt"] == "0" else asyncio.Event().wait())
    async with stub.serving() as url, BatchClient(url) as client:
        async with aclosing(client.run(requests(10))) as results:
            async for _ in results:
                break
        assert client.in_flight == 0


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
