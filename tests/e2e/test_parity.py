"""Tokens through the router are those of one engine and of transformers' `generate`."""

import asyncio
import random

import aiohttp
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.wire.generation import SamplingParams
from tests.e2e.cluster import running_cluster
from tests.e2e.conftest import CHUNK, CONTEXT, FLAGS, PAGE
from tests.one_engine import tokens_of_one_engine
from tests.tiny_models import CONFIGS, CONTEXT_LENGTH, VOCAB_SIZE

# From here on no draw of these prompts has two candidates that only the last bits of their logits, which differ
# from batch to batch, tell apart.
FIRST_SEED = 1000
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
NUM_NEW = 8
# Of each architecture's cluster, so that every transport pushes layers and whole chunks.
LINKS = {
    "gemma": ("shm", "layer"),
    "llama": ("tcp", "chunk"),
    "mistral": ("shm", "chunk"),
    "phi3": ("tcp", "layer"),
    "qwen2": ("shm", "layer"),
    "qwen3": ("tcp", "layer"),
}
# 32 pages of 24 KiB a layer in one chunk: layers leave eleven at a time.
LARGE_CHUNKS = ("--chunked-prefill-size", "512", "--push-granularity", "layer")


def embedded_prompts(directory) -> list[list[int]]:
    """Several scripts, and every length that is a border of something, each in another of them.

    The tiny models have all lengths, too; this one has what is learned.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    for i, length in enumerate(LENGTHS):
        ids = tokenizer(TEXTS[i % len(TEXTS)] * 200)["input_ids"]
        prompts.append(ids[i : i + length])
    ids = tokenizer("Once upon a time there was a small house. " * 100)["input_ids"]
    return prompts + [ids[:length] for length in NEAR_THE_LIMIT]


def tiny_prompts() -> list[list[int]]:
    """Every length that is a border of something, six times: more than a batch has at once."""
    rng = random.Random(3)
    lengths = (*LENGTHS * 6, CONTEXT_LENGTH - 6, CONTEXT_LENGTH - 1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


async def generate(session, url: str, prompt: list[int], **sampling) -> list[int]:
    """Return the generated ids: `NUM_NEW`, or what the context has room for."""
    params = {"max_new_tokens": NUM_NEW, "ignore_eos": True, **sampling}
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
            sampling = (
                {**SAMPLED, "sampling_seed": FIRST_SEED + index} if sampled else {"temperature": 0}
            )
            async with limit:
                # No wait for anything: the times at which requests come are what is tried.
                await asyncio.sleep(arrivals.random() * ARRIVALS_OVER_S)
                answers[index] = await generate(session, url, prompt, **sampling)

        async with asyncio.TaskGroup() as tasks:
            for index, prompt in order:
                tasks.create_task(one(index, prompt))
    return [answers[index] for index in range(len(prompts))]


@torch.inference_mode()
def choices(model, prompt: list[int], answer: list[int]) -> list[int]:
    """Return what transformers chooses after the prompt and each begin of an answer, in one forward.

    An answer that is equal to it is what `generate` gives, by induction over its tokens.
    """
    logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def load_reference(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(embedded_model, serve):
    """Prompts, and the tokens of transformers and of `tandem serve` for them."""
    prompts = embedded_prompts(embedded_model)
    model = load_reference(embedded_model)
    served = asyncio.run(generate_all(serve, prompts, 16, sampled=False))
    greedy = [choices(model, *pair) for pair in zip(prompts, served, strict=True)]
    sampled = asyncio.run(generate_all(serve, prompts[::2], 16, sampled=True))
    return prompts, greedy, served, sampled


@pytest.mark.slow
def test_one_engine_alone_gives_the_tokens_of_transformers(oracle):
    prompts, greedy, served, _ = oracle
    assert len(prompts) == len(TEXTS) + len(LENGTHS) + len(NEAR_THE_LIMIT)
    assert served == greedy
    assert [len(tokens) for tokens in served] == [min(NUM_NEW, CONTEXT - len(p)) for p in prompts]


def assert_gives(url: str, oracle) -> None:
    prompts, greedy, _, sampled = oracle
    alone = asyncio.run(generate_all(url, prompts[::4], 1, sampled=False))
    assert alone == greedy[::4]
    assert asyncio.run(generate_all(url, prompts, 16, sampled=False)) == greedy
    assert asyncio.run(generate_all(url, prompts[::2], 16, sampled=True)) == sampled


@pytest.mark.slow
def test_a_cluster_through_shared_memory_gives_the_tokens_of_one_engine(oracle, cluster):
    assert_gives(cluster.url, oracle)


@pytest.mark.slow
def test_a_cluster_whose_layers_leave_over_tcp_during_the_forward_does_too(oracle, embedded_model):
    transport = ("--transfer-backend", "tcp", "--verify-kv", "always")
    flags = ("--model", str(embedded_model), *FLAGS, *transport, *LARGE_CHUNKS)
    with running_cluster(*flags) as own:
        assert_gives(own.url, oracle)


def sampling(prompts: list[list[int]], is_seeded: bool) -> list[SamplingParams]:
    """Return what `generate_all` asks of a tiny model, as an engine is told it."""
    lengths = [min(NUM_NEW, CONTEXT_LENGTH - len(prompt)) for prompt in prompts]
    if not is_seeded:
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        return [replace(greedy, max_new_tokens=length) for length in lengths]
    drawn = SamplingParams(**SAMPLED, ignore_eos=True)
    return [
        replace(drawn, max_new_tokens=n, seed=seed) for seed, n in enumerate(lengths, FIRST_SEED)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.smoke if k == "qwen2" else ()) for k in sorted(CONFIGS)],
)
def test_every_architecture_gives_the_tokens_of_transformers(tiny_model, kind):
    path, prompts = tiny_model(kind), tiny_prompts()
    model = load_reference(path)
    settings = {"page_size": PAGE, "chunked_prefill_size": CHUNK}
    sampled = tokens_of_one_engine(path, prompts, sampling(prompts, is_seeded=True), **settings)
    transport, granularity = LINKS[kind]
    link = ("--transfer-backend", transport, "--push-granularity", granularity)
    flags = ("--model", str(path), *FLAGS, "--context-length", str(CONTEXT_LENGTH), *link)
    with running_cluster(*flags) as own:
        alone = asyncio.run(generate_all(own.url, prompts[: len(LENGTHS)], 1, sampled=False))
        together = asyncio.run(generate_all(own.url, prompts, 16, sampled=False))
        assert asyncio.run(generate_all(own.url, prompts, 16, sampled=True)) == sampled
    assert alone == together[: len(LENGTHS)]
    assert together == [choices(model, *pair) for pair in zip(prompts, together, strict=True)]
    assert [len(t) for t in together] == [min(NUM_NEW, CONTEXT_LENGTH - len(p)) for p in prompts]
