"""`tandem up`: runs a cluster on this machine. Each process reads its part of the flags from a file."""

import os
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.cli.processes import ChildProcess, run, shown_url
from tandem.engine.config import EngineOptions
from tandem.frontend.http.server import listen
from tandem.node.config import NodeOptions
from tandem.node.flags import add_hidden_flags, split_argv
from tandem.node.flags import build_parser as build_node_parser
from tandem.node.machine import (
    DEFAULTS,
    is_cpu_build,
    num_cores,
    num_gpus,
    require_packages,
)
from tandem.router.arguments import build_parser as build_router_parser
from tandem.router.arguments import parse
from tandem.router.config import RouterConfig
from tandem.settings.flags import SettingInvalid, add_flags, check_flags, options_of, read_flags
from tandem.settings.parser import Parser
from tandem.wire.errors import ConfigInvalid

# Below the kernel's ephemeral ports (from 32768; net.ipv4.ip_local_port_range): no outgoing connection takes a
# port between the check and a node's start. Ports are drawn at random, so clusters that start together rarely collide.
PORTS = range(20_000, 32_000)
# Ports per node: the ranks of a prefill node use those after its first.
MAX_RANKS = 16
ROUTER = "router"

# Fields that this command sets for the router, and for nodes.
ROUTER_FIELDS = (
    "prefills",
    "bootstrap_ports",
    "decodes",
    "routers",
    "advertise_url",
    "tokenizer_dir",
)
NODE_FIELDS = ("model", "transfer.bootstrap_port", "transfer.port", "engine.num_threads")
# Flags that go to router and nodes. Other flags that both have go to the router only: they concern clients, which
# connect to the router.
SHARED = (
    "--chat-template",
    "--drain-timeout-s",
    "--generation-config",
    "--heartbeat-interval-ms",
    "--log-level",
    "--served-model-name",
)
# Settings of this command; the others are of its processes.
OWN = {"prefills", "decodes", "num-threads", "verbose", "log-format"}
COMMON = (
    *("--prefills", "--decodes", "--model", "--num-threads", "--host", "--port", "--workers"),
    *("--policy", "--api-key-file", "--ssl-certfile", "--tool-call-parser", "--log-level"),
    *("--dtype", "--device", "--engine", "--verbose"),
)


def build_parser() -> Parser:
    """Return the parser: the command's own flags, the router's, and the flags that only nodes have."""
    parser = Parser(
        "tandem up",
        common=COMMON,
        description="Start prefill nodes, decode nodes and a router on this machine.",
        epilog="HTTP flags, such as --api-key, go to the router; node flags, such as --page-size 32, go to every node; "
        "--log-level and a few others go to all. With --engine simulated --sim-kv none, nodes only simulate the timing of --sim-profile, "
        "so a cluster of any size fits one machine.\n\n"
        "More: docs/quickstart.md; docs/simulation.md",
    )
    add = parser.add_argument_group("cluster").add_argument
    add("--prefills", dest="num_prefills", type=int, default=1, metavar="N", help="prefill nodes")
    add("--decodes", dest="num_decodes", type=int, default=1, metavar="N", help="decode nodes")
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
        help="torch threads per node; 0: divide the cores evenly",
    )
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="show the log here instead of writing it to a file",
    )
    add_flags(parser, RouterConfig, without=ROUTER_FIELDS)
    without = (*ROUTER_FIELDS, *NODE_FIELDS, *_shared_fields())
    add_flags(parser, NodeOptions, without=without, defaults=DEFAULTS)
    add_hidden_flags(parser, without=_names(RouterConfig))
    return parser


def _shared_fields() -> list[str]:
    routers = _names(RouterConfig)
    nodes = options_of(NodeOptions)
    return [each.dest for each in nodes if not routers.isdisjoint(each.flag.names)]


def _names(config: type) -> set[str]:
    return {name for option in options_of(config) for name in option.flag.names}


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Settings and environment that place a node on GPUs."""

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def place_nodes(
    num_nodes: int, num_gpus: int, tp_size: int, fraction: float
) -> list[NodePlacement]:
    """Assign nodes to this machine's GPUs in turn. Nodes on the same GPU divide its memory.

    Args:
        fraction: Fraction of a GPU's memory for all nodes on it together.

    Raises:
        ConfigInvalid: Tensor-parallel nodes need more GPUs than there are.
    """
    if not num_gpus:
        return [NodePlacement()] * num_nodes
    if tp_size > 1:
        if num_nodes * tp_size > num_gpus:
            raise ConfigInvalid(
                f"{num_nodes} nodes with --tp {tp_size} take {num_nodes * tp_size} GPUs and there are {num_gpus}: "
                "use a smaller --tp, fewer nodes, or --device cpu"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if len(visible) >= num_gpus else [str(i) for i in range(num_gpus)]
        groups = [names[i * tp_size : (i + 1) * tp_size] for i in range(num_nodes)]
        return [
            NodePlacement({"device": "cuda"}, {"CUDA_VISIBLE_DEVICES": ",".join(group)})
            for group in groups
        ]
    gpus = [i % num_gpus for i in range(num_nodes)]
    sharing = Counter(gpus)
    return [
        NodePlacement(
            {
                "device": f"cuda:{gpu}",
                "mem-fraction-static": float(f"{fraction / sharing[gpu]:.3g}"),
            }
        )
        for gpu in gpus
    ]


def describe_placement(node: ChildProcess) -> str:
    """Return a line with the node's GPUs; empty if it was not placed on any."""
    if "device" not in node.settings:
        return ""
    gpus = node.environment.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        return f"{node.name:<11} on GPUs {gpus}"
    share = node.settings["mem-fraction-static"]
    return f"{node.name:<11} on {node.settings['device']}, with {share} of its memory"


