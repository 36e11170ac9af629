"""Prefill in one process: the engine compared with a plain forward of transformers.

Both compute the same prompt and the logits of its last token. Rounds alternate, and medians are
compared. Run from the repository's root: `python -m benchmarks.prefill`.
"""

import argparse
import random
import time
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.decode import medians
from benchmarks.engines import greedy_request, make_engine, model_dir
from benchmarks.rig import parse, parser_of, result
from tandem.engine.scheduling.core import Engine
from tandem.node.machine import cpu_flags, dtype_from_flags

GOAL_RATIO = 1.0


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("prefill", "Compare prefill with a plain forward of transformers.")
    add = parser.add_argument
    add("--model", default=None, help="model directory; if not set, the embedded model")
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        default=dtype_from_flags(cpu_flags()).dtype,
        help="type of weights and KV (default: what a node chooses on this CPU)",
    )
    add("--tokens", type=int, nargs="+", default=[256, 1024], help="prompt lengths to measure")
    add("--chunk", type=int, default=512, help="tokens per forward of the engine")
    add("--threads", type=int, default=1, help="CPU threads of torch")
    add("--rounds", type=int, default=5, help="number of rounds; the median is reported")
    return parser


def engine_round(engine: Engine, prompt: list[int]) -> float:
    """Return the engine's seconds per prompt token."""
    engine.submit(greedy_request(prompt, 1))
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - begin) / len(prompt)


@torch.inference_mode()
def plain_round(model: Any, prompt: list[int]) -> float:
    """Return the plain forward's seconds per prompt token."""
    ids = torch.tensor([prompt])
    begin = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return (time.perf_counter() - begin) / len(prompt)


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"tokens": [64], "rounds": 1})
    torch.set_num_threads(args.threads)
    path = model_dir(args.model)
    engine = make_engine(path, args.dtype, 2 * max(args.tokens) + 64, args.chunk)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    rng = random.Random(0)
    ratios = []
    print(f"{args.dtype}, {args.threads} threads, chunks of {args.chunk}; prompt tokens/s, medians")
    for num_tokens in args.tokens:
        prompt = [rng.randrange(9, 40_000) for _ in range(num_tokens)]
        runs = {
            "engine": partial(engine_round, engine, prompt),
            "plain": partial(plain_round, plain, prompt),
        }
        speeds = medians(args.rounds, runs)
        ratios.append(speeds["engine"] / speeds["plain"])
        print(
            f"{num_tokens:>6} tokens  engine {speeds['engine']:>8.0f}  "
            f"plain {speeds['plain']:>8.0f}  ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(result("prefill_vs_plain_forward", min(ratios), GOAL_RATIO))


if __name__ == "__main__":
    main()
