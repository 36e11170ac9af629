"""vLLM with separate prefill and decode, through Tandem and through NixlConnector, compared with vLLM in one process.

All get the same load. With separate roles, each has one core; vLLM in one process has both cores. Run the benchmark in the
environment of `make test-vllm`. For NixlConnector, add `pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rig import Target, free_port, parse, parser_of, result, running
from benchmarks.streams import closed_loop
from tandem.node.command import default_cache_dir
from tandem.node.models.checkpoint import resolve_model
from tandem.tools.bench.report import LoadReport

NAME = "model"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "UCX_TLS": "tcp",
}
LONG_PROMPT_TOKENS = 1500
NUM_SHORT = 8


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of(
        "vllm_apart", "Compare vLLM through Tandem with NixlConnector and with vLLM in one process."
    )
    add = parser.add_argument
    add("--model", default="", help="model directory; if not set, the embedded model")
    add("--dtype", default="bfloat16", help="type of weights and KV")
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        help="numbers of concurrent requests",
    )
    add(
        "--requests-per-stream",
        type=int,
        default=2,
        help="requests per stream and round",
    )
    add("--input-tokens", type=int, default=256, help="tokens per prompt, random ids")
    add("--output-tokens", type=int, default=48, help="tokens to generate per prompt")
    add("--only", nargs="+", default=["tandem", "nixl", "together"], help="servers to measure")
    return parser


class Servers:
    """Starts the servers to compare, one at a time. All get the same vLLM flags."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._model = str(model)
        self.flags = ["--dtype", dtype, "--enforce-eager", "--max-num-seqs", "64"]
        self.flags += ["--max-model-len", "2048"]

    @contextlib.contextmanager
    def start(self, name: str) -> Iterator[Target]:
        """Start the server `name`; yield the target for clients."""
        with contextlib.ExitStack() as stack:
            yield {"tandem": self._tandem, "nixl": self._nixl, "together": self._together}[name](
                stack
            )

    def _tandem(self, stack: contextlib.ExitStack) -> Target:
        bootstrap = str(free_port())
        prefill = self._node(stack, "prefill", "0", ["--bootstrap-port", bootstrap])
        decode = self._node(stack, "decode", "1", [])
        port = free_port()
        lb = ["lb", "--port", str(port), "--prefill", prefill.url, bootstrap]
        lb += ["--decode", decode.url, "--local-prefill-threshold", "0"]
        return stack.enter_context(running("lb", [*_module("tandem"), *lb], port))

    def _node(self, stack: contextlib.ExitStack, role: str, core: str, own: list[str]) -> Target:
        port = free_port()
        argv = [role, "--engine", "vllm", "--model", self._model, "--port", str(port), *own]
        argv += ["--served-model-name", NAME, "--num-threads", "1", *self.flags[:2]]
        argv += ["--", *self.flags[2:]]
        command = [*_module("tandem"), *argv]
        return stack.enter_context(running(role, command, port, core, ENVIRONMENT))

    def _nixl(self, stack: contextlib.ExitStack) -> Target:
        kind = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        flags = ["--kv-transfer-config", json.dumps(kind)]
        prefill, decode = (self._serve(stack, core, 1, flags) for core in "01")
        port = free_port()
        proxy = [sys.executable, "-m", "benchmarks.peers", "--proxy", prefill.url, decode.url]
        command = [*proxy, str(port)]
        return stack.enter_context(running("proxy", command, port))

    def _together(self, stack: contextlib.ExitStack) -> Target:
        return self._serve(stack, "0,1", 2, [])

    def _serve(
        self, stack: contextlib.ExitStack, cores: str, num_threads: int, flags: list[str]
    ) -> Target:
        port = free_port()
        argv = ["serve", self._model, "--served-model-name", NAME, "--host", "127.0.0.1"]
        argv += ["--port", str(port), *self.flags, *flags]
        environment = ENVIRONMENT | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_threads),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        command = [*_module("vllm.entrypoints.cli.main"), *argv]
        return stack.enter_context(running("vllm", command, port, cores, environment))


def _module(name: str) -> list[str]:
    return [sys.executable, "-P", "-m", name]


def load(args: argparse.Namespace, url: str, concurrency: int) -> LoadReport:
    """Run one round and return its report."""
    num_requests = concurrency * args.requests_per_stream
    return asyncio.run(
        closed_loop(
            *(url, concurrency, num_requests, args.input_tokens, args.output_tokens),
            seed=concurrency,
            model=NAME,
        )
    )


def with_long_prompts(args: argparse.Namespace, url: str) -> LoadReport:
    """Return the report of short streams while long prompts arrive one after the other."""

    async def both() -> LoadReport:
        num_short = NUM_SHORT * args.requests_per_stream
        short = asyncio.ensure_future(
            closed_loop(url, NUM_SHORT, num_short, 32, args.output_tokens, seed=77, model=NAME)
        )
        seed = 1000
        while not short.done():
            await closed_loop(url, 1, 1, LONG_PROMPT_TOKENS, 1, seed=seed, model=NAME)
            seed += 1
        return await short

    return asyncio.run(both())


def main() -> None:
    """Run the benchmark."""
    quick = {"concurrency": [1], "output_tokens": 8, "requests_per_stream": 1, "only": ["tandem"]}
    args = parse(build_parser(), quick)
    model = resolve_model(args.model or None, default_cache_dir() / "models")
    servers = Servers(model, args.dtype)
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    print(
        f"{'server':<10}{'streams':>16}{'failed':>7}{'tokens/s':>10}{'TTFT p50':>10}{'ITL p50/p99 ms':>17}"
    )
    seen: dict[tuple[str, str], LoadReport] = {}
    for name in args.only:
        with servers.start(name) as target:
            load(args, target.url, 1)
            rounds = {str(count): load(args, target.url, count) for count in args.concurrency}
            if not args.quick:
                rounds["+ long prompts"] = with_long_prompts(args, target.url)
        for streams, one in rounds.items():
            seen[name, streams] = one
            itl = f"{one.itl_ms.p50:.0f}/{one.itl_ms.p99:.0f}"
            print(
                f"{name:<10}{streams:>16}{one.num_failed:>7}{one.output_tokens_per_s:>10.1f}"
                f"{one.ttft_ms.p50:>10.0f}{itl:>17}",
                flush=True,
            )
    summarise(args, seen)


def summarise(args: argparse.Namespace, seen: dict[tuple[str, str], LoadReport]) -> None:
    """Print the result lines for the measured servers."""
    if {"tandem", "nixl"} <= set(args.only):
        pairs = [(seen["tandem", str(n)], seen["nixl", str(n)]) for n in args.concurrency]
        rate = min(ours.output_tokens_per_s / theirs.output_tokens_per_s for ours, theirs in pairs)
        ttft = max(ours.ttft_ms.p50 / theirs.ttft_ms.p50 for ours, theirs in pairs)
        print(result("vllm_apart_throughput_vs_nixl", rate, 1.0))
        print(result("vllm_apart_ttft_vs_nixl", ttft, 0.9, is_lower_better=True))
    if {"tandem", "together"} <= set(args.only):
        ours, theirs = (seen[name, "+ long prompts"] for name in ("tandem", "together"))
        print(result("vllm_apart_itl_p99_gain", theirs.itl_ms.p99 / ours.itl_ms.p99, 3.0))


if __name__ == "__main__":
    main()
