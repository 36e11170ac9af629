"""Whether `tandem bench` says what `sglang.bench_serving` says of the same server under the same load.

Both drive one server, turn about, in a closed loop of random ids over the native API (over OpenAI's SGLang's
client sends text, which is more tokens than the ids it was made of); ratios are of the medians over
the rounds. What differs is what the clients take themselves, so the server should have a core they have not. SGLang's
client needs an environment of its own, without its server's packages:

    python3 -m venv DIR && DIR/bin/pip install --no-deps sglang==0.4.10.post2
    DIR/bin/pip install aiohttp numpy requests tqdm transformers ipython pydantic orjson pybase64
    python -m benchmarks.bench_agreement --sglang-python DIR/bin/python

Run from the root.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.engines import model_dir
from benchmarks.processes import Target, tandem

LOW, HIGH = 0.9, 1.1

# Its --tokenize-prompt makes ids that json does not know (numpy's).
SGLANG = (
    "import json, runpy; json.JSONEncoder.default = lambda _, number: number.item(); "
    "runpy.run_module('sglang.bench_serving', run_name='__main__')"
)

Numbers = dict[str, float]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_agreement",
        description="Compare what `tandem bench` and `sglang.bench_serving` say of one server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sglang-python", type=Path, required=True, help="of an environment that has sglang")
    add("--url", default="", help="of a running server, instead of starting `tandem serve`")
    add("--tokenizer", type=Path, help="SGLang's client needs one (the embedded model's)")
    add("--concurrency", type=int, default=4, help="requests open at once")
    add("--num-prompts", type=int, default=24, help="requests of a round")
    add("--input-len", type=int, default=128, help="random ids in each prompt")
    add("--output-len", type=int, default=64, help="generated for each prompt")
    add("--rounds", type=int, default=3, help="how often both are run, turn about")
    return parser


def ours(args: argparse.Namespace, target: Target, seed: int, directory: Path) -> Numbers:
    """Run `tandem bench`."""
    out = directory / f"ours-{seed}.json"
    run(
        *(sys.executable, "-P", "-m", "tandem", "bench", "--url", target.url),
        *("--concurrency", str(args.concurrency), "--num-prompts", str(args.num_prompts)),
        *("--input-len", str(args.input_len), "--output-len", str(args.output_len)),
        *("--seed", str(1000 + seed), "--output-file", str(out)),
    )
    (one,) = json.loads(out.read_bytes())["loads"]
    return {
        "ttft": one["ttft_ms"]["p50"],
        "itl": one["itl_ms"]["p50"],
        "throughput": one["output_tokens_per_s"],
        "done": one["num_done"],
    }


def theirs(args: argparse.Namespace, target: Target, seed: int, directory: Path) -> Numbers:
    """Run `sglang.bench_serving`."""
    out, tokenizer = directory / f"theirs-{seed}.json", str(args.tokenizer or model_dir(None))
    run(
        *(str(args.sglang_python), "-c", SGLANG, "--base-url", target.url),
        *("--backend", "sglang", "--tokenize-prompt", "--tokenizer", tokenizer),
        *("--dataset-name", "random-ids", "--random-range-ratio", "1", "--seed", str(seed)),
        *("--max-concurrency", str(args.concurrency), "--num-prompts", str(args.num_prompts)),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--output-file", str(out), "--disable-tqdm"),
    )
    one = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    return {
        "ttft": one["median_ttft_ms"],
        "itl": one["median_itl_ms"],
        "throughput": one["output_throughput"],
        "done": one["completed"],
    }


def run(*command: str) -> None:
    """Run a client; end the program with what it said when it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measure(args: argparse.Namespace, target: Target, directory: Path) -> dict[str, list[Numbers]]:
    """Run both, in an order that turns with each round."""
    clients: dict[str, Callable[..., Numbers]] = {"ours": ours, "theirs": theirs}
    found: dict[str, list[Numbers]] = {name: [] for name in clients}
    for round_ in range(args.rounds + 1):
        for name in sorted(clients, reverse=round_ % 2 == 1):
            one = clients[name](args, target, round_, directory)
            if round_:  # the first warms up
                found[name].append(one)
            print(
                f"{name:<7} TTFT {one['ttft']:>7.1f} ms  ITL {one['itl']:>6.2f} ms  "
                f"{one['throughput']:>8.1f} tokens/s  {one['done']} done",
                flush=True,
            )
    return found


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = (
            Target("server", args.url)
            if args.url
            else stack.enter_context(tandem("serve", ["serve", "--num-threads", "1"]))
        )
        found = measure(args, target, directory)
    for name in ("ttft", "itl", "throughput"):
        own, other = (statistics.median(one[name] for one in rounds) for rounds in found.values())
        verdict = "reached" if LOW <= own / other <= HIGH else "short"
        goal = f"goal within {LOW}..{HIGH}"
        print(f"result: bench_agreement_{name} {own / other:.3f} ratio ({goal}) {verdict}")


if __name__ == "__main__":
    main()
