"""Prefill and decode on a GPU, compared with the limits of its memory and its compute units.

    python -m benchmarks.gpu.roofline [--models llama-3-8b qwen2.5-7b]

Nothing is downloaded: the GPU generates seeded random bfloat16 weights in the shapes of Llama-3-8B and Qwen2.5-7B.
The run first measures the device (a copy, a matrix product), then Tandem's runners with every installed backend, with
and without CUDA graphs. The floor of a decode step is the time to read weights and KV once. The floor
of a prompt is the time of its matrix products. Cases that do not fit in memory are skipped. The last lines show the
result: geometric means over all cases of the runner that a node selects by default.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from benchmarks.gpu.floors import Device, Line, Work, mean_ratio, table
from benchmarks.rig import parse, parser_of, result
from tandem.engine.attention import paged as attention
from tandem.engine.attention.backends import choose_backend, fastest
from tandem.engine.attention.paged import PagedModel
from tandem.engine.config import AttentionName, EngineOptions
from tandem.engine.execution.cuda_graphs import make_runner
from tandem.engine.execution.runner import Runner
from tandem.engine.model.llama import speed_up
from tandem.engine.model.observation import observe
from tandem.engine.pages.pool import KVPool, make_pool
from tandem.engine.scheduling.forward import ForwardInputs
from tandem.engine.shape import ModelShape

PAGE_SIZE = 16
BATCHES, CONTEXTS = (1, 16, 64, 256), (1024, 8192)
PROMPTS = (1024, 4096, 16384)
# Memory reserved for activations, graphs and library workspaces, in addition to weights and pool.
SPARE_BYTES = 12 << 30
SEED = 0
DECODE_GOAL, PREFILL_GOAL = 0.8, 0.6

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-3-8b": lambda: LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
    "qwen2.5-7b": lambda: Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True)
class Rig:
    """A model on the device, with the pool that all runners share."""

    name: str
    model: PagedModel
    shape: ModelShape
    work: Work
    pool: KVPool

    @property
    def num_pages(self) -> int:
        """Number of pages for sequences; one more page is reserved for graphs."""
        return len(self.pool) - 1

    def fits(self, batch: int, tokens: int) -> bool:
        """Return whether the pool holds `batch` sequences of `tokens` tokens."""
        return batch * -(-tokens // PAGE_SIZE) <= self.num_pages


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = parser_of("gpu.roofline", "Compare prefill and decode with the limits of the GPU.")
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    args = parse(parser, {"models": ["llama-3-8b"]}, argv)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, but torch finds none.", file=sys.stderr)
        return 2
    device = measure_device()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"copy {device.bytes_per_s / 1e9:.0f} GB/s, bfloat16 {device.flops_per_s / 1e12:.0f} TFLOPS"
    )
    lines: list[Line] = []
    for name in args.models:
        # One model at a time: free its memory before the next.
        lines += our_lines(make_rig(name, CONFIGS[name](), "cuda", None), device)
        gc.collect()
        torch.cuda.empty_cache()
    print("\n" + table(lines) + "\n")
    print(result("decode_roofline", mean_ratio("decode", lines), DECODE_GOAL))
    print(result("prefill_roofline", mean_ratio("prefill", lines), PREFILL_GOAL))
    return 0


def measure_device() -> Device:
    """Measure a copy of 2 GiB and a product of 8192 cubed, both larger than every cache."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = seconds(partial(target.copy_, source), "cuda")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product_s = seconds(partial(torch.mm, left, right), "cuda")
    return Device(2 * source.numel() / copy_s, 2 * 8192**3 / product_s)


