"""Runs the Triton kernels on CPU tensors and writes a JSON object of errors and generated tokens.

This is a separate process, because triton decides at import whether it interprets.

    TRITON_INTERPRET=1 python -m tests.engine.triton_interpreted MODEL_DIR
"""

import json
import sys
from itertools import product

import numpy as np
import torch

from tandem.engine.attention.paged import AttentionBackend
from tandem.engine.attention.triton import TritonAttention
from tandem.engine.config import EngineConfig
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.loading import load_model
from tandem.engine.pages.pool import make_pool
from tandem.engine.sampling.sampler import find_cutoffs, gumbels, with_noise
from tandem.engine.scheduling.core import Engine
from tandem.telemetry import log as logs
from tests.attention_cases import CASES, PROMPTS, Case, error
from tests.engine.cut_off import kept_by_definition
from tests.engine.test_core import PAGE, prompts
from tests.one_engine import ask, run

# Few programs, but more splits of the longest row than one merge pass takes.
NUM_PROCESSORS = 10
KV_DTYPES = ("auto", "fp8_e4m3")
NUM_PAGES = 40


def generate(path: str, kv_cache_dtype: str, backend: AttentionBackend) -> dict[str, list[int]]:
    """Return the answers of a small engine to a few prompts."""
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
    """Return the error of the kernel's noise, over more tokens than one program computes."""
    seeds = np.array([3, 2**64 - 1], np.uint64)
    indexes, temperatures = np.array([0, 2**40]), np.array([1.0, 0.5], np.float32)
    logits = torch.randn(2, 1500, generator=torch.Generator().manual_seed(0))
    expected = np.stack(
        [gumbels(int(s), int(i), 1500) for s, i in zip(seeds, indexes, strict=True)]
    )
    made = (with_noise(logits, temperatures, seeds, indexes) - logits).numpy()
    return float(np.abs(made / temperatures[:, None] - expected).max())


def wrongly_cut() -> list[str]:
    """Return the cases in which the kernel keeps different logits than the definition."""
    logits = torch.randn(3, 2100, generator=torch.Generator().manual_seed(2)) * 3
    logits[:2] = logits[:2].round()  # with ties
    logits[0, 30:] = float("-inf")
    logits -= logits.amax(dim=-1, keepdim=True)
    wrong = []
    for top_k, top_p in product((1, 40, 2100), (0.0, 0.5, 0.93, 1.0)):
        k, p = torch.full((3, 1), top_k), torch.full((3, 1), top_p, dtype=torch.float64)
        cutoffs = find_cutoffs(logits, k, p)
        for row, (own, cut) in enumerate(zip(logits.numpy(), cutoffs.numpy(), strict=True)):
            # Tokens that cannot be drawn may be kept or not.
            kept = set(np.flatnonzero((own >= cut) & np.isfinite(own)))
            if kept != kept_by_definition(own, top_k, top_p):
                wrong.append(f"row {row}, k {top_k}, p {top_p}")
    return wrong


def main() -> None:
    """Run all cases and generations."""
    logs.configure("error")  # standard output is the result
    backend = TritonAttention(NUM_PROCESSORS)
    found = {
        "errors": {name: error(case, backend) for name, case in CASES.items()},
        "behind": error(
            Case(PROMPTS, num_heads=8, num_kv_heads=1, head_dim=64),
            backend,
            behind=Case(PROMPTS, num_heads=8, num_kv_heads=4),
        ),
        "replayed": error(
            Case(((7, 1), (1200, 1)), page_size=16, window=900),
            backend,
            recorded=Case(((1200, 1), (7, 1)), page_size=16, window=900),
        ),
        "noise_error": noise_error(),
        "wrongly_cut": wrongly_cut(),
        "tokens": {name: generate(sys.argv[1], name, backend) for name in KV_DTYPES},
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
