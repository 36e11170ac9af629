"""The router over stock engines: hand-off, failover, cancellation."""

import asyncio
from contextlib import closing

import pytest

from tandem.cli.up import free_ports
from tandem.stock import adapter
from tandem.stock import node as stock_node
from tandem.wire.errors import AttemptsUsedUp, InvalidRequest
from tandem.wire.events.publisher import KvEventPublisher, KvEventsConfig
from tandem.wire.generation import (
    GenerateRequest,
    Grammar,
    LogprobOptions,
    SamplingParams,
    new_request_id,
)
from tandem.wire.prefixes import block_names
from tests.patience import until_async
from tests.receivers import deltas
from tests.stock.fake_vllm import continued
from tests.stock.fleet import fleet

PROMPT = [5, 6, 7, 8, 9]
MOONCAKE = {"kv_connector": "mooncake"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(stock_node, "POLL_INTERVAL_S", 0.05)


def request(prompt=PROMPT, num=12, *, logprobs=None, **sampling) -> GenerateRequest:
    sampling = {"temperature": 0.0} | sampling
    return GenerateRequest(
        request_id=new_request_id(),
        prompt_ids=list(prompt),
        sampling=SamplingParams(max_new_tokens=num, **sampling),
        logprobs=logprobs,
    )


async def tokens(found, asked=None) -> list[int]:
    ids = []
    async for delta in deltas(found.backend, asked or request()):
        ids += delta.token_ids
    return ids


async def test_engine_serves_its_model_under_all_its_names(tmp_path):
    async with fleet(tmp_path) as found:
        assert found.backend.models().choose(None).names == ("m", "alias")


async def test_requests_that_wait_for_prefill_do_not_fill_a_decode_engine(tmp_path):
    async with fleet(tmp_path) as found:
        await until_async(lambda: found.node(found.decodes[0]).load.num_waiting == 1)


async def streaming(found, asked=None):
    """Start a request that waits in the middle of its stream; return its task, and decode's engine."""
    for decode in found.decodes:
        decode.stop_at = 5
    task = asyncio.create_task(tokens(found, asked))
    await until_async(lambda: any(each.num_running for each in found.decodes))
    await until_async(lambda: not any(each.num_running for each in found.prefills))
    (decode,) = [each for each in found.decodes if each.num_running]
    await asyncio.sleep(0.05)
    return task, decode


async def replaced(found, prefill, name, value):
    """Change what a prefill's references name; every answer stays right, and the node begins a new life."""
    before = found.node(prefill).info.epoch
    setattr(prefill, name, value)
    while found.node(prefill).info.epoch == before:
        assert await tokens(found) == continued(PROMPT, 12)


async def test_decode_continues_from_the_blocks_that_prefill_names(tmp_path):
    async with fleet(tmp_path) as found:
        assert await tokens(found) == continued(PROMPT, 12)
        prefill, decode = found.prefills[0].bodies[-1], found.decodes[0].bodies[-1]
    assert prefill["max_tokens"] == 1
    assert prefill["prompt"] == decode["prompt"] == PROMPT
    assert decode["kv_transfer_params"]["remote_engine_id"] == found.prefills[0].engine_id


async def test_both_halves_name_the_transfer_that_mooncake_makes(tmp_path):
    async with fleet(tmp_path, options=MOONCAKE) as found:
        assert await tokens(found) == continued(PROMPT, 12)
        prefill, decode = found.prefills[0].bodies[-1], found.decodes[0].bodies[-1]
        asked, fetched = prefill["kv_transfer_params"], decode["kv_transfer_params"]
        assert asked["transfer_id"] == fetched["transfer_id"]
        assert fetched["remote_engine_id"] == found.prefills[0].engine_id
        assert not any(found.backend.leftovers.values())


async def test_decode_that_waits_for_a_transfer_from_a_lost_prefill_is_replayed(tmp_path):
    async with fleet(tmp_path, num_prefills=2, options=MOONCAKE) as found:
        for prefill in found.prefills:
            prefill.computing.clear()
        task = asyncio.create_task(tokens(found))
        await until_async(lambda: found.decodes[0].num_running == 1)
        (prefill,) = [each for each in found.prefills if each.num_running]
        await prefill.kill()
        for each in found.prefills:
            each.computing.set()
        assert await task == continued(PROMPT, 12)


async def test_halves_of_two_adapters_meet_over_http(tmp_path):
    async with fleet(tmp_path, num_adapters=2) as found:
        assert await tokens(found) == continued(PROMPT, 12)
        assert "kv_transfer_params" in found.decodes[0].bodies[-1]


async def test_loss_of_decode_in_a_stream_is_not_seen_by_the_client(tmp_path):
    async with fleet(tmp_path, num_decodes=2) as found:
        task, decode = await streaming(found)
        for each in found.decodes:
            each.stop_at = 1 << 30
        await decode.kill()
        assert await task == continued(PROMPT, 12)


async def test_frozen_decode_is_given_up_after_the_limit_of_a_poll(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "MAX_POLL_S", 0.3)
    async with fleet(tmp_path, num_decodes=2) as found:
        task, decode = await streaming(found)
        for each in found.decodes:
            each.stop_at = 1 << 30
        decode.unfrozen.clear()
        assert await task == continued(PROMPT, 12)
        decode.unfrozen.set()
        await found.until_up(decode)


async def test_engine_that_sends_tokens_is_not_lost_when_it_answers_no_poll(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "MAX_POLL_S", 0.3)
    async with fleet(tmp_path) as found:
        (decode,) = found.decodes
        before = found.node(decode).info.epoch
        decode.pause_s = 0.02
        task = asyncio.create_task(tokens(found, request(num=80)))
        await until_async(lambda: decode.num_running)
        decode.reports.clear()
        assert await task == continued(PROMPT, 80)
        assert found.node(decode).info.epoch == before
        await until_async(lambda: not found.node(decode).is_up)


async def test_restart_under_the_same_address_starts_a_new_life(tmp_path):
    async with fleet(tmp_path) as found:
        before = found.node(found.decodes[0]).info.epoch
        await found.decodes[0].restart()
        await until_async(lambda: found.node(found.decodes[0]).info.epoch != before)
        await found.until_up()
        assert await tokens(found) == continued(PROMPT, 12)


async def test_unnoticed_restart_of_prefill_is_replayed(tmp_path):
    """Blocks of the new life are named by another engine id than the node has learned."""
    async with fleet(tmp_path, num_prefills=2) as found:
        await replaced(found, found.prefills[0], "engine_id", "engine-of-another-life")


async def test_references_of_an_older_registration_are_replayed(tmp_path):
    async with fleet(tmp_path, num_prefills=2) as found:
        await replaced(found, found.prefills[0], "generation", 2)


async def test_prefill_lost_before_the_first_token_is_replayed(tmp_path):
    """What decode reads then may be of another request."""
    async with fleet(tmp_path, num_prefills=2) as found:
        (decode,) = found.decodes
        decode.stop_at = 0
        task = asyncio.create_task(tokens(found))
        await until_async(lambda: decode.num_running == 1)
        (prefill,) = [
            each for each in found.prefills if PROMPT in (b["prompt"] for b in each.bodies)
        ]
        await prefill.kill()
        await until_async(lambda: not found.node(prefill).is_up)
        decode.going.set()
        assert await task == continued(PROMPT, 12)


def prompts_of(engine) -> list[list[int]]:
    return [body["prompt"] for body in engine.bodies]


def known(found, engine):
    """Return the blocks that the router takes for cached on an engine."""
    return found.node(engine).prefixes.cached.names


async def test_prompt_goes_again_to_the_engine_that_was_sent_it(tmp_path):
    prompt = [3 + number % 90 for number in range(300)]
    async with fleet(tmp_path, num_prefills=3, policy="cache_aware") as found:
        await tokens(found, request(prompt))
        (first,) = [each for each in found.prefills if prompt in prompts_of(each)]
        await until_async(lambda: known(found, first) >= {*block_names(prompt)})
        for _ in range(4):
            await tokens(found, request(prompt))
        assert prompts_of(first).count(prompt) == 5


async def test_published_prefixes_are_known_to_the_router(tmp_path):
    prompt = [3 + number % 90 for number in range(300)]
    endpoint = f"tcp://[::1]:{free_ports(1)[0]}"
    with closing(KvEventPublisher(KvEventsConfig(endpoint=endpoint))) as publisher:
        async with fleet(tmp_path, options={"kv_events_endpoint": endpoint}) as found:
            await tokens(found, request(prompt))
            (prefill,) = found.prefills

            def is_known():
                publisher.on_stored(
                    7, None, prompt[:128]
                )  # again, since the subscriber may come late
                return known(found, prefill) == {*block_names(prompt[:128])}

            await until_async(is_known)


async def test_cancelled_request_ends_on_the_engine(tmp_path):
    async with fleet(tmp_path) as found:
        task, decode = await streaming(found)
        task.cancel()
        await until_async(lambda: decode.num_running == 0)


async def test_failed_pull_is_an_error_of_the_attempt_and_not_text(tmp_path):
    async with fleet(tmp_path, max_attempts=2) as found:
        found.decodes[0].end = "error"
        with pytest.raises(AttemptsUsedUp, match="error"):
            await tokens(found, request(num=1))


async def test_replay_asks_for_the_rest_only(tmp_path):
    async with fleet(tmp_path, num_decodes=2) as found:
        task, decode = await streaming(found, request(min_new_tokens=10, seed=40))
        for each in found.decodes:
            each.stop_at = 1 << 30
        await decode.kill()
        assert await task == continued(PROMPT, 12)
        (other,) = [each for each in found.decodes if each is not decode]
        body = other.bodies[-1]
    assert body["prompt"] == PROMPT + continued(PROMPT, 5)
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (7, 5, 45)


async def interrupted(found, asked):
    """Kill decode's engine in the middle of an answer; return the tokens, the end, and the phases."""
    for decode in found.decodes:
        decode.stop_at = 5
    ids, phases, finish = [], [], None
    async for delta in deltas(found.backend, asked):
        ids, phases, finish = ids + delta.token_ids, phases + delta.phases, delta.finish
        if len(ids) == 5 and finish is None:
            (decode,) = [each for each in found.decodes if each.num_running]
            for each in found.decodes:
                each.stop_at = 1 << 30
            await decode.kill()
    return ids, finish, {phase.name for phase in phases}


async def test_sampled_answer_is_continued_with_a_note(tmp_path):
    async with fleet(tmp_path, num_decodes=2) as found:
        ids, finish, phases = await interrupted(found, request(temperature=1.0, seed=3))
    assert (len(ids), finish.reason) == (12, "length")
    assert "resampled" in phases


async def test_greedy_answer_is_continued_without_a_note(tmp_path):
    async with fleet(tmp_path, num_decodes=2, replay_sampled="refuse") as found:
        ids, finish, phases = await interrupted(found, request(repetition_penalty=1.2))
    assert (ids, finish.reason) == (continued(PROMPT, 12), "length")
    assert "resampled" not in phases


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        ("refuse", {"temperature": 1.0}),
        ("refuse", {"presence_penalty": 0.5}),
        ("allow", {"grammar": Grammar(kind="regex", text="a*")}),
    ],
)
async def test_answer_that_no_engine_continues_ends_with_abort(tmp_path, rule, sampling):
    async with fleet(tmp_path, num_decodes=2, replay_sampled=rule) as found:
        ids, finish, _phases = await interrupted(found, request(**sampling))
    assert (ids, finish.reason) == (continued(PROMPT, 5), "abort")


