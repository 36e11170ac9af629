"""Whole engines on a GPU: the CPU's tokens in float32, and graphs that change none."""

import pytest
import torch

from tandem.engine.attention.backends import choose_backend
from tandem.engine.config import EngineConfig
from tandem.engine.execution.cuda_graphs import GraphRunner, is_recording, make_runner
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool
from tandem.engine.scheduling.core import Engine
from tests.engine.test_core import PAGE, make_engine, prompts
from tests.one_engine import ask, run
from tests.tiny_models import CONFIGS

pytestmark = pytest.mark.gpu

NUM_PAGES = 200


def gpu_engine(path, **settings) -> Engine:
    config = EngineConfig(
        model_dir=str(path),
        device="cuda",
        page_size=PAGE,
        **{"dtype": "float32", "chunked_prefill_size": 32, "max_running_requests": 12, **settings},
    )
    model, shape = load_model(config)
    backend = choose_backend(config, shape)
    has_scratch_page = is_recording(config, backend)
    pool = make_pool(shape, NUM_PAGES, PAGE, "cuda", has_scratch_page=has_scratch_page)
    runner = make_runner(model, pool, backend, config, shape, num_pages=NUM_PAGES)
    launcher = ModelLauncher(runner, shape, config.page_size)
    return Engine(launcher, shape, config, NUM_PAGES)


def generate(engine: Engine, **sampling) -> dict[str, list[int]]:
    for i, prompt in enumerate(prompts(9)):
        engine.submit(ask(prompt, str(i), max_new_tokens=12, **sampling))
    return run(engine)


@pytest.fixture(autouse=True)
def _exact_products():
    """TF32 would round float32 to 10 bits."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_greedy_tokens_are_the_cpus(tiny_model, kind, backend):
    on_gpu = gpu_engine(tiny_model(kind), attention_backend=backend)
    assert generate(on_gpu) == generate(make_engine(tiny_model(kind)))


@pytest.mark.parametrize(
    "cut", [{}, {"top_p": 0.9}, {"top_k": 7}, {"top_k": 30, "top_p": 0.8}], ids=str
)
def test_seeded_tokens_are_the_cpus(tiny_model, cut):
    sampling = {"temperature": 0.8, "seed": 2**63 - 5, **cut}
    on_cpu = generate(make_engine(tiny_model("llama")), **sampling)
    assert generate(gpu_engine(tiny_model("llama")), **sampling) == on_cpu


def test_penalized_tokens_are_the_cpus(tiny_model):
    sampling = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.2,
        "logit_bias": {5: 1.0, 9: -2.0},
        "min_new_tokens": 4,
        "stop_token_ids": [7, 11],
    }
    on_cpu = generate(make_engine(tiny_model("llama")), **sampling)
    assert generate(gpu_engine(tiny_model("llama")), **sampling) == on_cpu


def test_no_step_waits_for_the_device_until_it_is_read(tiny_model):
    engine = gpu_engine(tiny_model("llama"), attention_backend="triton")
    generate(engine)  # compiles the kernels
    asked = [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.2},
        {"temperature": 0, "min_new_tokens": 3, "logit_bias": {5: 1.0}},
    ]
    replayed = {"num_prior": 2, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, sampling in enumerate(asked * 2):
            engine.submit(ask(prompts(9)[number], f"w{number}", max_new_tokens=12, **sampling))
        engine.submit(ask(prompts(9)[7], "replayed", max_new_tokens=14, **replayed))
        assert all(len(tokens) == 12 for tokens in run(engine).values())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_graphs_change_no_token(tiny_model, kv_cache_dtype):
    path = tiny_model("llama")
    settings = {"attention_backend": "triton", "kv_cache_dtype": kv_cache_dtype}
    with_graphs = gpu_engine(path, **settings)
    assert isinstance(with_graphs._launcher._runner, GraphRunner)
    assert generate(with_graphs) == generate(gpu_engine(path, is_eager=True, **settings))


def test_eight_bit_pools_give_the_tokens_of_the_reference(tiny_model):
    path = tiny_model("qwen3")
    on_gpu = gpu_engine(path, attention_backend="triton", kv_cache_dtype="fp8_e4m3")
    assert generate(on_gpu) == generate(make_engine(path, kv_cache_dtype="fp8_e4m3"))


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler, about itself
def test_a_compiled_model_runs_inside_graphs(tiny_model):
    path = tiny_model("llama")
    engine = gpu_engine(path, attention_backend="triton", is_compiled=True)
    assert isinstance(engine._launcher._runner, GraphRunner)
    assert generate(engine) == generate(make_engine(path))
