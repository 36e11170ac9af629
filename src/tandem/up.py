"""`tandem up`: a whole cluster on this machine, in one command with one log.

Each node is the same command a person would type, as a process of its own. If one ends, all end: this
is a laptop's cluster, and a half of it serves nobody.
"""

import argparse
import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import aiohttp
import uvloop
from rich.console import Console
from rich.text import Text

from tandem.frontend.flags import add_http_flags, http_argv, read_http
from tandem.frontend.reply_flags import add_reply_flags
from tandem.router.config import LOCAL_PREFILL_THRESHOLD
from tandem.telemetry.flags import add_level_flag
from tandem.wire.errors import ConfigInvalid

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
STOP_TIMEOUT_S = 10.0
# Below those that the kernel gives to clients (from 32768; net.ipv4.ip_local_port_range): between the look for
# a free one and a node's start no connection takes it. Drawn, so that two clusters that start at once get on.
PORTS = range(20_000, 32_000)
ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the cluster: the arguments after `tandem`, and its name in the log."""

    name: str
    argv: list[str]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; flags it does not know go to every node."""
    parser = argparse.ArgumentParser(
        prog="tandem up",
        description="Start prefill nodes, decode nodes and a router on this machine.",
        epilog="Any other flag goes to every node, such as --dtype float32 or --page-size 32. With "
        "--engine simulated --sim-kv none nodes only take the time that --sim-profile says: a cluster of "
        "any size, of a model of any size, on one machine. More: `tandem docs quickstart` and "
        "`tandem docs simulation`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--prefills", type=int, default=1, metavar="N", help="prefill nodes")
    add("--decodes", type=int, default=1, metavar="N", help="decode nodes")
    add("--model", "--model-path", default=None, metavar="PATH", help="nothing: the embedded model")
    add("--host", default="127.0.0.1", help="where the router listens; nodes stay on loopback")
    add("--port", type=int, default=8000, help="of the router")
    add("--detokenizers", type=int, default=1, metavar="N", help="edge workers of the router")
    add("--policy", default="least_load", help="how the router chooses a pair")
    add(
        "--local-prefill-threshold",
        type=int,
        default=LOCAL_PREFILL_THRESHOLD,
        metavar="N",
        help="prompt tokens that a decode node may compute by itself at a time; 0: none",
    )
    add("--num-threads", type=int, default=0, help="of torch in each node; 0: cores shared evenly")
    # Clients speak to the router alone; the nodes behind it stay plain HTTP on loopback.
    add_http_flags(parser.add_argument_group("HTTP of the router"))
    add_reply_flags(parser)
    add_level_flag(parser)
    return parser


