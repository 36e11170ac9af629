"""Streams that survive the loss of a decode engine, behind `tandem lb` and behind vllm-router.

One prefill and two decode engines, unmodified `vllm serve` processes with NixlConnector, serve both routers one after the
other. Greedy streams run; when each has its first tokens, one decode engine is killed. A stream counts if it completes with
the tokens of one vLLM process. Run the benchmark in the environment of `make test-vllm`. For vllm-router, pass the Python
of an environment with `pip install vllm-router==0.1.17`; without it, only `tandem lb` runs.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rig import parse, parser_of, result
from tandem.cli.up import free_ports
from tests.patience import eventually, until_async
from tests.with_vllm.models import tiny_with_tokenizer
from tests.with_vllm.nodes import START_S, start
from tests.with_vllm.stock import Fleet, client, stream, streams

NUM_BEFORE = 20
VICTIM = "d1"

Prompt = list[int]


def make_prompts(count: int) -> list[Prompt]:
    """Return random prompts of 16 to 300 tokens."""
    rng = random.Random(52234)
    return [[rng.randrange(3, 49000) for _ in range(rng.randint(16, 300))] for _ in range(count)]


@contextlib.contextmanager
def vllm_router(python: Path, fleet: Fleet, log: Path) -> Iterator[str]:
    """Run vllm-router in front of a fleet; yield its URL."""
    port, metrics = free_ports(2)
    nodes = [
        word
        for role in ("prefill", "decode")
        for url in fleet.urls(role)
        for word in (f"--{role}", url)
    ]
    process = start(
        log,
        "vllm_router.launch_router",
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin", *nodes),
        python=str(python),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        assert eventually(lambda: _is_healthy(url), within_s=START_S), log.read_text()
        yield url
    finally:
        process.kill()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:  # not yet, or an error status
        return False


async def count(
    fleet: Fleet, url: str, prompts: Sequence[Prompt], expected: Sequence[list[int]], num: int
) -> tuple[int, int]:
    """Return how many streams complete with the right tokens: undisturbed, and when a decode engine is killed."""
    async with client() as session:
        ended, seen = await streams(session, url, prompts, num)
        undisturbed = _num_right(ended, seen, expected)
        seen = [[] for _ in prompts]
        running = [
            asyncio.create_task(stream(session, url, prompt, num, each))
            for prompt, each in zip(prompts, seen, strict=True)
        ]
        await until_async(
            lambda: all(
                len(each) >= NUM_BEFORE or task.done()
                for each, task in zip(seen, running, strict=True)
            )
        )
        fleet[VICTIM].signal(signal.SIGKILL)
        return undisturbed, _num_right(await asyncio.gather(*running), seen, expected)


def _num_right(
    ended: Sequence[str], seen: Sequence[list[int]], expected: Sequence[list[int]]
) -> int:
    rows = zip(ended, seen, expected, strict=True)
    return sum(not reason and tokens == right for reason, tokens, right in rows)


async def expect(url: str, prompts: Sequence[Prompt], num: int) -> list[list[int]]:
    """Return the tokens of an engine without a router."""
    async with client() as session:
        _ended, seen = await streams(session, url, prompts, num)
    tokens: list[list[int]] = seen
    return tokens


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("stock_failover", "Count streams that survive the loss of a decode engine.")
    add = parser.add_argument
    add("--streams", type=int, default=16, help="streams at once")
    add("--tokens", type=int, default=200, help="tokens of each stream")
    add("--peers-python", type=Path, help="Python of an environment with vllm-router")
    return parser


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"streams": 4, "tokens": 60})
    prompts = make_prompts(args.streams)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = tiny_with_tokenizer(directory / "cache", directory / "model")
        with Fleet(model, directory, ("alone", "p1", "d1", "d2")) as fleet:
            fleet.wait_up()
            expected = asyncio.run(expect(fleet["alone"].url, prompts, args.tokens))
            rows = {}
            if args.peers_python is not None:
                with vllm_router(args.peers_python, fleet, directory / "vr.log") as url:
                    rows["vllm-router"] = asyncio.run(
                        count(fleet, url, prompts, expected, args.tokens)
                    )
                fleet[VICTIM].process.wait()
                fleet[VICTIM].start()
                fleet.wait_up()
            fleet.route()
            rows["tandem lb"] = asyncio.run(count(fleet, fleet.url, prompts, expected, args.tokens))
    print(f"{'router':<12} {'undisturbed':>12} {'decode killed':>14}   of {args.streams}")
    for name, (undisturbed, killed) in rows.items():
        print(f"{name:<12} {undisturbed:>12} {killed:>14}")
    print(result("stock_failover", rows["tandem lb"][1], args.streams, "streams"))


if __name__ == "__main__":
    main()
