"""What the adapter between the router and unmodified engines costs: CPU of a request and of a token, and memory.

`tandem lb` serves short requests, then long streams, on engines that answer at once: a prefill and a decode, with the HTTP
of `vllm serve` and NixlConnector. The router's own processes are the baseline: the adapter is to cost no more than they do.
"""

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from benchmarks.rig import cpu_s, family, parse, parser_of, result, tandem
from tests.stock.fake_vllm import FakeVllm, connect
from tests.stock.fleet import model_files

NUM_PROMPT, NUM_SHORT, NUM_LONG = 32, 4, 400
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU and memory of the router's processes and of the adapter, in seconds and bytes."""

    router_s: float
    adapter_s: float
    router_bytes: int
    adapter_bytes: int

    @classmethod
    def of(cls, parent: int) -> "Usage":
        """Return the usage of the processes of a `tandem lb`."""
        processes = [psutil.Process(pid) for pid in family(parent)]
        adapters = [each for each in processes if "tandem.stock.adapter" in each.cmdline()]
        routers = [each for each in processes if each not in adapters]
        return cls(
            cpu_s([each.pid for each in routers]),
            cpu_s([each.pid for each in adapters]),
            sum(each.memory_info().rss for each in routers),
            sum(each.memory_info().rss for each in adapters),
        )


async def ask(session: aiohttp.ClientSession, url: str, number: int, num_new: int) -> None:
    """Run one greedy request; raise if its answer is not complete."""
    prompt = [3 + (number * 7 + place) % 90 for place in range(NUM_PROMPT)]
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    async with session.post(f"{url}/generate", json=body) as answer:
        ids = (await answer.json()).get("output_ids", [])
        if len(ids) != num_new:
            raise SystemExit(f"{answer.status}: {len(ids)} of {num_new} tokens")


async def load(url: str, count: int, num_new: int, num_clients: int) -> None:
    """Run `count` requests, `num_clients` at once."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await ask(session, url, number, num_new)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(client())


async def measure(args: argparse.Namespace, directory: Path) -> list[str]:
    """Run the benchmark; return the lines of its results."""
    model = str(model_files(directory / "model"))
    prefill, decode = FakeVllm(model), FakeVllm(model)
    connect([prefill], [decode])
    async with AsyncExitStack() as stack:
        for engine in (prefill, decode):
            await stack.enter_async_context(engine.running())
        argv = ["lb", "--prefill", f"vllm+{prefill.url}", "--decode", f"vllm+{decode.url}"]
        argv += ["--local-prefill-threshold", "0"]
        lb = tandem("lb", argv)
        target = await asyncio.to_thread(lb.__enter__)
        try:
            await load(target.url, args.requests // 10, NUM_SHORT, args.clients)
            usages = [Usage.of(target.pid)]
            for count, num_new in ((args.requests, NUM_SHORT), (args.streams, NUM_LONG)):
                await load(target.url, count, num_new, args.clients)
                usages.append(Usage.of(target.pid))
        finally:
            await asyncio.to_thread(lb.__exit__, None, None, None)
    return report(args, usages)


def report(args: argparse.Namespace, usages: list[Usage]) -> list[str]:
    """Print the table; return the results."""
    before, short, long = usages
    router = (short.router_s - before.router_s) / args.requests * 1e6
    adapter = (short.adapter_s - before.adapter_s) / args.requests * 1e6
    num_tokens = args.streams * NUM_LONG
    print(f"{'':<10} {'us/request':>11} {'us/token':>9} {'MiB before':>11} {'after':>6}")
    router_token = (long.router_s - short.router_s) / num_tokens * 1e6
    adapter_token = (long.adapter_s - short.adapter_s) / num_tokens * 1e6
    memory = before.router_bytes / MIB, short.router_bytes / MIB
    print(
        f"{'router':<10} {router:>11.0f} {router_token:>9.1f} {memory[0]:>11.0f} {memory[1]:>6.0f}"
    )
    memory = before.adapter_bytes / MIB, short.adapter_bytes / MIB
    print(
        f"{'adapter':<10} {adapter:>11.0f} {adapter_token:>9.1f} {memory[0]:>11.0f} {memory[1]:>6.0f}"
    )
    growth = (short.adapter_bytes - before.adapter_bytes) / args.requests
    return [
        result("stock_hop_growth", growth, 1024, "bytes/request", is_lower_better=True),
        result("stock_hop_cpu", adapter / router, 1, "of the router's", is_lower_better=True),
    ]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("stock_hop", "Measure the adapter between the router and stock engines.")
    add = parser.add_argument
    add("--requests", type=int, default=10_000, help="short requests")
    add("--streams", type=int, default=200, help="long requests")
    add("--clients", type=int, default=32, help="requests at once")
    return parser


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"requests": 200, "streams": 4, "clients": 4})
    with tempfile.TemporaryDirectory() as scratch:
        for line in asyncio.run(measure(args, Path(scratch))):
            print(line)


if __name__ == "__main__":
    main()
