"""`tandem up`: a whole cluster on this machine, in one command with one log.

Each node is the same command a person would type, as a process of its own. If one ends, all end: this
is a laptop's cluster, and a half of it serves nobody.
"""

import asyncio
import os
import random
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import aiohttp
import uvloop
from rich.console import Console
from rich.text import Text

from tandem.node.config import NodeConfig
from tandem.node.flags import add_hidden_flags
from tandem.node.flags import build_parser as build_node_parser
from tandem.router.arguments import build_parser as build_router_parser
from tandem.router.arguments import parse
from tandem.router.config import RouterConfig
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import add_flags, options_of

COMMAND = (sys.executable, "-P", "-m", "tandem")
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
STOP_TIMEOUT_S = 10.0
# Below those that the kernel gives to clients (from 32768; net.ipv4.ip_local_port_range): between the look for
# a free one and a node's start no connection takes it. Drawn, so that two clusters that start at once get on.
PORTS = range(20_000, 32_000)
ROUTER = "router"
# Of a log line: a longer one would end the cluster.
MOST_LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the cluster.

    Attributes:
        name: In the log.
        argv: After `tandem`.
        secrets: Its variables beside those of this process: `ps` shows arguments, and no variables.
    """

    name: str
    argv: list[str]
    secrets: dict[str, str] = field(default_factory=dict)


# Given by this command to each process.
OWN = ("prefills", "bootstrap_ports", "decodes", "routers", "advertise_url", "tokenizer_dir")
OWN_OF_NODES = ("model", "transfer.bootstrap_port", "engine.num_threads")
# Of the flags that router and nodes both have; the others of these are the router's alone, since clients reach
# only the router.
SHARED = (
    "--drain-timeout-s",
    "--generation-config",
    "--heartbeat-interval-ms",
    "--log-format",
    "--log-level",
    "--served-model-name",
)
# May hold secrets: from a file or a variable they stay off the command lines of the processes.
SECRET = {"--api-key": "TANDEM_API_KEY", "--kv-tier": "TANDEM_KV_TIER"}
COMMON = (
    *("--prefills", "--decodes", "--model", "--num-threads", "--host", "--port", "--detokenizers"),
    *("--policy", "--api-key-file", "--ssl-certfile", "--tool-call-parser", "--log-level"),
    *("--dtype", "--device", "--engine"),
)


def build_parser() -> Parser:
    """Return the parser: its own flags, the router's, and those that only nodes have."""
    parser = Parser(
        "tandem up",
        common=COMMON,
        description="Start prefill nodes, decode nodes and a router on this machine.",
        epilog="Flags of HTTP, such as --api-key, go to the router; flags of nodes, such as --page-size 32, to every "
        "node; --log-level and a few others to all. With --engine simulated --sim-kv none nodes only take the "
        "time that --sim-profile gives: a cluster of any size on one machine.\n\n"
        "More: tandem docs quickstart; tandem docs simulation",
    )
    add = parser.add_argument_group("cluster").add_argument
    add("--prefills", type=int, default=1, metavar="N", help="prefill nodes")
    add("--decodes", type=int, default=1, metavar="N", help="decode nodes")
    add(
        "--model",
        "--model-path",
        metavar="PATH",
        help="a transformers directory or a GGUF file; without it, the embedded model",
    )
    add(
        "--num-threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of torch in each node; 0: the cores, shared evenly",
    )
    add_flags(parser, RouterConfig, without=OWN)
    add_flags(parser, NodeConfig, without=(*OWN, *OWN_OF_NODES, *_shared_fields()))
    add_hidden_flags(parser, without=_names(RouterConfig))
    return parser


def _shared_fields() -> list[str]:
    routers = _names(RouterConfig)
    nodes = options_of(NodeConfig)
    return [each.dest for each in nodes if not routers.isdisjoint(each.flag.names)]


def _names(config: type) -> set[str]:
    return {name for option in options_of(config) for name in option.flag.names}


