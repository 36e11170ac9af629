"""Decoding in one process: the engine compared with a bare torch loop, `generate`, and the time to read the weights.

Each stream has a prompt of 128 tokens and generates 32. The comparison with the bare loop times decoding only. The
comparison with `generate` times prompt and decoding, because `generate` cannot be split. The time to read all weights once
per token is the lower bound for a single stream. Rounds alternate, and medians are compared. Run from the repository's
root: `python -m benchmarks.decode`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.bare_loop import BareLoop
from benchmarks.engines import greedy_request, make_engine, model_dir
from benchmarks.rig import parse, parser_of, result
from tandem.engine.scheduling.core import Engine
from tandem.node.machine import cpu_flags, dtype_from_flags

GOAL_TO_BARE, GOAL_TO_GENERATE, GOAL_TO_READING = 1.0, 1.4, 1.5


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of(
        "decode", "Measure decoding against a bare loop in plain torch, in one process."
    )
    add = parser.add_argument
    add("--model", default=None, help="directory of a Llama model; if not set, the embedded model")
    add(
        "--dtype",
        choices=["bfloat16", "float32"],
        default=dtype_from_flags(cpu_flags()).dtype,
        help="type of weights and KV (default: what a node chooses on this CPU)",
    )
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="numbers of streams to measure")
    add("--threads", type=int, default=1, help="CPU threads of torch")
    add("--prompt", type=int, default=128, help="tokens per prompt")
    add("--new", type=int, default=32, help="tokens to decode per stream")
    add("--rounds", type=int, default=3, help="number of rounds; the median is reported")
    return parser


def engine_round(engine: Engine, prompts: list[list[int]], num_new: int) -> float:
    """Return the seconds per decoded token. All prompts are computed before the clock starts."""
    for prompt in prompts:
        engine.submit(greedy_request(prompt, num_new))
    while engine.num_waiting or engine.num_prompts:
        engine.step()
    begin, num_tokens = time.perf_counter(), 0
    while engine.has_work:
        num_tokens += len(engine.step().tokens)
    return (time.perf_counter() - begin) / num_tokens


def whole_round(engine: Engine, prompts: list[list[int]], num_new: int) -> float:
    """Return the seconds per generated token, including the prompts' time."""
    begin = time.perf_counter()
    for prompt in prompts:
        engine.submit(greedy_request(prompt, num_new))
    while engine.has_work:
        engine.step()
    return (time.perf_counter() - begin) / (len(prompts) * num_new)


def bare_round(loop: BareLoop, num_streams: int, num_prompt: int, num_new: int) -> float:
    """Return the seconds per token. The cache holds zeros, which take the same time."""
    tokens = torch.arange(num_streams)
    begin = time.perf_counter()
    for position in range(num_prompt, num_prompt + num_new):
        tokens = loop.step(tokens, position)
    return (time.perf_counter() - begin) / (num_streams * num_new)


def generate_round(model: Any, prompts: list[list[int]], num_new: int) -> float:
    """Return the seconds per token of transformers' `generate`, including the prompt's time."""
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
    )
    return (time.perf_counter() - begin) / (len(prompts) * num_new)


def weights_of(model: Any) -> list[torch.Tensor]:
    """Return the weights that each decoded token reads: all except an embedding that is not tied to the output layer."""
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    weights = {each.data_ptr(): each for each in model.parameters()}
    if embedding.data_ptr() != head.data_ptr():
        del weights[embedding.data_ptr()]
    return [each.detach().view(torch.int64) for each in weights.values()]


def reading_round(weights: list[torch.Tensor]) -> float:
    """Return the seconds to read all weights once."""
    begin = time.perf_counter()
    for each in weights:
        each.sum()
    return time.perf_counter() - begin


def medians(rounds: int, runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Run all in turn, after one warm-up round; return the median tokens/s of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds = run()
            if number:
                times[name].append(seconds)
    return {name: 1 / statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"streams": [1], "prompt": 16, "new": 8, "rounds": 1})
    torch.set_num_threads(args.threads)
    path: Path = model_dir(args.model)
    most = max(args.streams)
    engine = make_engine(path, args.dtype, most * (args.prompt + args.new + 32), chunk=512)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    rng = random.Random(0)
    to_bare, to_generate, to_reading = list[float](), list[float](), list[float]()
    weights = weights_of(plain)
    print(
        f"{args.dtype}, {args.threads} threads, prompts of {args.prompt}; tokens/s, medians",
        flush=True,
    )
    names = ("streams", "decoding", "bare loop", "ratio", "whole run", "generate", "ratio")
    print("".join(f"{name:>11}" for name in names))
    for streams in args.streams:
        prompts = [[rng.randrange(9, 40000) for _ in range(args.prompt)] for _ in range(streams)]
        loop = BareLoop(plain, streams, args.prompt + args.new)
        speeds = medians(
            args.rounds,
            {
                "whole": partial(whole_round, engine, prompts, args.new),
                "engine": partial(engine_round, engine, prompts, args.new),
                "bare": partial(bare_round, loop, streams, args.prompt, args.new),
                "generate": partial(generate_round, plain, prompts, args.new),
                "reading": partial(reading_round, weights),
            },
        )
        to_bare.append(speeds["engine"] / speeds["bare"])
        to_generate.append(speeds["whole"] / speeds["generate"])
        if streams == 1:
            to_reading.append(speeds["reading"] / speeds["engine"])
        print(
            f"{streams:>11}{speeds['engine']:>11.1f}{speeds['bare']:>11.1f}{to_bare[-1]:>11.2f}"
            f"{speeds['whole']:>11.1f}{speeds['generate']:>11.1f}{to_generate[-1]:>11.2f}",
            flush=True,
        )
    if to_reading:
        print(result("decode_vs_reading", to_reading[0], GOAL_TO_READING, is_lower_better=True))
    print(result("engine_vs_generate", min(to_generate), GOAL_TO_GENERATE))
    print(result("decode_vs_bare_loop", min(to_bare), GOAL_TO_BARE))


if __name__ == "__main__":
    main()
