"""How evenly a router spreads streams over its edge workers.

A real router with N workers, over a prefill and a decode that only hold what they are given: prefill
says the first token, decode none, so every stream runs until its client leaves. Streams of a worker are
counted at decode, where each worker has a link of its own. Two loads: few keep-alive connections, each
with short requests before its long one, and thousands opened at once. Run from the root:
`python -m benchmarks.balance`.
"""

import argparse
import asyncio
import contextlib
import json
import resource
import signal
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec
from aiohttp import web

from benchmarks.verdict import result
from tandem.wire.channel import Inbox, Peer, Waker, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Finish
from tandem.wire.ids import new_epoch
from tandem.wire.messages import (
    Cancel,
    NodeLoad,
    Ping,
    Pong,
    StartDecode,
    StartPrefill,
    ToEngine,
    TokenBatch,
    TokenDelta,
)
from tandem.wire.node_info import ModelInfo, NodeInfo

GOAL = 1.2
START_TIMEOUT_S = 60.0
SHORT_REQUESTS = 5
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HoldingNode:
    """A node whose prefill says one token and whose decode says nothing.

    Attributes:
        streams: Requests that run here, by the edge worker that sent them.
        edges: All edge workers that were heard of.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.streams: Counter[Peer] = Counter()
        self.edges: set[Peer] = set()
        self.url = ""
        self._epoch = new_epoch()
        self._inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
        self._waker, self._is_closing = Waker(), False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_closing:
            wait([self._inbox], 1.0, self._waker)
            while (envelope := self._inbox.receive()) is not None:
                self.edges.add(envelope.peer)
                with contextlib.suppress(PeerLost):
                    self._answer(envelope.peer, envelope.message)
        self._inbox.close()

    def _answer(self, peer: Peer, message: ToEngine) -> None:
        match message:
            case Ping():
                self._inbox.send(peer, Pong(epoch=self._epoch, load=NodeLoad()))
            case StartDecode():
                self.streams[peer] += 1
            case Cancel():
                self.streams[peer] -= 1
            case StartPrefill(request=request, attempt=attempt):
                is_short = request.sampling.max_new_tokens == 1
                first = TokenDelta(
                    request_id=request.request_id,
                    attempt=attempt,
                    index=0,
                    token_ids=[5],
                    finish=Finish(reason="length" if is_short else "handed_off"),
                )
                self._inbox.send(peer, TokenBatch(epoch=self._epoch, deltas=[first]))
            case _:
                raise SystemExit(f"a router sent {message!r}")

    async def _server_info(self, _request: web.Request) -> web.Response:
        info = NodeInfo(
            role=self.role,
            version="benchmark",
            epoch=self._epoch,
            engine_port=self._inbox.port,
            bootstrap_port=1,
            model=ModelInfo(
                name="none", fingerprint="f", context_length=4096, vocab_size=50, eos_token_ids=[2]
            ),
        )
        return web.json_response(msgspec.to_builtins(info))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["HoldingNode"]:
        """Serve inside the block."""
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._thread.start()
        try:
            yield self
        finally:
            self._is_closing = True
            self._waker.wake()
            self._thread.join()
            await runner.cleanup()


@contextlib.asynccontextmanager
async def router(num_workers: int, *nodes: HoldingNode) -> AsyncIterator[tuple[str, int]]:
    """Run a router of so many workers; yield its address when all of them have met the nodes."""
    flags = [part for node in nodes for part in (f"--{node.role}", node.url)]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "tandem.router",
            *flags,
            "--port",
            "0",
            "--log-format",
            "json",
        ),
        *("--detokenizers", str(num_workers)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        line = await process.stderr.readline()
        address = urllib.parse.urlsplit(json.loads(line)["url"])
        async with asyncio.timeout(START_TIMEOUT_S):
            while any(len(node.edges) < num_workers for node in nodes):  # noqa: ASYNC110
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
    await ask(client, 1000)
    return client


async def balance(num_workers: int, num_clients: int, short_requests: int) -> float:
    """Return the most streams of a worker over the mean."""
    prefill, decode = HoldingNode("prefill"), HoldingNode("decode")
    async with (
        prefill.serving(),
        decode.serving(),
        router(num_workers, prefill, decode) as address,
    ):
        started = time.perf_counter()
        clients = await asyncio.gather(
            *(one_client(address, short_requests) for _ in range(num_clients))
        )
        took_s = time.perf_counter() - started
        streams = sorted((decode.streams[edge] for edge in decode.edges), reverse=True)
        for _, writer in clients:
            writer.close()
    ratio = max(streams) * num_workers / sum(streams)
    shown = " ".join(map(str, streams))
    print(f"{num_workers:7}  {num_clients:11}  {ratio:8.3f}  {took_s:6.2f}  {shown}", flush=True)
    return ratio


def verdicts(
    few: Sequence[float], many: Sequence[float], args: argparse.Namespace
) -> Iterator[str]:
    """Yield the last lines: the worst over all numbers of workers."""
    for ratios, clients in ((few, args.few), (many, args.many)):
        name = f"balance_{clients}_connections"
        yield result(name, max(ratios), GOAL, "max/mean", is_lower_better=True)


async def run(args: argparse.Namespace) -> None:
    """Measure every number of workers under both loads."""
    print("workers  connections  max/mean  took s  streams of each worker")
    few = [await balance(workers, args.few, SHORT_REQUESTS) for workers in args.workers]
    many = [await balance(workers, args.many, 0) for workers in args.workers]
    print(*verdicts(few, many, args), sep="\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance",
        description="How evenly a router spreads streams over its edge workers.",
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="edge workers")
    add("--few", type=int, default=8, help="keep-alive connections (default: 8)")
    add("--many", type=int, default=4000, help="connections opened at once (default: 4000)")
    return parser


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    args = build_parser().parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(args))


if __name__ == "__main__":
    main(sys.argv[1:])
