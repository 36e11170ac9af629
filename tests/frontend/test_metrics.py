"""What the edge counts of tokens, and how Prometheus is told."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.frontend import transcript
from tandem.frontend.answering import Answer
from tandem.frontend.detokenizer import NoText
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.sampling import TextRules
from tandem.frontend.transcript import Transcript
from tandem.wire.errors import Overloaded
from tests.frontend.fakes import say
from tests.frontend.helpers import post
from tests.patience import PATIENCE_S


def gaps(metrics) -> dict[str, float]:
    name = "tandem_edge_inter_token_latency_seconds"
    (family,) = [
        family for family in text_string_to_metric_families(metrics.render()) if family.name == name
    ]
    return {
        sample.labels.get("le", sample.name.removeprefix(name)): sample.value
        for sample in family.samples
    }


def reading(metrics):
    """Return a function that has so many tokens come together, in one generation."""
    reader = Transcript(TextRules(), NoText(), Answer(), metrics.gaps)
    reader.has_room = True
    return lambda num_tokens: reader.take_ordinary([5] * num_tokens)


def test_tokens_that_come_together_each_have_their_share(monkeypatch):
    now = iter((100.0, 100.25, 101.0))
    monkeypatch.setattr(transcript, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    metrics = FrontendMetrics()
    come = reading(metrics)
    for num_tokens in (1, 1, 3):
        come(num_tokens)
    assert gaps(metrics)["_count"] == 4
    assert gaps(metrics)["+Inf"] == 4
    assert gaps(metrics)["0.3"] - gaps(metrics)["0.2"] == 4
    assert gaps(metrics)["_sum"] == 1.0


def test_the_first_tokens_of_a_generation_have_no_gap_before_them():
    metrics = FrontendMetrics()
    reading(metrics)(1)
    assert gaps(metrics)["_count"] == 0
    reading(metrics)(3)
    assert gaps(metrics)["_count"] == gaps(metrics)["0.001"] == 2
    assert gaps(metrics)["_sum"] == 0


def test_prometheus_is_told_of_each_gap_once():
    metrics = FrontendMetrics()
    come = reading(metrics)
    for _ in range(5):
        come(1)
        metrics.gather()
    assert gaps(metrics)["_count"] == 4
    buckets = [value for le, value in gaps(metrics).items() if le[0].isdigit()]
    assert buckets == sorted(buckets), "cumulative"


async def told(client) -> dict[str, float]:
    """Return what the edge counted of a single route, by name, and of its answers by status."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    return {
        sample.labels.get("status", sample.name): sample.value
        for sample in samples
        if sample.labels.get("route", "/generate") == "/generate"
    }


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_is_counted_with_the_tokens_it_was_given(
    client, backend, is_stream
):
    backend.script = say([5], [6, 7], asyncio.Event())
    body = {"input_ids": [1, 2, 3], "stream": is_stream}
    asking = asyncio.ensure_future(client.post("/generate", json=body))
    async with asyncio.timeout(PATIENCE_S):
        await backend.until(lambda: backend.num_yielded == 2)
        if is_stream:
            (await asking).close()
        asking.cancel()
        await backend.until(lambda: backend.cancelled)
        while "499" not in (counted := await told(client)):  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0)
    assert counted["499"] == 1
    assert counted["tandem_edge_prompt_tokens_total"] == 3
    assert counted["tandem_edge_output_tokens_total"] == 3
    assert counted["tandem_edge_generations_running"] == 0


async def test_the_prompt_of_a_refused_request_is_not_taken_in(client, backend):
    backend.script = say(Overloaded("the queue is full"))
    assert (await post(client, "/generate", {"input_ids": [1, 2, 3]}))[0] == 429
    assert (await told(client))["tandem_edge_prompt_tokens_total"] == 0
    backend.script = say([5], Overloaded("lost"))
    await post(client, "/generate", {"input_ids": [1, 2, 3]})
    counted = await told(client)
    assert counted["tandem_edge_prompt_tokens_total"] == 3
    assert counted["tandem_edge_output_tokens_total"] == 1


async def test_a_prompt_without_an_answer_is_taken_in(client):
    body = {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "logprobs": 1}
    assert (await post(client, "/v1/completions", body))[0] == 200
    assert (await told(client))["tandem_edge_prompt_tokens_total"] == 3
