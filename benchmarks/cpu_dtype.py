"""Speed of the type that `--dtype auto` selects on a CPU, compared with the faster of bfloat16 and float32.

The benchmark measures this CPU with all its instructions, then limited to AVX2. Each of the two runs in a separate process,
because torch and oneDNN read their limits at the start. Rounds of the two types alternate, and medians are compared. Run
from the repository's root: `python -m benchmarks.cpu_dtype`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.decode import medians
from benchmarks.engines import greedy_request, make_engine, model_dir
from benchmarks.rig import AVX2_ALONE, parse, parser_of, result
from tandem.engine.scheduling.core import Engine
from tandem.node.machine import FAST_BFLOAT16, CpuDtype, cpu_flags, dtype_from_flags

GOAL_RATIO = 1.1
DTYPES: tuple[CpuDtype, ...] = ("bfloat16", "float32")
# Width of a layer of a 1B model.
LAYER_SIZE = 2048
NUM_ANSWER = 16


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("cpu_dtype", "Measure bfloat16 and float32 on this CPU.")
    add = parser.add_argument
    add("--tokens", type=int, default=256, help="tokens in the prompt")
    add("--threads", type=int, default=2, help="CPU threads of torch")
    add("--rounds", type=int, default=5, help="number of rounds; the median is reported")
    add("--child", action="store_true", help="measure in this process and print JSON (internal)")
    return parser


def product_round(dtype: CpuDtype, rows: int) -> float:
    """Return the seconds of one product of `rows` rows with a layer's weights."""
    kind = getattr(torch, dtype)
    left, right = (
        torch.ones(rows, LAYER_SIZE, dtype=kind),
        torch.ones(LAYER_SIZE, LAYER_SIZE, dtype=kind),
    )
    begin = time.perf_counter()
    left @ right.T
    return time.perf_counter() - begin


def engine_round(engine: Engine, num_tokens: int, num_answer: int) -> float:
    """Return the seconds that a prompt and its answer take."""
    rng = random.Random(time.perf_counter_ns())  # a prompt that is not cached
    engine.submit(greedy_request([rng.randrange(9, 40_000) for _ in range(num_tokens)], num_answer))
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin


def measured(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each workload, by type."""
    torch.set_num_threads(args.threads)
    path = model_dir(None)
    engines = {dtype: make_engine(path, dtype, 8192, 512) for dtype in DTYPES}
    workloads: dict[str, Callable[[CpuDtype], float]] = {
        f"product of {args.tokens} rows": lambda dtype: product_round(dtype, args.tokens),
        "product of 1 row": lambda dtype: product_round(dtype, 1),
        f"prompt of {args.tokens} tokens": lambda dtype: engine_round(
            engines[dtype], args.tokens, 1
        ),
        f"answer of {NUM_ANSWER} tokens": lambda dtype: engine_round(engines[dtype], 8, NUM_ANSWER),
    }
    return {
        name: {
            dtype: 1000 / per_s
            for dtype, per_s in medians(args.rounds, {d: partial(work, d) for d in DTYPES}).items()
        }
        for name, work in workloads.items()
    }


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"tokens": 32, "rounds": 1}, child_options=("child",))
    if args.child:
        print(json.dumps(measured(args)))
        return
    flags, worst = cpu_flags(), 0.0
    machines: dict[str, tuple[dict[str, str], frozenset[str]]] = {"this CPU": ({}, flags)}
    if not flags.isdisjoint(FAST_BFLOAT16) and "avx2" in flags:
        machines["limited to AVX2"] = (AVX2_ALONE, flags - FAST_BFLOAT16.keys())
    for machine, (limits, has) in machines.items():
        command = [
            sys.executable,
            "-m",
            "benchmarks.cpu_dtype",
            "--child",
            f"--tokens={args.tokens}",
        ]
        command += [f"--threads={args.threads}", f"--rounds={args.rounds}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | limits)
        times, choice = json.loads(done.stdout.splitlines()[-1]), dtype_from_flags(has)
        print(f"{machine}: auto is {choice.dtype}, because {choice.reason}")
        for work, ms in times.items():
            ratio = ms[choice.dtype] / min(ms.values())
            worst = max(worst, ratio) if work.startswith("prompt") else worst
            shown = "  ".join(f"{dtype} {ms[dtype]:>8.2f} ms" for dtype in DTYPES)
            print(f"  {work:<24} {shown}  auto / faster {ratio:.2f}", flush=True)
    print(result("cpu_dtype_vs_faster", worst, GOAL_RATIO, is_lower_better=True))


if __name__ == "__main__":
    main()
