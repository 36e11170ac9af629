"""The flags of `tandem doctor`, parsed and validated."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec

from tandem.kvtransfer.transports.registry import known
from tandem.router.config import node_url
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import bare_host
from tandem.wire.options import Flag, add_flags, read_flags

EXAMPLES = """\
between the two ends of a link (KV flows one way; swap the ends for the other):
  host A, where prefill is to run     tandem doctor --listen 10.0.0.5:9000
  host B, where decode is to run      tandem doctor --connect 10.0.0.5:9000
  (both with TANDEM_CLUSTER_KEY set to one secret, as nodes have it)

before serving:
  tandem doctor                                           this machine, and its transports
  tandem doctor --transfer-backend nixl                   fails unless nixl works

while serving:
  tandem doctor --node http://10.0.0.5:7000 --node http://10.0.0.6:7001

exit status: 0 all that is needed works; 1 something does not; 2 wrong usage; 130 stopped by Ctrl-C.
What a flag names is needed. Without --transfer-backend at least one transport has to work.
A status of `missing` is no fault: nothing that was asked for needs it.

More: tandem docs doctor; tandem docs transports
"""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port; an IPv6 host has no brackets."""

    host: str
    port: int


def _address(flag: str, default_host: str, text: str) -> Address:
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


def _backends(words: Sequence[str]) -> list[str]:
    given = [name for names in words for name in names.split(",") if name != "auto"]
    if unknown := [name for name in given if name not in known()]:
        raise ConfigInvalid(
            f"--transfer-backend: no transport {unknown[0]!r} is installed; there are: "
            + ", ".join(known())
        )
    return given


class DoctorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem doctor`.

    Attributes:
        backends: Transports to measure, which must all work. Empty: all installed ones; one must work.
    """

    listen: Annotated[
        Address | None,
        Flag(
            "--listen",
            group="what to check (default: this machine)",
            metavar="[HOST:]PORT",
            help="be the sending end of a link test until Ctrl-C (default host: 127.0.0.1; port 0: any free one)",
            parse=partial(_address, "--listen", "127.0.0.1"),
        ),
    ] = None
    connect: Annotated[
        Address | None,
        Flag(
            "--connect",
            metavar="HOST:PORT",
            help="measure the link from a host that listens",
            parse=partial(_address, "--connect", ""),
        ),
    ] = None
    nodes: Annotated[
        tuple[str, ...],
        Flag(
            "--node",
            help="check a running node; of several, also which can pair",
            parse=lambda urls: tuple(map(node_url, urls)),
        ),
    ] = ()
    backends: Annotated[
        tuple[str, ...],
        Flag(
            "--transfer-backend",
            group="measuring",
            metavar="NAMES",
            help="transports to measure, joined with commas, which have to work (default: all, of which one has to)",
            parse=_backends,
        ),
    ] = ()
    is_measuring: Annotated[bool, Flag("--no-measure", help="check the machine only")] = True
    interface: Annotated[
        str, Flag("--interface", help="network interface, for transports that take one")
    ] = ""
    directory: Annotated[
        str,
        Flag(
            "--directory",
            help="directory that both ends share, for transports that go through files",
        ),
    ] = ""
    is_insecure: Annotated[
        bool,
        Flag(
            "--insecure",
            help="measure beyond loopback without TANDEM_CLUSTER_KEY: trust the network",
        ),
    ] = False
    is_json: Annotated[
        bool, Flag("--json", group="output", help="print one JSON object instead of tables")
    ] = False

    @property
    def mode(self) -> Literal["local", "listen", "connect", "nodes"]:
        """The target of the check, as the flags select it."""
        if self.listen is not None:
            return "listen"
        if self.connect is not None:
            return "connect"
        return "nodes" if self.nodes else "local"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem doctor",
        description="Check this machine, the link between two hosts, or running nodes: what works, how fast KV "
        "moves, what is missing, and how to get it.",
        epilog=EXAMPLES,
    )
    add_flags(parser, DoctorConfig)
    return parser


def parse(argv: Sequence[str]) -> DoctorConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value is invalid; the message names the remedy.
        SystemExit: argparse rejects a flag (2) or prints --help (0).
    """
    config = read_flags(DoctorConfig, build_parser().parse_args(argv))
    if sum(map(bool, (config.listen, config.connect, config.nodes))) > 1:
        raise ConfigInvalid("--listen, --connect and --node: give one of them")
    return config
