"""The router over SGLang's prefill and decode servers."""

import asyncio
from functools import partial

import pytest
from sglang_router import mini_lb

from tandem.stock import node as stock_node
from tandem.wire.errors import AttemptsUsedUp, InvalidRequest
from tandem.wire.generation import Grammar, LogprobOptions
from tests.patience import until_async
from tests.receivers import deltas
from tests.stock.fake_vllm import continued
from tests.stock.fleet import fleet, sglang_engines
from tests.stock.test_fleet import PROMPT, request, streaming, tokens

sglang_fleet = partial(fleet, make=sglang_engines)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(stock_node, "POLL_INTERVAL_S", 0.05)


@pytest.mark.parametrize("is_incremental", [True, False])
async def test_decode_streams_what_prefill_has_computed(tmp_path, is_incremental):
    make = partial(sglang_engines, is_incremental=is_incremental)
    async with fleet(tmp_path, make=make) as found:
        assert await tokens(found) == continued(PROMPT, 12)


async def test_both_halves_have_the_same_body_but_for_their_ids(tmp_path):
    async with sglang_fleet(tmp_path) as found:
        await tokens(found, request(seed=7, min_new_tokens=2))
        (prefill,), (decode,) = found.prefills, found.decodes
        halves = prefill.bodies[-1], decode.bodies[-1]
    ids = {each.pop("rid") for each in halves}
    assert len(ids) == 2
    assert halves[0] == halves[1]
    assert (halves[0]["bootstrap_host"], halves[0]["bootstrap_port"]) == ("127.0.0.1", prefill.port)
    assert halves[0]["sampling_params"]["sampling_seed"] == 7
    assert halves[0]["sampling_params"]["min_new_tokens"] == 2


class Lb:
    """What `mini_lb` sends to its servers."""

    enable_trace = False

    def __init__(self, prefill, decode) -> None:
        self._pair, self.sent = (prefill.url, prefill.port, decode.url), {}

    def select_pair(self):
        return self._pair

    async def generate_stream(self, body, *_to) -> None:
        self.sent = body


async def test_halves_have_the_fields_that_mini_lb_adds(tmp_path, monkeypatch):
    async with sglang_fleet(tmp_path) as found:
        await tokens(found)
        ours = found.prefills[0].bodies[-1]
        lb = Lb(found.prefills[0], found.decodes[0])
    monkeypatch.setattr(mini_lb, "lb", lb)
    asked = {name: value for name, value in ours.items() if not name.startswith("bootstrap_")}
    await mini_lb.handle_generate_request(asked)
    theirs, room = lb.sent, ours["bootstrap_room"]
    assert theirs | {"bootstrap_room": room} == ours
    assert isinstance(theirs["bootstrap_room"], int)
    assert 0 <= room < 1 << 63


# Of both halves of a `/generate`, from smg 1.13.0. Its halves of `/v1/chat/completions` have the same fields.
SMG = {
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 3028566591479472785,
}


async def test_halves_have_the_fields_that_smg_adds_and_follow_the_room(tmp_path):
    """Prefill's servers and decode's derive the data-parallel rank from the room, unless a half names one."""
    async with fleet(tmp_path, make=partial(sglang_engines, num_ranks=2)) as found:
        await tokens(found)
        halves = found.prefills[0].bodies[-1], found.decodes[0].bodies[-1]
    for half in halves:
        added = [name for name in half if "bootstrap" in name or "rank" in name]
        assert {name: type(half[name]) for name in added} == {name: type(SMG[name]) for name in SMG}


async def test_loss_of_decode_in_a_stream_is_not_seen_by_the_client(tmp_path):
    async with sglang_fleet(tmp_path, num_decodes=2) as found:
        task, decode = await streaming(found)
        for each in found.decodes:
            each.stop_at = 1 << 30
        await decode.kill()
        assert await task == continued(PROMPT, 12)
        (other,) = [each for each in found.decodes if each is not decode]
        assert other.bodies[-1]["input_ids"] == PROMPT + continued(PROMPT, 5)
        assert other.bodies[-1]["sampling_params"]["max_new_tokens"] == 7


async def test_decode_that_waits_for_a_lost_prefill_is_aborted_and_the_request_replayed(tmp_path):
    async with sglang_fleet(tmp_path, num_prefills=2) as found:
        (decode,) = found.decodes
        for prefill in found.prefills:
            prefill.computing.clear()
        task = asyncio.create_task(tokens(found))
        await until_async(lambda: decode.num_running == 1)
        lost = decode.bodies[-1]["rid"]
        (prefill,) = [each for each in found.prefills if each.num_running]
        await prefill.kill()
        for each in found.prefills:
            each.computing.set()
        assert await task == continued(PROMPT, 12)
        await until_async(lambda: lost in decode.aborted)


