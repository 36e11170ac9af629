"""`tandem up`: a whole cluster on this machine. From its flags to the flags of each process."""

import os
import random
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.engine.config import EngineConfig
from tandem.frontend.server import listen
from tandem.node.config import NodeConfig
from tandem.node.flags import add_hidden_flags, split_argv
from tandem.node.flags import build_parser as build_node_parser
from tandem.node.machine import DEFAULTS, is_cpu_build, num_gpus
from tandem.processes import Member, run, shown_url
from tandem.router.arguments import build_parser as build_router_parser
from tandem.router.arguments import parse
from tandem.router.config import RouterConfig
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import add_flags, options_of, read_flags

# Below the kernel's ephemeral ports (from 32768; net.ipv4.ip_local_port_range): no outgoing connection takes a
# port between the check and a node's start. Drawn at random, so that clusters started together rarely collide.
PORTS = range(20_000, 32_000)
# The ranks of a prefill have the ports after its first.
MOST_RANKS = 16
ROUTER = "router"

# Options that this command sets for each process.
OWN = ("prefills", "bootstrap_ports", "decodes", "routers", "advertise_url", "tokenizer_dir")
OWN_OF_NODES = ("model", "transfer.bootstrap_port", "engine.num_threads")
# Flags for router and nodes. Other flags that both have go to the router alone: they are about clients, which reach
# only the router.
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
        "node; --log-level and a few others to all. Here --local-prefill-threshold is 0: every prompt is computed by a "
        "prefill node. With --engine simulated --sim-kv none nodes only take the "
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
    of_nodes = (*OWN, *OWN_OF_NODES, *_shared_fields())
    add_flags(parser, NodeConfig, without=of_nodes, defaults=DEFAULTS)
    add_hidden_flags(parser, without=_names(RouterConfig))
    return parser


def _shared_fields() -> list[str]:
    routers = _names(RouterConfig)
    nodes = options_of(NodeConfig)
    return [each.dest for each in nodes if not routers.isdisjoint(each.flag.names)]