def members(
    parser: Parser, argv: Sequence[str], ports: Sequence[int], num_cores: int, num_gpus: int = 0
) -> list[ChildProcess]:
    """Return the processes of a cluster in the order in which they start. The last is the router, still without URL.

    Args:
        argv: Arguments of this command, already validated.
        ports: Free ports: two per prefill node, one per decode node.
        num_gpus: Number of GPUs for `--device auto`.

    Raises:
        SettingInvalid: A value is invalid, or there are too few GPUs.
    """
    ours, vllm_args = split_argv(argv)
    args = parser.parse_args(ours)
    # The processes would report an invalid value with the path of their file.
    check_flags(RouterConfig, args)
    check_flags(NodeOptions, args)
    engine = read_flags(EngineOptions, args, prefix="engine.")
    of_nodes, of_router = _divided(parser.settings(args))
    num_nodes = args.num_prefills + args.num_decodes
    threads = args.num_threads or max(1, num_cores // num_nodes)
    is_model = vars(args)["simulation.engine"] != "simulated"
    auto_gpus = num_gpus if engine.device == "auto" and is_model else 0
    placements = iter(place_nodes(num_nodes, auto_gpus, engine.tp_size, engine.mem_fraction_static))
    ending = ["--", *vllm_args] if vllm_args else []
    free = iter(ports)
    nodes: list[ChildProcess] = []

    def add(role: str, index: int) -> list[str]:
        """Add a node; return its URL and ports for the router's settings."""
        port, place = next(free), next(placements)
        bootstrap = {"bootstrap-port": next(free)} if role == "prefill" else {}
        settings = {"port": port, **bootstrap, "num-threads": threads, "log-format": "json"}
        # The operator's settings override those of the placement.
        settings |= place.settings | of_nodes
        url = f"http://127.0.0.1:{port}"
        nodes.append(
            ChildProcess(f"{role}-{index}", [role, *ending], settings, url, place.environment)
        )
        return [url, *map(str, bootstrap.values())]

    prefills = [word for index in range(args.num_prefills) for word in add("prefill", index)]
    decodes = [word for index in range(args.num_decodes) for word in add("decode", index)]
    settings = {"prefill": prefills, "decode": decodes, "log-format": "json"}
    return [*nodes, ChildProcess(ROUTER, ["lb"], settings | of_router)]


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of every node, and those of the router."""
    routers = _names(RouterConfig)
    of_nodes: dict[str, Any] = {}
    of_router: dict[str, Any] = {}
    for name, value in settings.items():
        flag = f"--{name}"
        if name in OWN:
            continue
        if flag in routers:
            of_router[name] = value
        if flag not in routers or flag in SHARED:
            of_nodes[name] = value
    return of_nodes, of_router


def free_ports(num: int) -> list[int]:
    """Return free loopback ports below the ephemeral range; the ports after each are free too, for further ranks.

    Raises:
        ConfigInvalid: There are too few free ports.
    """
    found, taken = list[int](), set[int]()
    for first in random.sample(PORTS, len(PORTS)):
        ports = range(first, first + MAX_RANKS)
        if taken.isdisjoint(ports) and all(map(_is_free, ports)):
            found.append(first)
            taken.update(ports)
        if len(found) == num:
            return found
    raise ConfigInvalid(
        f"there are no {num} free ports from {PORTS.start} on; start fewer nodes, or stop other processes"
    )


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
    if args.num_prefills < 1 or args.num_decodes < 1:
        parser.error("--prefills and --decodes must be at least 1")
    if vars(args)["simulation.engine"] != "vllm":
        require_packages()
    gpus = 0 if is_cpu_build() else num_gpus()
    # Each process reads its settings from a file; inherited variables would set the router's flags on nodes too.
    others = (build_node_parser("tandem up", "prefill", "", 0), build_router_parser())
    with tempfile.TemporaryDirectory(prefix="tandem-up-") as directory:
        try:
            ports = free_ports(2 * args.num_prefills + args.num_decodes)
            children = members(parser, argv, ports, num_cores(), gpus)
            for variable in set().union(*(each.variables() for each in (parser, *others))):
                os.environ.pop(variable, None)
            *nodes, last = (each.with_file(directory) for each in children)
            router = parse(last.argv[1:])
            listen(router.host, router.port).close()  # before nodes load their model
        except SettingInvalid as error:
            parser.error(error.message)
        if router.http.tls is not None and router.http.tls.ca_certs:
            parser.error(
                "--ssl-ca-certs: this command has no client certificate, which it would need to check its own "
                "router's health; start prefill, decode and lb one by one"
            )
        if gpus and vars(args)["engine.device"] == "auto":
            sys.stdout.writelines(f"{line}\n" for line in map(describe_placement, nodes) if line)
        drain_s = router.drain_timeout_s + router.shutdown_delay_s
        url = shown_url(router.http.scheme, router.host, router.port)
        processes = [*nodes, replace(last, url=url)]
        return run("up", processes, drain_s, is_verbose=args.verbose, log_format=args.log_format)
