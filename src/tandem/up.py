"""`tandem up`: runs a whole cluster on this machine, with one log file.

Each node is a separate process that runs the command an operator would type. If one exits, all stop: half
of a local cluster is useless.
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Self, TextIO

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
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
# Below the kernel's ephemeral ports (from 32768; net.ipv4.ip_local_port_range): no outgoing connection takes a
# port between the check and a node's start. Drawn at random, so that clusters started together rarely collide.
PORTS = range(20_000, 32_000)
ROUTER = "router"
# Limit of a log line: a longer line would stop the cluster.
MOST_LINE_BYTES = 1 << 26
# A log line of no interest while all is well; every other line, such as a traceback, is shown.
ROUTINE = re.compile(r"\S+ \[(debug|info)\b")
# A node's log line about its download, with the percentage until that ends.
DOWNLOAD = re.compile(r"model\.(?:downloading .* percent=(\d+)|resolved)")
HEALTH_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the cluster.

    Attributes:
        name: The name in the log.
        argv: The arguments after `tandem`.
        secrets: Environment variables to add, because `ps` shows arguments but no variables.
    """

    name: str
    argv: list[str]
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> str:
        """The port of a node's HTTP."""
        return self.argv[self.argv.index("--port") + 1]


# Options that this command sets for each process.
OWN = ("prefills", "bootstrap_ports", "decodes", "routers", "advertise_url", "tokenizer_dir")
OWN_OF_NODES = ("model", "transfer.bootstrap_port", "engine.num_threads")
# Flags for router and nodes. Other flags that both have go to the router alone, because clients reach only
# the router.
SHARED = (
    "--chat-template",
    "--drain-timeout-s",
    "--generation-config",
    "--heartbeat-interval-ms",
    "--log-format",
    "--log-level",
    "--served-model-name",
)
# Flags that may hold secrets: values from a file or a variable stay off the processes' command lines.
SECRET = {"--api-key": "TANDEM_API_KEY", "--kv-tier": "TANDEM_KV_TIER"}
COMMON = (
    *("--prefills", "--decodes", "--model", "--num-threads", "--host", "--port", "--detokenizers"),
    *("--policy", "--api-key-file", "--ssl-certfile", "--tool-call-parser", "--log-level"),
    *("--dtype", "--device", "--engine", "--verbose"),
)


def build_parser() -> Parser:
    """Return the parser: the command's own flags, the router's, and the flags that only nodes have."""
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
        metavar="MODEL",
        help="a directory, a GGUF file or a name on the Hugging Face Hub; without it, the embedded model",
    )
    add(
        "--num-threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of torch in each node; 0: the cores, shared evenly",
    )
    add("-v", "--verbose", action="store_true", help="show the log here instead of in a file")
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
        argv: The arguments of this command, already validated.
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
    """Return the environment variable that passes a flag's values to a process; empty without values."""
    values = [words[0].partition("=")[2] for words in lower if words[0].startswith(f"{flag}=")]
    return {SECRET[flag]: shlex.join(values)} if values else {}


def _forwarded(flags: Sequence[list[str]]) -> tuple[list[str], list[str]]:
    """Return the arguments for every node, and the arguments for the router."""
    own = {"--prefills", "--decodes", "--model", "--model-path", "--num-threads", "-v", "--verbose"}
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
    """Return free loopback ports outside the kernel's ephemeral range."""
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
    # Each process has its flags as arguments; inherited variables would also set the router's flags on nodes.
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
    console, names = Console(highlight=False), [each.name for each in processes]
    with (
        contextlib.nullcontext() if args.verbose else log_file() as log,
        Screen(console, names, log) as screen,
    ):
        cluster = Cluster(processes, screen)
        status: int = uvloop.run(cluster.run(router.host, router.port, router.http.scheme))
    return status


def log_file() -> TextIO:
    """Open a new file that only this user can read."""
    fd, path = tempfile.mkstemp(prefix="tandem-up-", suffix=".log")
    os.close(fd)
    return open(path, "w", buffering=1, encoding="utf-8")


