"""Runs every test and benchmark that needs a GPU, in at most 25 minutes.

    python -m benchmarks.gpu.all --out DIR [--only NAME ...]

Correctness comes first, then speed. Each part has a time limit and writes its output to DIR/NAME.log while it runs.
DIR/summary.txt lists every finished part. An interrupted run continues with the first part that is not listed there.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig import parse, parser_of

PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
SERVED = (
    "--baseline-threads",
    "1",
    "--concurrency",
    "1",
    "32",
    "--",
    "--device",
    "cuda:0",
    "--max-total-tokens",
    "65536",
)
SECONDS_TO_STOP = 10.0


@dataclass(frozen=True)
class Part:
    """A command to run.

    Attributes:
        limit_s: Time limit in seconds, after which the command is terminated.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


PARTS = (
    Part(
        "attention",
        (*PYTEST, "tests/gpu/test_attention_on_gpu.py", "tests/gpu/test_operators_on_gpu.py"),
        120,
    ),
    Part("engine", (*PYTEST, "tests/gpu/test_engine_on_gpu.py"), 150),
    Part(
        "transfers",
        (*PYTEST, "tests/gpu/test_cuda_ipc.py", "tests/gpu/test_tier_pages_on_gpu.py"),
        60,
    ),
    Part("cluster", (*PYTEST, "tests/gpu/test_cluster_on_gpu.py"), 150),
    Part("roofline-8b", (PYTHON, "-m", "benchmarks.gpu.roofline", "--models", "llama-3-8b"), 240),
    Part("sampling", (PYTHON, "-m", "benchmarks.gpu.sampling"), 60),
    Part("cuda-ipc", (PYTHON, "-m", "benchmarks.gpu.cuda_ipc"), 90),
    Part("roofline-7b", (PYTHON, "-m", "benchmarks.gpu.roofline", "--models", "qwen2.5-7b"), 240),
    Part("serve", (PYTHON, "-m", "benchmarks.serve", *SERVED), 240),
)


def run(part: Part, log: Path) -> str:
    """Run a part; return its line of the summary."""
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = f"exit {process.wait(part.limit_s)}"
        except subprocess.TimeoutExpired:
            status = f"timed out after {part.limit_s:g} s"
        finally:
            stop(process)
    return f"{part.name}: {status}, {time.monotonic() - began_s:.0f} s"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a command and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
            return


def results_of(log: Path) -> list[str]:
    """Return the lines of a log to show in the summary: results, test counts and failures."""
    lines = log.read_text(errors="replace").splitlines()
    beginnings = ("result: ", "FAILED", "ERROR")
    return [line for line in lines if line.startswith(beginnings) or " passed" in line]


def run_all(parts: Sequence[Part], out: Path) -> int:
    """Run the parts that the summary does not list yet; return how many of these failed."""
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.txt"
    ended = summary.read_text() if summary.exists() else ""
    num_failed = 0
    for part in parts:
        if f"\n{part.name}: " in f"\n{ended}":
            print(f"{part.name}: skipped, already in the summary", flush=True)
            continue
        print(f"{part.name}: {' '.join(part.command[1:])}", flush=True)
        log = out / f"{part.name}.log"
        line = run(part, log)
        num_failed += ": exit 0," not in line
        text = "\n".join([line, *(f"  {each}" for each in results_of(log))])
        print(text, flush=True)
        with summary.open("a") as listed:
            listed.write(f"{text}\n")
    return num_failed


def main(argv: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the benchmarks; return the exit status."""
    names = [part.name for part in parts]
    parser = parser_of("gpu.all", "Run every test and benchmark that needs a GPU.")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for logs and summary"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=argparse.SUPPRESS, metavar="NAME"
    )
    args = parse(parser, {}, argv)
    chosen = getattr(args, "only", names)
    return min(1, run_all([part for part in parts if part.name in chosen], args.out))


if __name__ == "__main__":
    sys.exit(main())
