"""Tokens through the router are those of `tandem serve` and of transformers' `generate`."""

import asyncio
import random
from itertools import islice

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.cluster import running_cluster, running_serve
from tests.tiny_models import CONFIGS, VOCAB_SIZE

PAGE, CHUNK, CONTEXT = 16, 64, 512
FLAGS = (
    *("--dtype", "float32", "--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK)),
    *("--context-length", str(CONTEXT), "--max-total-tokens", "16384", "--num-threads", "1"),
    *("--log-level", "warning"),
)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "frequency_penalty": 0.1}
TEXTS = (
    "The capital of France is",
    "东京是日本的首都。人口超过一千三百万。请介绍一下",
    "Ein Gedicht über den Herbst: 🍂🍁 Die Blätter",
    "def quicksort(values: list[int]) -> list[int]:\n    ",
    "👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 family and flags",
    "SELECT name, COUNT(*) FROM users WHERE",
)
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK + 5)
ARRIVALS_OVER_S = 0.1  # about three steps: requests join batches at every stage of others
NEAR_THE_LIMIT = (CONTEXT - 20, CONTEXT - 2, CONTEXT - 1)


def length_of_answer(prompt: list[int]) -> int:
    return min(8, CONTEXT - len(prompt))


def embedded_prompts(directory) -> list[list[int]]:
    """At least 60: every length that is a border of something, in several scripts."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    for i, text in enumerate(TEXTS):
        ids = tokenizer(text * 200)["input_ids"]
        prompts += [ids[i : i + length] for length in LENGTHS]
    ids = tokenizer("Once upon a time there was a small house. " * 100)["input_ids"]
    return prompts + [ids[:length] for length in NEAR_THE_LIMIT]


def tiny_prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = (*LENGTHS, CONTEXT - 6)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


async def generate(session, url: str, prompt: list[int], **sampling) -> list[int]:
    """Return the generated ids, asked for with `ignore_eos` so that lengths are known."""
    params = {"max_new_tokens": length_of_answer(prompt), "ignore_eos": True, **sampling}
    body = {"input_ids": prompt, "sampling_params": params}
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["output_ids"]


async def generate_all(url: str, prompts, num_at_once: int, sampled: bool) -> list[list[int]]:
    """Generate for all prompts, `num_at_once` at a time, shuffled and at random times."""
    limit = asyncio.Semaphore(num_at_once)
    order, arrivals = list(enumerate(prompts)), random.Random(num_at_once)
    arrivals.shuffle(order)
    answers: dict[int, list[int]] = {}

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(index: int, prompt: list[int]) -> None:
            sampling = {**SAMPLED, "sampling_seed": index} if sampled else {"temperature": 0}
            async with limit:
                await asyncio.sleep(arrivals.random() * ARRIVALS_OVER_S)
                answers[index] = await generate(session, url, prompt, **sampling)

        async with asyncio.TaskGroup() as tasks:
            for index, prompt in order:
                tasks.create_task(one(index, prompt))
    return [answers[index] for index in range(len(prompts))]


@torch.inference_mode()
def transformers_greedy(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    num_new = length_of_answer(prompt)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def load_reference(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(embedded_model):
    """Prompts, and the tokens of transformers and of `tandem serve` for them."""
    prompts = embedded_prompts(embedded_model)
    model = load_reference(embedded_model)
    greedy = [transformers_greedy(model, prompt) for prompt in prompts]
    with running_serve("--model", str(embedded_model), *FLAGS) as url:
        served = asyncio.run(generate_all(url, prompts, 16, sampled=False))
        sampled = asyncio.run(generate_all(url, prompts[::2], 16, sampled=True))
    return prompts, greedy, served, sampled


@pytest.mark.slow
def test_one_engine_alone_gives_the_tokens_of_transformers(oracle):
    prompts, greedy, served, _ = oracle
    assert len(prompts) >= 60
    assert served == greedy


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_cluster_gives_the_tokens_of_one_engine(oracle, embedded_model, transport):
    prompts, greedy, _, sampled = oracle
    flags = ("--model", str(embedded_model), "--transfer-backend", transport, *FLAGS)
    with running_cluster(*flags) as cluster:
        alone = asyncio.run(generate_all(cluster.url, prompts[::4], 1, sampled=False))
        assert alone == greedy[::4]
        assert asyncio.run(generate_all(cluster.url, prompts, 16, sampled=False)) == greedy
        assert asyncio.run(generate_all(cluster.url, prompts[::2], 16, sampled=True)) == sampled


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_architecture_gives_the_tokens_of_transformers(tiny_model, kind):
    path, prompts = tiny_model(kind), tiny_prompts()
    model = load_reference(path)
    greedy = [transformers_greedy(model, prompt) for prompt in prompts]
    transport = next(islice(("shm", "tcp") * 3, sorted(CONFIGS).index(kind), None))
    flags = ("--model", str(path), "--transfer-backend", transport, *FLAGS)
    with running_serve("--model", str(path), *FLAGS) as url:
        sampled = asyncio.run(generate_all(url, prompts, 16, sampled=True))
    with running_cluster(*flags) as cluster:
        assert asyncio.run(generate_all(cluster.url, prompts, 1, sampled=False)) == greedy
        assert asyncio.run(generate_all(cluster.url, prompts, 16, sampled=False)) == greedy
        assert asyncio.run(generate_all(cluster.url, prompts, 16, sampled=True)) == sampled