class Screen:
    """What the terminal shows: with a log file, how each process starts, and later only warnings and errors.

    Args:
        names: Names of the processes, in the order they start.
        log: The file that gets every line; None: the terminal gets them.
    """

    def __init__(self, console: Console, names: Sequence[str], log: TextIO | None) -> None:
        self.console, self.log = console, log
        self._width, self._began_s = max(map(len, names)), time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        is_shown = log is not None and console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not is_shown)
        self._rows = {
            name: self._progress.add_task(f"{name:<{self._width}} starts") for name in names
        }
        self._colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._progress.stop()

    def line(self, name: str, said: Text) -> None:
        """Take a line that a process wrote."""
        if self.log is not None:
            self.log.write(f"{name:<{self._width}} │ {said.plain}\n")
            if ROUTINE.match(said.plain):
                if (found := DOWNLOAD.search(said.plain)) is not None:
                    does = f"downloads: {found[1]} %" if found[1] else "starts"
                    row = self._rows[name]
                    self._progress.update(row, description=f"{name:<{self._width}} {does}")
                return
        prefix = (f"{name:<{self._width}} │ ", self._colours[name])
        self.console.print(Text.assemble(prefix, said), soft_wrap=True)

    def ready(self, name: str) -> None:
        """Show that a process serves."""
        if self.log is not None:
            self._progress.remove_task(self._rows[name])
            took_s = time.monotonic() - self._began_s
            self.console.print(f"{name:<{self._width}}   ready after {took_s:.1f} s")

    def banner(self, url: str) -> None:
        """Show what to do with a cluster that serves."""
        self._progress.stop()
        log = "" if self.log is None else f"  log: {self.log.name}\n"
        self.console.print(
            Text.from_markup(
                f"\n[bold green]Tandem serves at {url}[/]  (Ctrl-C stops it)\n\n"
                f"  curl -s {url}/generate -H 'Content-Type: application/json' \\\n"
                '       -d \'{"text": "The capital of France is", "max_new_tokens": 32}\'\n\n'
                f"  What it does: {url} in a browser, or tandem top {url}\n"
                f"  OpenAI clients: base_url={url}/v1   health: {url}/health   "
                f"metrics: {url}/metrics\n{log}"
            ),
            soft_wrap=True,
        )


class Cluster:
    """The processes of one `tandem up`, from start to stop."""

    def __init__(self, cluster: Sequence[Member], screen: Screen) -> None:
        self._members = cluster
        self._screen = screen
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self, host: str, port: int, scheme: str) -> int:
        """Start all processes, announce readiness, wait for a signal or an exit, stop all processes.

        Returns:
            0 after a signal; else the status of the first process that exited, at least 1.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._member(member)) for member in self._members]
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
        if self._stopping.is_set():  # a second signal kills
            self._kill()
        self._stopping.set()

    async def _member(self, member: Member) -> None:
        # A separate session: Ctrl-C reaches only the parent, which then stops its children in order.
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
        refusal, says = "", f"tandem {member.argv[0]}: error: "
        async for line in process.stdout:
            said = Text.from_ansi(line.decode(errors="replace").rstrip())
            refusal = said.plain.removeprefix(says) if said.plain.startswith(says) else refusal
            self._screen.line(member.name, said)
        status = await process.wait()
        if not self._stopping.is_set():
            self._stopping.set()  # only the first exit is reported
            self._status = max(status, 1)  # negative after a signal
            reason = refusal or f"ended with status {status}"
            where = "" if self._screen.log is None else f"; log: {self._screen.log.name}"
            sys.stderr.write(
                f"tandem up: error: {member.name}: {reason}; stopping the rest{where}\n"
            )

    async def _announce(self, host: str, port: int, scheme: str) -> None:
        shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host
        url = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"
        # The certificate is not verified: it belongs to our own child and names the host that clients use.
        connector = aiohttp.TCPConnector(ssl=False)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for member in self._members:
                own = url if member.name == ROUTER else f"http://127.0.0.1:{member.port}"
                tasks.create_task(self._wait_ready(member.name, session, own))
        self._screen.banner(url)

    async def _wait_ready(self, name: str, session: aiohttp.ClientSession, url: str) -> None:
        while not await _is_healthy(session, url):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(HEALTH_INTERVAL_S)
        self._screen.ready(name)

    async def _stop(self) -> None:
        """Terminate the router, then the nodes, so that no request meets a stopped node; kill them after a timeout."""
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
