"""New weights under running requests: each answer is wholly of the old weights, or wholly of the new ones."""

import asyncio
import shutil

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.wire.generation import SamplingParams
from tests.e2e.clients import is_told, post
from tests.e2e.cluster import ask, running_cluster, running_serve
from tests.one_engine import tokens_of_one_engine
from tests.patience import eventually

FLAGS = (
    *("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "4096"),
    *("--num-threads", "1", "--log-level", "error"),
)
PROMPTS = [[5 + index, 6, 7, 8] * 12 for index in range(4)]
NUM_NEW = 24
ROUTE = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory):
    """Two checkpoints of one model, and a third one with a NaN, which only a load finds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    names = ("old", "new", "broken")
    for name in names:
        shutil.copytree(tiny_model("llama"), folder / name)
    for name in names[1:]:
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        generator = torch.Generator().manual_seed(9)
        for weight in weights.values():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
        if name == "broken":
            weights["model.embed_tokens.weight"][0, 0] = torch.nan
        save_file(weights, file, metadata={"format": "pt"})
    return [folder / name for name in names]


@pytest.fixture(scope="module")
def answers(checkpoints):
    """The tokens of each prompt by the old weights, and by the new ones."""
    params = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
    told = [
        tokens_of_one_engine(path, PROMPTS, [params] * len(PROMPTS)) for path in checkpoints[:2]
    ]
    assert all(old != new for old, new in zip(*told, strict=True))
    return told


async def generated(session, url: str, prompt: list[int]) -> list[int] | None:
    """Return the tokens of an answer; None while no pair of nodes has the same weights."""
    params = {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    status, told = await post(
        session, url, "/generate", {"input_ids": prompt, "sampling_params": params}
    )
    assert status in (200, 503), told
    return told["output_ids"] if status == 200 else None


async def all_of(url: str) -> list[list[int] | None]:
    async with aiohttp.ClientSession() as session:
        return [await generated(session, url, prompt) for prompt in PROMPTS]


async def updated_under_load(cluster, path, answers) -> int:
    """Update both halves while clients ask; return the number of answers meanwhile, which are all right."""
    is_over, num_answered, is_answered = False, 0, asyncio.Event()

    async def client(number: int) -> None:
        nonlocal num_answered
        while not is_over:
            told = await generated(session, cluster.url, PROMPTS[number])
            assert told is None or told in (answers[0][number], answers[1][number])
            num_answered += told is not None
            if num_answered:
                is_answered.set()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for number in range(len(PROMPTS)):
            tasks.create_task(client(number))
        nodes = cluster.prefill_urls + cluster.decode_urls
        body = {"model_path": str(path), "weight_version": "step 1"}
        await is_answered.wait()
        told = await asyncio.gather(*(post(session, url, ROUTE, body) for url in nodes))
        is_over = True
    assert [status for status, _ in told] == [200, 200], told
    assert all(answer["success"] for _, answer in told)
    return num_answered


def test_requests_during_an_update_of_both_halves_are_of_one_checkpoint_each(checkpoints, answers):
    old, new, _ = checkpoints
    router_flags = ("--node-wait-s", "1")  # then 503: the client sends it again
    with running_cluster("--model", str(old), *FLAGS, router_flags=router_flags) as cluster:
        assert asyncio.run(all_of(cluster.url)) == answers[0]
        assert asyncio.run(updated_under_load(cluster, new, answers)) > 0
        assert eventually(lambda: ask(f"{cluster.url}/health")[0] == 200)
        assert asyncio.run(all_of(cluster.url)) == answers[1], "nothing cached of the old weights"
        assert ask(f"{cluster.url}/model_info")[1]["weight_version"] == "step 1"
        assert ask(cluster.prefill_urls[0] + ROUTE, {"model_path": str(old)})[0] == 200
        assert eventually(lambda: is_told(f"{cluster.url}/health", 503, "with the same model")), (
            "no pair"
        )


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_old_one_in_service(checkpoints, answers):
    old, new, broken = checkpoints
    with running_serve("--model", str(old), *FLAGS) as url:
        status, told = ask(url + ROUTE, {"model_path": str(broken)})
        assert (status, "infinite or NaN" in told["error"]["message"]) == (400, True), told
        assert told["error"]["message"].endswith("keeps the old weights")
        assert asyncio.run(all_of(url)) == answers[0]
        assert ask(f"{url}/model_info")[1]["weight_version"] == "default"
        status, told = ask(url + ROUTE, {"model_path": str(new), "abort_all_requests": True})
        assert (status, told["weight_version"]) == (200, "new"), told
        assert asyncio.run(all_of(url)) == answers[1]
