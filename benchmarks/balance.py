"""How evenly a router spreads streams over its edge workers, and how long it takes to choose a node.

A real router with N workers, over stub nodes that hold what they are given: every stream runs until its client
leaves. Streams of a worker are counted at decode, where each worker has a link of its own. Two loads: few
keep-alive connections, each with short requests before its long one, and thousands opened at once. The choice
is that of the policy that knows every node's cache, in a cluster of 512 nodes.
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import signal
import statistics
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator

from benchmarks.rig import free_port, parse, parser_of, result
from benchmarks.stubs import StubNodes
from tandem.router.policies import POLICIES
from tandem.router.policy import Asked, ClusterSnapshot, NodeSnapshot, choose
from tandem.router.prefixes import KnownPrefixes, PromptBlocks
from tandem.wire.generation import Epoch
from tandem.wire.messages import CacheReport, NodeLoad, TierLoad
from tandem.wire.prefixes import block_names, pack_names

GOAL, GOAL_CHOICE_MS = 2.0, 1.0
START_TIMEOUT_S = 60.0
SHORT_REQUESTS = 5
# More than are answered at once: they wait for a beat that never comes.
LONG_TOKENS, NEVER_S = 1000, 1e6
PROMPT_TOKENS = 12_000
TIERS = (
    TierLoad(name="host", token_cost=0.05),
    TierLoad(name="redis", store="redis://store:6379/0", token_cost=0.4),
)
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def router(num_workers: int, nodes: StubNodes) -> AsyncIterator[tuple[str, int]]:
    """Run a router of so many workers; yield its address when all of them have met the nodes."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "tandem.router",
            *nodes.flags,
            "--port",
            "0",
            "--no-admission",
        ),
        *("--log-format", "json", "--detokenizers", str(num_workers)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        line = await process.stderr.readline()
        address = urllib.parse.urlsplit(json.loads(line)["url"])
        async with asyncio.timeout(START_TIMEOUT_S):
            while any(len(each.edges) < num_workers for each in (nodes.prefill, nodes.decode)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)  # from having met the nodes to taking connections
        yield str(address.hostname), int(address.port or 0)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.communicate()


async def ask(client: Client, max_new_tokens: int) -> None:
    """Send a streamed request and return when its first token came, and with one token its end."""
    reader, writer = client
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": [7, 8, 9], "sampling_params": sampling, "stream": True})
    head = "POST /generate HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    head_bytes = await reader.readuntil(b"\r\n\r\n")
    if not head_bytes.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the router answered {head_bytes!r}")
    await reader.readuntil(b"data: ")
    if max_new_tokens == 1:
        await reader.readuntil(b"\r\n0\r\n\r\n")


async def one_client(address: tuple[str, int], short_requests: int) -> Client:
    """Connect, send the short requests one after another, then the long one, and let it run."""
    client = await asyncio.open_connection(*address)
    for _ in range(short_requests):
        await ask(client, 1)
    await ask(client, LONG_TOKENS)
    return client


async def balance(num_workers: int, num_clients: int, short_requests: int) -> float:
    """Return the most streams of a worker over the mean."""
    nodes = StubNodes((free_port(), free_port()), NEVER_S)
    thread = threading.Thread(target=nodes.run)
    thread.start()
    try:
        async with router(num_workers, nodes) as address:
            began_s = time.perf_counter()
            clients = await asyncio.gather(
                *(one_client(address, short_requests) for _ in range(num_clients))
            )
            took_s = time.perf_counter() - began_s
            async with asyncio.timeout(START_TIMEOUT_S):
                while nodes.decode.num_streams.total() < num_clients:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            streams = sorted(nodes.decode.num_streams.values(), reverse=True)
            for _, writer in clients:
                writer.close()
    finally:
        nodes.close()
        thread.join()
    ratio = max(streams) * num_workers / sum(streams)
    shown = " ".join(map(str, streams))
    print(f"{num_workers:7}  {num_clients:11}  {ratio:8.3f}  {took_s:6.2f}  {shown}", flush=True)
    return ratio


def choice_ms(num_nodes: int) -> float:
    """Return milliseconds of one choice by what is cached, naming the prompt's blocks included.

    Every node has the first tenth of the prompt, as of a system prompt, and every tenth one half of it;
    in each of its tiers, a tenth more for every tier before it.
    """
    rng = random.Random(0)
    prompt = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    names, known = block_names(prompt), KnownPrefixes()

    def node(index: int, role: str) -> NodeSnapshot:
        prefixes = known.new_life()
        num_shared = len(names) // (2 if index % 10 == 0 else 10)
        load = NodeLoad(queued_tokens=rng.randrange(50_000), tiers=list(TIERS))
        prefixes.heard(load)
        for place, tier in enumerate(["", *(tier.name for tier in TIERS)]):
            shared = names[: num_shared + place * len(names) // 10]
            added = pack_names([*shared, *(rng.getrandbits(64) for _ in range(1_000))])
            prefixes.take(CacheReport(epoch=Epoch(1), position=1, added=added, tier=tier))
        return NodeSnapshot(
            url=f"http://{role}-{index}:7000",
            role=role,
            is_up=True,
            fingerprint="model",
            load=load,
            zone=f"z{index % 3}",
            prefixes=prefixes.cached,
            tiers=prefixes.tiers,
        )

    snapshot = ClusterSnapshot(
        *(tuple(node(i, role) for i in range(num_nodes // 2)) for role in ("prefill", "decode"))
    )
    took_s = []
    for turn in range(200):
        began_s = time.thread_time()
        asked = Asked(len(prompt), "", PromptBlocks(prompt))
        choose(snapshot, "model", POLICIES["cache_aware"], turn, rng, asked=asked)
        took_s.append(time.thread_time() - began_s)
    return statistics.median(took_s) * 1e3


async def run(args: argparse.Namespace) -> None:
    """Measure every number of workers under both loads."""
    print("workers  connections  max/mean  took s  streams of each worker")
    for clients, short_requests in ((args.few, SHORT_REQUESTS), (args.many, 0)):
        ratios = [await balance(workers, clients, short_requests) for workers in args.workers]
        name = f"balance_{clients}_connections"
        print(result(name, max(ratios), GOAL, "max/mean", is_lower_better=True))


def main() -> None:
    """Run the benchmark."""
    parser = parser_of("balance", "Measure how evenly a router spreads streams over edge workers.")
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="edge workers")
    add("--few", type=int, default=8, help="keep-alive connections")
    add("--many", type=int, default=4000, help="connections opened at once")
    add("--nodes", type=int, default=512, help="of the cluster in which a node is chosen")
    args = parse(parser, {"workers": [2], "many": 50, "nodes": 16})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(args))
    took_ms = choice_ms(args.nodes)
    print(result("choice_time", took_ms, GOAL_CHOICE_MS, "ms", is_lower_better=True))


if __name__ == "__main__":
    main()