async def test_log_probabilities_come_from_both_halves(tmp_path):
    async with fleet(tmp_path) as found:
        asked = request(num=2, logprobs=LogprobOptions(num_top=1, prompt_start=0))
        parts = [part async for part in deltas(found.backend, asked)]
    prompt = [each for part in parts for each in part.prompt_logprobs]
    rows = [each for part in parts for each in part.logprobs]
    assert [each.logprob for each in prompt] == [None, -0.5, -0.5, -0.5, -0.5]
    first = continued(PROMPT, 1)[0]
    assert (rows[0].logprob, rows[0].top) == (-0.25, [(first, -0.25)])


async def test_request_that_the_engine_rejects_is_the_clients_error(tmp_path):
    async with fleet(tmp_path) as found:
        for engine in (*found.prefills, *found.decodes):
            engine.error, engine.status = "too hot", 400
        with pytest.raises(InvalidRequest, match="too hot"):
            await tokens(found)


async def test_many_requests_leave_nothing_behind(tmp_path):
    async with fleet(tmp_path, num_decodes=2) as found:
        prompts = [[5 + number % 80, 6, 7] for number in range(60)]
        answers = await asyncio.gather(*(tokens(found, request(each)) for each in prompts))
        assert answers == [continued(each, 12) for each in prompts]
        assert not any(found.backend.leftovers.values())
        engines = (*found.prefills, *found.decodes)
        await until_async(lambda: not any(each.num_running for each in engines))
