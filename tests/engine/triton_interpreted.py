"""Runs the Triton kernels on CPU tensors; writes a JSON object of errors and of generated tokens.

A process of its own: triton decides at import whether it interprets.

    TRITON_INTERPRET=1 python -m tests.engine.triton_interpreted MODEL_DIR
"""

import json
import sys

import numpy as np
import torch

from tandem.engine.attention import AttentionBackend
from tandem.engine.attention_triton import TritonAttention
from tandem.engine.config import EngineConfig
from tandem.engine.core import Engine
from tandem.engine.kv_pool import make_pool
from tandem.engine.launcher import ModelLauncher
from tandem.engine.model import load_model
from tandem.engine.runner import ModelRunner
from tandem.engine.sampler import gumbels, with_noise
from tandem.telemetry import log as logs
from tests.attention_cases import CASES, PROMPTS, Case, error
from tests.engine.test_core import PAGE, prompts
from tests.one_engine import ask, run

# So few that short contexts are split too.
NUM_PROCESSORS = 8
KV_DTYPES = ("auto", "fp8_e4m3")
NUM_PAGES = 40


def generate(path: str, kv_cache_dtype: str, backend: AttentionBackend) -> dict[str, list[int]]:
    """Return what a small engine answers to a few prompts."""
    config = EngineConfig(
        model_dir=path, dtype="float32", page_size=PAGE, kv_cache_dtype=kv_cache_dtype
    )
    model, shape = load_model(config)
    pool = make_pool(shape, NUM_PAGES, PAGE, "cpu")
    launcher = ModelLauncher(ModelRunner(model, pool, backend), shape, config.page_size)
    engine = Engine(launcher, shape, config, NUM_PAGES)
    for i, prompt in enumerate(prompts(5)):
        engine.submit(ask(prompt, str(i), max_new_tokens=2))
    return run(engine)


def noise_error() -> float:
    """Return how far the kernel's noise is from numpy's, over more tokens than one program makes."""
    seeds = np.array([3, 2**64 - 1], np.uint64)
    indexes, temperatures = np.array([0, 2**40]), np.array([1.0, 0.5], np.float32)
    logits = torch.randn(2, 1500, generator=torch.Generator().manual_seed(0))
    expected = np.stack(
        [gumbels(int(s), int(i), 1500) for s, i in zip(seeds, indexes, strict=True)]
    )
    made = (with_noise(logits, temperatures, seeds, indexes) - logits).numpy()
    return float(np.abs(made / temperatures[:, None] - expected).max())


def main() -> None:
    """Run all cases and generations."""
    logs.configure("error")  # what is printed is the result
    backend = TritonAttention(NUM_PROCESSORS)
    found = {
        "errors": {name: error(case, backend) for name, case in CASES.items()},
        "behind": error(
            Case(PROMPTS, num_heads=8, num_kv_heads=1, head_dim=64),
            backend,
            behind=Case(PROMPTS, num_heads=8, num_kv_heads=4),
        ),
        "noise_error": noise_error(),
        "tokens": {name: generate(sys.argv[1], name, backend) for name in KV_DTYPES},
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