def seconds(call: Callable[[], object], device: str, num_calls: int = 10, rounds: int = 5) -> float:
    """Return the median time per call. Each round makes several calls without a wait in between."""
    times = []
    for _ in range(rounds + 1):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        _wait(device)
        times.append((time.perf_counter() - begin) / num_calls)
    return statistics.median(times[1:])  # the first round warms up


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def make_rig(name: str, config: Any, device: str, num_pages: int | None) -> Rig:
    """Create a model with random weights, and its pool.

    Args:
        num_pages: Pages in the pool. None: as many as fit on the GPU, up to what the largest case needs.
    """
    torch.manual_seed(SEED)
    implementation = attention.register()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation
        )
    model = model.eval().requires_grad_(requires_grad=False)
    head_dim = config.hidden_size // config.num_attention_heads
    shape = ModelShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        eos_token_ids=frozenset(),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        fingerprint=name,
    )
    head_params = model.get_output_embeddings().weight.numel()
    total = sum(weight.numel() for weight in model.parameters())
    work = Work(
        layer_params=total - head_params - model.get_input_embeddings().weight.numel(),
        head_params=head_params,
        bytes_per_param=2,
        attention_width=config.num_attention_heads * head_dim * config.num_hidden_layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
    )
    # Fuse layers as a node does when it loads a model.
    observed = observe(model, config)
    speed_up(observed)
    gc.collect()
    if num_pages is None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        needed = max(BATCHES) * max(CONTEXTS) // PAGE_SIZE
        page_bytes = shape.kv_bytes_per_token * PAGE_SIZE
        num_pages = min(needed, max(0, free - SPARE_BYTES) // page_bytes)
    pool = make_pool(shape, num_pages, PAGE_SIZE, device, has_scratch_page=True)
    # Random values, because compute units draw less power on zeros and then run faster.
    pool.pages.normal_()
    return Rig(name, observed.model, shape, work, pool)


def our_lines(rig: Rig, device: Device) -> Iterator[Line]:
    """Measure our kernels, with and without graphs."""
    auto = fastest(_config("auto"), rig.shape)
    for is_eager in (True, False):
        config = _config("triton", is_eager=is_eager)
        backend = choose_backend(config, rig.shape)
        runner = make_runner(
            rig.model, rig.pool, backend, config, rig.shape, num_pages=rig.num_pages
        )
        label = f"triton, {'eager' if is_eager else 'graphs'}"
        is_ours = auto == "triton" and not is_eager
        yield from runner_lines(rig, device, runner, label, is_ours=is_ours)
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def _config(name: AttentionName, *, is_eager: bool = False) -> EngineOptions:
    return EngineOptions(
        device="cuda",
        dtype="bfloat16",
        attention_backend=name,
        is_eager=is_eager,
        page_size=PAGE_SIZE,
        max_running_requests=max(BATCHES),
    )


def runner_lines(
    rig: Rig, device: Device, runner: Runner, label: str, *, is_ours: bool
) -> Iterator[Line]:
    """Measure the decode steps and the prompts of one runner."""
    place = "cpu" if runner.device.type == "cpu" else "cuda"
    for context in CONTEXTS:
        for batch in (batch for batch in BATCHES if rig.fits(batch, context)):
            inputs = decode_inputs(batch, context, rig.num_pages)
            took = seconds(partial(runner.forward, inputs), place)
            floor = rig.work.decode_floor_s(device, batch, context)
            yield Line(rig.name, "decode", label, batch, context, floor, took, is_ours)
    for tokens in (tokens for tokens in PROMPTS if rig.fits(1, tokens)):
        inputs = prompt_inputs(tokens, rig.num_pages)
        took = seconds(partial(runner.forward, inputs), place, num_calls=2)
        floor = rig.work.prefill_floor_s(device, tokens)
        yield Line(rig.name, "prefill", label, 1, tokens, floor, took, is_ours)


def decode_inputs(batch: int, context: int, num_pages: int) -> ForwardInputs:
    """Return one step of `batch` sequences of `context` keys, with randomly placed pages."""
    width = -(-context // PAGE_SIZE)
    pages = np.random.default_rng(SEED).permutation(num_pages)[: batch * width]
    return ForwardInputs(
        token_ids=np.arange(batch, dtype=np.int64) + 5,
        sources=np.full(batch, -1, np.int64),
        positions=np.full(batch, context - 1, np.int64),
        query_starts=np.arange(batch + 1, dtype=np.int32),
        kv_lens=np.full(batch, context, np.int32),
        page_table=pages.reshape(batch, width).astype(np.int32),
        num_decodes=batch,
        logit_rows=np.arange(batch, dtype=np.int64),
    )


def prompt_inputs(tokens: int, num_pages: int) -> ForwardInputs:
    """Return a complete prompt as one forward."""
    width = -(-tokens // PAGE_SIZE)
    pages = np.random.default_rng(SEED).permutation(num_pages)[:width]
    return ForwardInputs(
        token_ids=np.arange(tokens, dtype=np.int64) % 1000 + 5,
        sources=np.full(tokens, -1, np.int64),
        positions=np.arange(tokens, dtype=np.int64),
        query_starts=np.array([0, tokens], np.int32),
        kv_lens=np.array([tokens], np.int32),
        page_table=pages.reshape(1, width).astype(np.int32),
        num_decodes=0,
        logit_rows=np.array([tokens - 1], np.int64),
    )


if __name__ == "__main__":
    sys.exit(main())
