"""The flags of `tandem doctor`: read and checked, nothing done."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from tandem.engine.config import EngineConfig
from tandem.kvtransfer.transports.registry import known
from tandem.router.config import node_url
from tandem.wire.command_line import HelpFormatter, Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import bare_host
from tandem.wire.options import add_flags, read_flags

# Of the node: whether a model fits depends on these.
ENGINE_FIELDS = (
    *("dtype", "kv_cache_dtype", "page_size", "tp_size"),
    *("device", "trust_remote_code", "max_total_tokens"),
)
EXAMPLES = """\
between the two ends of a link (KV flows one way; swap the ends for the other):
  host A, where prefill is to run     tandem doctor --listen 10.0.0.5:9000
  host B, where decode is to run      tandem doctor --connect 10.0.0.5:9000
  (both with TANDEM_CLUSTER_KEY set to one secret, as nodes have it)

before serving:
  tandem doctor --quick                                   this machine, and its transports
  tandem doctor --model /models/llama --max-total-tokens 200000 --no-measure
  tandem doctor --transfer-backend nixl                   fails unless nixl works

while serving:
  tandem doctor --node http://10.0.0.5:7000 --node http://10.0.0.6:7001

exit status: 0 all that is needed works; 1 something does not; 2 wrong usage, or a --model that no node
would serve; 130 stopped by Ctrl-C.
What a flag names is needed. Without --transfer-backend at least one transport has to work.
A status of `missing` is no fault: nothing that was asked for needs it.

More: tandem docs doctor; tandem docs transports
"""

# What nodes listen on when they are told nothing.
DEFAULT_PORTS = ((7000, "prefill"), (7001, "decode"), (8000, "the router"))
DEFAULT_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, slots=True)
class Address:
    """A host, an IPv6 one without brackets, and a port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """What `tandem doctor` was told.

    Attributes:
        backends: Transports that are measured and have to work; none: all there are, of which one has to.
        ports: (number, what it is for, whether the user named it).
        engine: Of the node that would be started; `model_dir` is what the user gave, empty for nothing.
    """

    mode: Literal["local", "listen", "connect", "nodes"]
    address: Address
    nodes: tuple[str, ...]
    backends: tuple[str, ...]
    is_quick: bool
    is_measuring: bool
    is_json: bool
    is_insecure: bool
    interface: str
    directory: str
    host: str
    ports: tuple[tuple[int, str, bool], ...]
    engine: EngineConfig


def parse(argv: Sequence[str]) -> DoctorConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser().parse_args(argv)
    mode, address = _mode(args)
    return DoctorConfig(
        mode=mode,
        address=address,
        nodes=tuple(node_url(url) for url in args.node),
        backends=_backends(args.transfer_backend),
        is_quick=args.quick,
        is_measuring=not args.no_measure,
        is_json=args.json,
        is_insecure=args.insecure,
        interface=args.interface,
        directory=args.directory,
        host=bare_host("--host", args.host),
        ports=_ports(args),
        engine=_engine(args),
    )


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem doctor",
        description="Check this machine, the link between two hosts, or running nodes: what works, how fast KV "
        "moves, what is missing, and how to get it.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    where = parser.add_argument_group("what to check (default: this machine)")
    _add_places(where.add_mutually_exclusive_group())
    _add_measuring(parser.add_argument_group("measuring"))
    _add_node(parser.add_argument_group("the node that is to be started (its own flags)"))
    add_flags(parser, EngineConfig, only=ENGINE_FIELDS)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _add_places(group: argparse._MutuallyExclusiveGroup) -> None:
    add = group.add_argument
    add(
        "--listen",
        metavar="[HOST:]PORT",
        help="be the sending end of a link test until Ctrl-C (default host: 127.0.0.1; port 0: any free one)",
    )
    add("--connect", metavar="HOST:PORT", help="measure the link from a host that listens")
    add(
        "--node",
        action="append",
        default=[],
        metavar="URL",
        help="check a running node; of several, also which can pair",
    )


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--transfer-backend",
        default="auto",
        metavar="NAMES",
        help="transports to measure, joined with commas, which have to work; auto: all, of which one has to",
    )
    add("--quick", action="store_true", help="measure fewer and smaller hand-offs")
    add("--no-measure", action="store_true", help="check the machine only")
    add(
        "--interface",
        default="",
        metavar="NAME",
        help="network interface, for transports that take one",
    )
    add(
        "--directory",
        default="",
        metavar="DIR",
        help="directory that both ends share, for transports that go through files",
    )
    add(
        "--insecure",
        action="store_true",
        help="measure beyond loopback without TANDEM_CLUSTER_KEY: trust the network",
    )


def _add_node(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", "--model-path", default="", metavar="PATH", help="check whether it fits")
    add("--host", default="127.0.0.1", help="address on which it is to listen")
    add(
        "--port",
        type=int,
        action="append",
        default=[],
        help="port that has to be free; repeat for several (default: check 7000, 7001 and 8000)",
    )
    add("--bootstrap-port", type=int, help="port that has to be free (default: check 8998)")


def _mode(
    args: argparse.Namespace,
) -> tuple[Literal["local", "listen", "connect", "nodes"], Address]:
    if args.listen is not None:
        return "listen", _address("--listen", args.listen, "127.0.0.1")
    if args.connect is not None:
        return "connect", _address("--connect", args.connect, "")
    return "nodes" if args.node else "local", Address("127.0.0.1", 0)


def _address(flag: str, text: str, default_host: str) -> Address:
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") or default_host
    is_bracketed = host.startswith("[") and host.endswith("]")
    least = 0 if default_host else 1
    is_port = port.isascii() and port.isdigit() and least <= int(port) <= 65535
    if not bare or not is_port or (":" in bare and not is_bracketed):
        raise ConfigInvalid(
            f"{flag} {text}: give {'[HOST:]PORT' if default_host else 'HOST:PORT'}, an IPv6 host in "
            "brackets"
        )
    return Address(bare_host(flag, bare), int(port))


def _backends(names: str) -> tuple[str, ...]:
    if names == "auto":
        return ()
    given = tuple(names.split(","))
    if unknown := [name for name in given if name not in known()]:
        raise ConfigInvalid(
            f"--transfer-backend: no transport {unknown[0]!r} is installed; there are: "
            + ", ".join(known())
        )
    return given


def _ports(args: argparse.Namespace) -> tuple[tuple[int, str, bool], ...]:
    given = [(number, "--port", True) for number in args.port]
    if args.bootstrap_port is not None:
        bootstrap = (args.bootstrap_port, "--bootstrap-port", True)
    else:
        bootstrap = (DEFAULT_BOOTSTRAP_PORT, "grants (--bootstrap-port)", False)
    found = [*(given or [(*port, False) for port in DEFAULT_PORTS]), bootstrap]
    for number, what, _ in found:
        if not 1 <= number <= 65535:
            raise ConfigInvalid(f"{what} is {number}: give 1 to 65535")
    return tuple(found)


def _engine(args: argparse.Namespace) -> EngineConfig:
    config = read_flags(EngineConfig, args, model_dir=args.model)
    return msgspec.convert(msgspec.structs.asdict(config), EngineConfig)
