#!/usr/bin/env python3
"""Start a cluster with the embedded model and run every client of this folder against it.

Run it with the interpreter that has Tandem installed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script from any directory

from client import DEFAULT_VENVS  # noqa: E402

from tandem.node.models.checkpoint import resolve_model  # noqa: E402
from tests.e2e.cluster import running_cluster  # noqa: E402

CLIENTS = (
    "langchain_openai",
    "litellm",
    "sglang_bench_serving",
    "lm_eval",
    "guidellm",
    "aiperf",
    "vllm_bench_serve",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, metavar="DIR")
    args = parser.parse_args()
    chosen = args.clients or CLIENTS
    if unknown := set(chosen) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    model = resolve_model(None, Path.home() / ".cache" / "tandem" / "models")
    flags = ("--model", str(model), "--context-length", "2048", "--log-level", "warning")
    with running_cluster(*flags) as cluster, tempfile.TemporaryDirectory() as directory:
        statuses = [
            subprocess.run(
                [
                    *(sys.executable, Path(__file__).with_name(f"{name}.py"), cluster.url),
                    *("--tokenizer", model, "--venvs", args.venvs),
                ],
                cwd=directory,
                check=False,
            ).returncode
            for name in chosen
        ]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