async def test_cancelled_request_is_aborted_on_both_servers(tmp_path):
    async with sglang_fleet(tmp_path) as found:
        task, decode = await streaming(found)
        task.cancel()
        await until_async(lambda: decode.num_running == 0)
        await until_async(lambda: decode.bodies[-1]["rid"] in decode.aborted)


async def test_failed_transfer_is_an_error_of_the_attempt_and_not_text(tmp_path):
    async with sglang_fleet(tmp_path, max_attempts=2) as found:
        found.decodes[0].end = "abort"
        with pytest.raises(AttemptsUsedUp, match="KVTransferError"):
            await tokens(found, request(num=1))


async def test_request_that_a_server_rejects_in_its_stream_is_the_clients_error(tmp_path):
    async with sglang_fleet(tmp_path) as found:
        found.prefills[0].end = "invalid"
        with pytest.raises(InvalidRequest, match="too hot"):
            await tokens(found)
        found.prefills[0].end = "length"
        assert await tokens(found) == continued(PROMPT, 12)


async def test_stream_without_the_end_of_the_answer_is_replayed(tmp_path):
    async with sglang_fleet(tmp_path, max_attempts=2) as found:
        found.decodes[0].end = ""
        with pytest.raises(AttemptsUsedUp, match="without the end of the answer"):
            await tokens(found)


async def test_restart_under_the_same_address_starts_a_new_life(tmp_path):
    async with sglang_fleet(tmp_path) as found:
        before = found.node(found.decodes[0]).info.epoch
        await found.decodes[0].restart()
        await until_async(lambda: found.node(found.decodes[0]).info.epoch != before)
        await found.until_up()
        assert await tokens(found) == continued(PROMPT, 12)


@pytest.mark.parametrize("is_incremental", [True, False])
async def test_log_probabilities_come_from_both_halves(tmp_path, is_incremental):
    make = partial(sglang_engines, is_incremental=is_incremental)
    async with fleet(tmp_path, make=make) as found:
        asked = request(num=3, logprobs=LogprobOptions(num_top=1, prompt_start=0))
        parts = [part async for part in deltas(found.backend, asked)]
    prompt = [each for part in parts for each in part.prompt_logprobs]
    rows = [each for part in parts for each in part.logprobs]
    assert [each.logprob for each in prompt] == [None, -0.5, -0.5, -0.5, -0.5]
    expected = [(-0.25, [(token, -0.25)]) for token in continued(PROMPT, 3)]
    assert [(each.logprob, each.top) for each in rows] == expected


@pytest.mark.parametrize(
    ("grammar", "field", "text"),
    [
        (Grammar(kind="regex", text="a*"), "regex", "a*"),
        (Grammar(kind="json_object"), "json_schema", '{"type": "object"}'),
    ],
)
async def test_grammar_is_sent_in_the_field_of_its_kind(tmp_path, grammar, field, text):
    async with sglang_fleet(tmp_path) as found:
        await tokens(found, request(grammar=grammar))
        assert found.decodes[0].bodies[-1]["sampling_params"][field] == text


async def test_server_runs_at_most_the_requests_of_all_its_ranks(tmp_path):
    async with fleet(tmp_path, make=partial(sglang_engines, num_ranks=2)) as found:
        (decode,) = found.decodes
        await until_async(lambda: found.node(decode).load.max_running == 8)


async def test_requests_that_wait_for_prefill_do_not_fill_a_decode_server(tmp_path):
    transfers = {"decode_prealloc_queue_reqs": 3, "decode_transfer_queue_reqs": 2}
    async with sglang_fleet(tmp_path) as found:
        (decode,) = found.decodes
        decode.more_load = {
            "num_running_reqs": 1,
            "num_waiting_reqs": 7,
            "disaggregation": transfers,
            "queues": {"prealloc_ready": 1},
        }
        await until_async(lambda: found.node(decode).load.num_running)
        assert found.node(decode).load.num_waiting == 3


async def test_server_of_another_role_is_refused_with_its_flag(tmp_path):
    async with sglang_fleet(tmp_path) as found:
        (decode,) = found.decodes
        decode.mode = "null"
        await decode.restart()
        reason = "start it with decode"
        await until_async(lambda: reason in found.node(decode).reason)