def members(
    args: argparse.Namespace, extra: Sequence[str], ports: Sequence[int], num_cores: int
) -> list[Member]:
    """Return the processes of a cluster, in the order they start.

    Args:
        extra: Flags for every node.
        ports: Free ports: two for each prefill, one for each decode.
    """
    num_nodes = args.prefills + args.decodes
    threads = args.num_threads or max(1, num_cores // num_nodes)
    logging = ["--log-level", args.log_level, "--log-format", "console"]
    common = ["--num-threads", str(threads), *logging, *extra]
    if args.model is not None:
        common += ["--model", args.model]
    free = iter(ports)
    nodes, prefills, decodes = [], [], []
    for i in range(args.prefills):
        port, bootstrap_port = str(next(free)), str(next(free))
        argv = ["prefill", "--port", port, "--bootstrap-port", bootstrap_port, *common]
        nodes.append(Member(f"prefill-{i}", argv))
        prefills += [f"http://127.0.0.1:{port}", bootstrap_port]
    for i in range(args.decodes):
        port = str(next(free))
        nodes.append(Member(f"decode-{i}", ["decode", "--port", port, *common]))
        decodes.append(f"http://127.0.0.1:{port}")
    router = ["lb", "--prefill", *prefills, "--decode", *decodes, "--policy", args.policy]
    router += ["--host", args.host, "--port", str(args.port), *logging]
    router += ["--local-prefill-threshold", str(args.local_prefill_threshold)]
    router += ["--detokenizers", str(args.detokenizers)]
    router += ["--tool-call-parser", args.tool_call_parser]
    router += ["--reasoning-parser", args.reasoning_parser]
    router += http_argv(args)
    return [*nodes, Member(ROUTER, router)]


def free_ports(num: int) -> list[int]:
    """Return ports of loopback that nobody listens on now, and that the kernel gives to nobody by itself."""
    drawn = random.sample(PORTS, len(PORTS))
    found = list(islice(filter(_is_free, drawn), num))
    assert len(found) == num
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = build_parser()
    args, extra = parser.parse_known_args(argv)
    if args.prefills < 1 or args.decodes < 1:
        parser.error("--prefills and --decodes are at least 1")
    try:
        http = read_http(args)
    except ConfigInvalid as error:
        parser.error(error.message)
    if args.ssl_ca_certs:
        parser.error(
            "--ssl-ca-certs: this command has no certificate with which to ask its own router whether it "
            "serves; start prefill, decode and lb one by one"
        )
    ports = free_ports(2 * args.prefills + args.decodes)
    cluster = Cluster(members(args, extra, ports, os.cpu_count() or 1), Console(highlight=False))
    status: int = uvloop.run(cluster.run(args.host, args.port, http.scheme))
    return status


class Cluster:
    """The processes of one `tandem up`, from start to stop."""

    def __init__(self, cluster: Sequence[Member], console: Console) -> None:
        self._members = cluster
        self._console = console
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self, host: str, port: int, scheme: str) -> int:
        """Start all, say when the cluster serves, wait for a signal or an end, stop all.

        Returns:
            0 after a signal; when a process ended by itself its status, 1 at least.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [
                    tasks.create_task(self._member(member, COLOURS[i % len(COLOURS)]))
                    for i, member in enumerate(self._members)
                ]
                ready = tasks.create_task(self._announce(host, port, scheme))
                stopped = tasks.create_task(self._stopping.wait())
                await asyncio.wait([*watchers, stopped], return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                stopped.cancel()
                await self._stop()
            return self._status
        finally:
            self._kill()

    def _signalled(self) -> None:
        if self._stopping.is_set():  # a second signal forces
            self._kill()
        self._stopping.set()

    async def _member(self, member: Member, colour: str) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which then stops them in order.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "tandem",
            *member.argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes[member.name] = process
        assert process.stdout is not None
        width = max(len(m.name) for m in self._members)
        refusal, says = "", f"tandem {member.argv[0]}: error: "
        async for line in process.stdout:
            said = Text.from_ansi(line.decode(errors="replace").rstrip())
            refusal = said.plain.removeprefix(says) if said.plain.startswith(says) else refusal
            prefix = (f"{member.name:<{width}} │ ", colour)
            self._console.print(Text.assemble(prefix, said), soft_wrap=True)
        status = await process.wait()
        if not self._stopping.is_set():
            self._stopping.set()  # the first to end tells why
            self._status = max(status, 1)  # a signal's is below 0
            reason = refusal or f"ended with status {status}"
            sys.stderr.write(f"tandem up: error: {member.name}: {reason}; stopping the rest\n")

    async def _announce(self, host: str, port: int, scheme: str) -> None:
        shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host
        url = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"
        # Not checked: it is our own child's certificate, made for the name that clients use.
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not await _is_healthy(session, url):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.2)
        self._console.print(
            Text.from_markup(
                f"\n[bold green]Tandem serves at {url}[/]  (Ctrl-C stops it)\n\n"
                f"  curl -s {url}/generate -H 'Content-Type: application/json' \\\n"
                '       -d \'{"text": "The capital of France is", "max_new_tokens": 32}\'\n\n'
                f"  What it does: {url} in a browser, or tandem top {url}\n"
                f"  OpenAI clients: base_url={url}/v1   health: {url}/health   "
                f"metrics: {url}/metrics\n"
            ),
            soft_wrap=True,
        )

    async def _stop(self) -> None:
        """Ask the router first, so that no request meets a node that is gone; then the nodes."""
        self._stopping.set()
        routers = [process for name, process in self._processes.items() if name == ROUTER]
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                for processes in (routers, list(self._processes.values())):
                    await _ended(processes)
        except TimeoutError:
            self._kill()

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()


async def _ended(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
    await asyncio.gather(*(process.wait() for process in processes))


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
