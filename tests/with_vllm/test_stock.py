"""The router in front of unmodified `vllm serve` processes with NixlConnector."""

import asyncio
import random
import signal

import pytest

from tests.patience import until_async
from tests.with_vllm.models import tiny_with_tokenizer
from tests.with_vllm.servers import num_received
from tests.with_vllm.stock import Fleet, answers, client, stream, streams

NUM_NEW, NUM_LONG, NUM_STREAMS = 24, 200, 16
# Tokens of each stream when an engine is lost.
NUM_BEFORE = 20
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 129, 300)


def prompts(count: int, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, 49000) for _ in range(LENGTHS[number % len(LENGTHS)])]
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model(cache, tmp_path_factory):
    return tiny_with_tokenizer(cache, tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def fleet(model, tmp_path_factory):
    """Return one prefill and two decode engines behind a router, and an engine alone."""
    with Fleet(model, tmp_path_factory.mktemp("fleet"), ("alone", "p1", "d1", "d2")) as found:
        found.wait_up()
        found.route()
        yield found


@pytest.fixture(scope="module")
def alone(fleet):
    """Return the long answers of `vllm serve` without a router."""
    return asyncio.run(_alone(fleet))


async def _alone(fleet):
    async with client() as session:
        _, seen = await streams(session, fleet["alone"].url, prompts(NUM_STREAMS), NUM_LONG)
    return seen


@pytest.mark.parametrize(
    "is_mooncake", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["nixl", "mooncake"]
)
async def test_answers_are_those_of_decode_alone(model, tmp_path, is_mooncake):
    with Fleet(model, tmp_path, ("p1", "d1"), is_mooncake=is_mooncake) as fleet:
        fleet.wait_up()
        fleet.route()
        async with client() as session:
            expected = await answers(session, fleet["d1"].url, prompts(10), NUM_NEW)
            assert await answers(session, fleet.url, prompts(10, seed=8), NUM_NEW)
            assert num_received(fleet["d1"].url) > 0
            assert await answers(session, fleet.url, prompts(10), NUM_NEW) == expected


@pytest.mark.thorough
async def test_40_answers_are_those_of_vllm_serve_alone(fleet):
    async with client() as session:
        expected = await answers(session, fleet["alone"].url, prompts(40), NUM_NEW)
        assert await answers(session, fleet.url, prompts(40), NUM_NEW) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "number"),
    [("d1", signal.SIGKILL), ("p1", signal.SIGKILL), ("d2", signal.SIGSTOP)],
    ids=["decode is killed", "prefill is killed", "decode is stopped"],
)
async def test_streams_outlive_an_engine_which_then_serves_again(fleet, alone, name, number):
    seen = [[] for _ in range(NUM_STREAMS)]
    async with client() as session:
        running = [
            asyncio.create_task(stream(session, fleet.url, prompt, NUM_LONG, each))
            for prompt, each in zip(prompts(NUM_STREAMS), seen, strict=True)
        ]
        await until_async(lambda: min(map(len, seen)) >= NUM_BEFORE)
        fleet[name].signal(number)
        assert await asyncio.gather(*running) == [""] * NUM_STREAMS
        assert seen == alone
        await asyncio.to_thread(fleet.restore)
        ended, seen = await streams(session, fleet.url, prompts(NUM_STREAMS), NUM_NEW)
        assert ended == [""] * NUM_STREAMS
        assert seen == [each[:NUM_NEW] for each in alone]


@pytest.mark.thorough
async def test_aborted_streams_end_on_the_engines_within_two_seconds(fleet):
    async with client() as session:
        seen = [[] for _ in range(NUM_STREAMS)]
        running = [
            asyncio.create_task(stream(session, fleet.url, prompt, 700, each))
            for prompt, each in zip(prompts(NUM_STREAMS), seen, strict=True)
        ]
        await until_async(lambda: all(seen))
        for each in running:
            each.cancel()
        await until_async(lambda: asyncio.to_thread(lambda: not fleet.num_running()), within_s=2.0)


@pytest.mark.thorough
async def test_200_mixed_requests_of_which_a_third_is_aborted_leave_nothing(fleet):
    rng = random.Random(11)
    kinds = (
        {},
        {"temperature": 1.0, "seed": 5},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"logprobs": 2},
        {"n": 2, "temperature": 1.0},
        {"stop": ["e"], "ignore_eos": False},
    )

    async def ask(session, number: int, prompt) -> str:
        asked = stream(session, fleet.url, prompt, NUM_NEW, [], **kinds[number % len(kinds)])
        if number % 3:
            return await asked
        try:
            async with asyncio.timeout(rng.uniform(0.01, 0.5)):
                return await asked
        except TimeoutError:
            return ""

    async with client() as session:
        ended = await asyncio.gather(
            *(ask(session, number, prompt) for number, prompt in enumerate(prompts(200, 3)))
        )
        assert set(ended) == {""}
        await until_async(lambda: not fleet.num_running())
        # Blocks of aborted prompts last as long as their lease; the pools serve what was asked before.
        expected = await answers(session, fleet["alone"].url, prompts(10), NUM_NEW)
        assert await answers(session, fleet.url, prompts(10), NUM_NEW) == expected