def _names(config: type) -> set[str]:
    return {name for option in options_of(config) for name in option.flag.names}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node runs: flags and environment that put it there."""

    flags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def places(num_nodes: int, num_gpus: int, tp_size: int, fraction: float) -> list[Place]:
    """Return a place for each node on this machine's GPUs, one after the other; nodes that share one split its memory.

    Args:
        fraction: Of a GPU's memory, for all nodes on it together.

    Raises:
        ConfigInvalid: The GPUs are too few for nodes that take several each.
    """
    if not num_gpus:
        return [Place()] * num_nodes
    if tp_size > 1:
        if num_nodes * tp_size > num_gpus:
            raise ConfigInvalid(
                f"{num_nodes} nodes with --tp {tp_size} take {num_nodes * tp_size} GPUs and there are {num_gpus}: "
                "give a smaller --tp, or --device cpu"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if len(visible) >= num_gpus else [str(i) for i in range(num_gpus)]
        groups = [names[i * tp_size : (i + 1) * tp_size] for i in range(num_nodes)]
        return [
            Place(["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ",".join(group)})
            for group in groups
        ]
    gpus = [i % num_gpus for i in range(num_nodes)]
    sharing = Counter(gpus)
    return [
        Place(
            ["--device", f"cuda:{gpu}", "--mem-fraction-static", f"{fraction / sharing[gpu]:.3g}"]
        )
        for gpu in gpus
    ]


def stated(node: Member) -> str:
    """Return where a node was placed, in words; empty if it was not."""
    flags = dict(zip(node.argv, node.argv[1:], strict=False))
    if "--device" not in flags:
        return ""
    gpus = node.environment.get("CUDA_VISIBLE_DEVICES")
    share = f", with {flags['--mem-fraction-static']} of its memory"
    return f"{node.name:<11} on " + (f"GPUs {gpus}" if gpus else flags["--device"] + share)


def members(
    parser: Parser, argv: Sequence[str], ports: Sequence[int], num_cores: int, num_gpus: int = 0
) -> list[Member]:
    """Return the processes of a cluster, in the order they start; the last is the router, yet without its URL.

    Args:
        argv: The arguments of this command, already validated.
        ports: Free ports: two for each prefill, one for each decode.
        num_gpus: GPUs for `--device auto`.

    Raises:
        ConfigInvalid: The GPUs are too few.
    """
    ours, vllm_args = split_argv(argv)
    args = parser.parse_args(ours)
    lower, own = parser.flags(ours)
    secrets = {flag: _variable(flag, lower) for flag in SECRET}
    shown = [flag for flag in lower if flag[0].partition("=")[0] not in SECRET]
    of_nodes, of_router = _forwarded([*shown, *own])
    num_nodes = args.prefills + args.decodes
    threads = args.num_threads or max(1, num_cores // num_nodes)
    engine = read_flags(EngineConfig, args, prefix="engine.")
    is_model = vars(args)["simulation.engine"] != "simulated"
    # The places stand before the operator's flags, which win.
    auto_gpus = num_gpus if engine.device == "auto" and is_model else 0
    on = iter(places(num_nodes, auto_gpus, engine.tp_size, engine.mem_fraction_static))
    common = ["--num-threads", str(threads), "--log-format", "console", *of_nodes]
    if args.model is not None:
        common += ["--model", args.model]
    free, tiers = iter(ports), secrets["--kv-tier"]
    nodes: list[Member] = []

    def add(role: str, index: int) -> list[str]:
        """Add a node; return how the router is given it."""
        port, place = str(next(free)), next(on)
        url, bootstrap = f"http://127.0.0.1:{port}", [str(next(free))] if role == "prefill" else []
        own_flags = [role, "--port", port, *(["--bootstrap-port", *bootstrap] if bootstrap else [])]
        environment = tiers | place.environment
        argv = [*own_flags, *place.flags, *common, *(["--", *vllm_args] if vllm_args else [])]
        nodes.append(Member(f"{role}-{index}", argv, url, environment))
        return [url, *bootstrap]

    prefills = [word for index in range(args.prefills) for word in add("prefill", index)]
    decodes = [word for index in range(args.decodes) for word in add("decode", index)]
    # Before the operator's flags, which win: a first request takes the whole path, however short its prompt is.
    defaults = ["--log-format", "console", "--local-prefill-threshold", "0"]
    router = ["lb", "--prefill", *prefills, "--decode", *decodes, *defaults, *of_router]
    return [*nodes, Member(ROUTER, router, environment=secrets["--api-key"])]


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
    """Return free loopback ports outside the kernel's ephemeral range, with free ones after each for more ranks.

    Raises:
        ConfigInvalid: There are not so many.
    """
    found, taken = list[int](), set[int]()
    for first in random.sample(PORTS, len(PORTS)):
        ports = range(first, first + MOST_RANKS)
        if taken.isdisjoint(ports) and all(map(_is_free, ports)):
            found.append(first)
            taken.update(ports)
        if len(found) == num:
            return found
    raise ConfigInvalid(f"there are no {num} free ports from {PORTS.start} on")


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
    args = parser.parse_args(split_argv(argv)[0])
    if args.prefills < 1 or args.decodes < 1:
        parser.error("--prefills and --decodes are at least 1")
    gpus = 0 if is_cpu_build() else num_gpus()
    # Each process has its flags as arguments; inherited variables would also set the router's flags on nodes.
    others = (build_node_parser("tandem up", "prefill", "", 0), build_router_parser())
    try:
        ports = free_ports(2 * args.prefills + args.decodes)
        *nodes, last = members(parser, argv, ports, os.cpu_count() or 1, gpus)
        for variable in set().union(*(each.variables() for each in (parser, *others))):
            os.environ.pop(variable, None)
        router = parse(last.argv[1:])
        listen(router.host, router.port).close()  # before nodes load their model
    except ConfigInvalid as error:
        parser.error(error.message)
    if router.http.tls is not None and router.http.tls.ca_certs:
        parser.error(
            "--ssl-ca-certs: this command has no certificate with which to ask its own router whether it "
            "serves; start prefill, decode and lb one by one"
        )
    if gpus and vars(args)["engine.device"] == "auto":
        sys.stdout.writelines(f"{line}\n" for line in map(stated, nodes) if line)
    drain_s = router.drain_timeout_s + router.shutdown_delay_s
    url = shown_url(router.http.scheme, router.host, router.port)
    return run("up", [*nodes, replace(last, url=url)], drain_s, is_verbose=args.verbose)