def members(
    parser: Parser, argv: Sequence[str], ports: Sequence[int], num_cores: int
) -> list[Member]:
    """Return the processes of a cluster, in the order they start.

    Args:
        argv: Of this command; no wrong one.
        ports: Free ports: two for each prefill, one for each decode.
    """
    args = parser.parse_args(argv)
    lower, own = parser.flags(argv)
    secrets = {flag: _variable(flag, lower) for flag in SECRET}
    shown = [flag for flag in lower if flag[0].partition("=")[0] not in SECRET]
    of_nodes, of_router = _forwarded([*shown, *own])
    num_nodes = args.prefills + args.decodes
    threads = args.num_threads or max(1, num_cores // num_nodes)
    common = ["--num-threads", str(threads), "--log-format", "console", *of_nodes]
    if args.model is not None:
        common += ["--model", args.model]
    free, tiers = iter(ports), secrets["--kv-tier"]
    nodes, prefills, decodes = [], [], []
    for i in range(args.prefills):
        port, bootstrap_port = str(next(free)), str(next(free))
        own_flags = ["prefill", "--port", port, "--bootstrap-port", bootstrap_port]
        nodes.append(Member(f"prefill-{i}", [*own_flags, *common], tiers))
        prefills += [f"http://127.0.0.1:{port}", bootstrap_port]
    for i in range(args.decodes):
        port = str(next(free))
        nodes.append(Member(f"decode-{i}", ["decode", "--port", port, *common], tiers))
        decodes.append(f"http://127.0.0.1:{port}")
    router = ["lb", "--prefill", *prefills, "--decode", *decodes, "--log-format", "console"]
    return [*nodes, Member(ROUTER, [*router, *of_router], secrets["--api-key"])]


def _variable(flag: str, lower: Sequence[list[str]]) -> dict[str, str]:
    """Return the variable that gives a process the values of a repeated flag."""
    values = [words[0].partition("=")[2] for words in lower if words[0].startswith(f"{flag}=")]
    return {SECRET[flag]: shlex.join(values)} if values else {}


def _forwarded(flags: Sequence[list[str]]) -> tuple[list[str], list[str]]:
    """Return the words for every node, and those for the router."""
    own = {"--prefills", "--decodes", "--model", "--model-path", "--num-threads"}
    routers = _names(RouterConfig)
    of_nodes: list[str] = []
    of_router: list[str] = []
    for flag in flags:
        name = flag[0].partition("=")[0]
        switch = "--" + name.removeprefix("--no-")
        if name in own:
            continue
        is_routers = name in routers or switch in routers
        if is_routers:
            of_router += flag
        if not is_routers or name in SHARED:
            of_nodes += flag
    return of_nodes, of_router


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
    args = parser.parse_args(argv)
    if args.prefills < 1 or args.decodes < 1:
        parser.error("--prefills and --decodes are at least 1")
    ports = free_ports(2 * args.prefills + args.decodes)
    processes = members(parser, argv, ports, os.cpu_count() or 1)
    # This command gave each process its flags; a variable would give the router's to nodes, too.
    others = (build_node_parser("tandem up", "prefill", "", 0), build_router_parser())
    for variable in set().union(*(each.variables() for each in (parser, *others))):
        os.environ.pop(variable, None)
    try:
        router = parse(processes[-1].argv[1:])
    except ConfigInvalid as error:
        parser.error(error.message)
    if router.http.tls is not None and router.http.tls.ca_certs:
        parser.error(
            "--ssl-ca-certs: this command has no certificate with which to ask its own router whether it "
            "serves; start prefill, decode and lb one by one"
        )
    cluster = Cluster(processes, Console(highlight=False))
    status: int = uvloop.run(cluster.run(router.host, router.port, router.http.scheme))
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
            *COMMAND,
            *member.argv,
            env=os.environ | member.secrets,
            limit=MOST_LINE_BYTES,
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
    except (aiohttp.ClientError, TimeoutError):
        return False
