"""Streams that survive the loss of a decode node, behind our router and behind other routers in front of our nodes.

For each router, a cluster of one prefill and two decode nodes with the embedded model starts. Greedy streams run; when each has
its first tokens, one decode node is killed. A stream counts if it completes with the tokens that an undisturbed cluster gives.
"""

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence

import aiohttp

from benchmarks.rig import parse, parser_of, result
from tests.e2e.cluster import Cluster, ask, running_cluster
from tests.e2e.test_other_routers import ROUTERS, router
from tests.patience import until_async

NUM_BEFORE = 20
# A stream that takes longer counts as lost.
STREAM_S = 120.0


async def stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object], seen: list[str]
) -> bool:
    """Append the texts of a stream to `seen`; return whether it ended well."""
    is_whole = False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                for choice in event.get("choices", ()):
                    seen.append(choice.get("text") or "")
                    is_whole = is_whole or choice.get("finish_reason") == "length"
    except (aiohttp.ClientError, OSError, ValueError):
        return False
    return is_whole


async def run(url: str, model: str, num_streams: int, num: int, victim: int = 0) -> list[str]:
    """Run the streams; kill `victim`, if there is one. Return the texts; of streams that end early, an empty one."""
    seen: list[list[str]] = [[] for _ in range(num_streams)]
    timeout = aiohttp.ClientTimeout(total=STREAM_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        running = [
            asyncio.create_task(stream(session, url, _body(model, number, num), texts))
            for number, texts in enumerate(seen)
        ]
        if victim:
            await until_async(
                lambda: all(
                    len(texts) >= NUM_BEFORE or task.done()
                    for texts, task in zip(seen, running, strict=True)
                )
            )
            os.kill(victim, signal.SIGKILL)
        are_whole = await asyncio.gather(*running)
    return [
        "".join(texts) if is_whole else "" for texts, is_whole in zip(seen, are_whole, strict=True)
    ]


def _body(model: str, number: int, num: int) -> dict[str, object]:
    body = {"model": model, "prompt": f"Chapter {number}. Once upon a time", "max_tokens": num}
    return body | {"temperature": 0, "stream": True, "ignore_eos": True}


def survivors(url: str, cluster: Cluster, args: argparse.Namespace, right: Sequence[str]) -> int:
    """Return how many streams complete with the right text when a decode node is killed."""
    model = ask(f"{cluster.url}/v1/models")[1]["data"][0]["id"]
    victim = cluster.processes[1].pid
    texts = asyncio.run(run(url, model, args.streams, args.tokens, victim))
    return sum(text == expected for text, expected in zip(texts, right, strict=True))


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("router_failover", "Count streams that survive the loss of a decode node.")
    add = parser.add_argument
    add("--streams", type=int, default=8, help="streams at once")
    add("--tokens", type=int, default=200, help="tokens of each stream")
    return parser


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"streams": 2, "tokens": 60})
    rows = {}
    for name in ("tandem lb", *ROUTERS):
        with running_cluster("--dtype", "float32", decodes=2) as cluster:
            model = ask(f"{cluster.url}/v1/models")[1]["data"][0]["id"]
            right = asyncio.run(run(cluster.url, model, args.streams, args.tokens))
            if name in ROUTERS:
                (prefill,) = cluster.prefill_urls
                port = ask(f"{prefill}/server_info")[1]["bootstrap_port"]
                with router(name, prefill, cluster.decode_urls, port) as url:
                    rows[name] = survivors(url, cluster, args, right)
            else:
                rows[name] = survivors(cluster.url, cluster, args, right)
    print(f"{'router':<14} {'complete':>9}   of {args.streams}")
    for name, num_complete in rows.items():
        print(f"{name:<14} {num_complete:>9}")
    print(result("router_failover", rows["tandem lb"], args.streams, "streams"))


if __name__ == "__main__":
    main()
