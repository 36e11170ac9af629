"""Runs `tandem doctor`: reads the flags, performs the checks that they select and prints the findings."""

import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from tandem.engine.config import EngineOptions
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import known
from tandem.settings.flags import Flag, add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.telemetry.log import configure
from tandem.tools.doctor import link, machine
from tandem.tools.doctor.link import HostPort
from tandem.tools.doctor.report import Finding, render
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import bare_host
from tandem.wire.keys import cluster_key, is_loopback

EXAMPLES = """\
between two hosts (KV flows from A to B; swap the hosts to measure the other direction):
  host A, for prefill     tandem doctor --listen 10.0.0.5:9000
  host B, for decode      tandem doctor --connect 10.0.0.5:9000
  (on both hosts, set TANDEM_CLUSTER_KEY to the same secret, as for nodes)

on one host:
  tandem doctor                                           this machine, and its transports
  tandem doctor --transfer-backend nixl                   fails unless nixl works

exit status: 0 everything required works; 1 something required does not; 2 wrong usage; 130 stopped by Ctrl-C.
The transports of --transfer-backend are required. Without it, at least one transport must work.
`missing` means absent, but not required.

More: docs/doctor.md; docs/transports.md
"""


def _address(flag: str, default_host: str, text: str) -> HostPort:
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") or default_host
    is_bracketed = host.startswith("[") and host.endswith("]")
    least = 0 if default_host else 1
    is_port = port.isascii() and port.isdigit() and least <= int(port) <= 65535
    if not bare or not is_port or (":" in bare and not is_bracketed):
        raise ConfigInvalid(
            f"{flag} {text}: set {'[HOST:]PORT' if default_host else 'HOST:PORT'}, an IPv6 host in brackets"
        )
    return HostPort(bare_host(flag, bare), int(port))


def _backends(words: Sequence[str]) -> list[str]:
    backends = [name for names in words for name in names.split(",") if name != "auto"]
    if unknown := [name for name in backends if name not in known()]:
        raise ConfigInvalid(
            f"--transfer-backend: no transport {unknown[0]!r} is installed; installed are: "
            + ", ".join(known())
        )
    return backends


class DoctorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem doctor`.

    Attributes:
        backends: Transports to measure, which must all work. Empty: all installed ones; one must work.
    """

    listen: Annotated[
        HostPort | None,
        Flag(
            "--listen",
            metavar="[HOST:]PORT",
            help="run the sending end of a link test until Ctrl-C (default host: 127.0.0.1; port 0: any free port)",
            parse=partial(_address, "--listen", "127.0.0.1"),
        ),
    ] = None
    connect: Annotated[
        HostPort | None,
        Flag(
            "--connect",
            metavar="HOST:PORT",
            help="measure the link from a host that runs --listen",
            parse=partial(_address, "--connect", ""),
        ),
    ] = None
    backends: Annotated[
        tuple[str, ...],
        Flag(
            "--transfer-backend",
            metavar="NAMES",
            help="transports to measure, separated by commas, which must all work (default: all, of which one must work)",
            parse=_backends,
        ),
    ] = ()
    interface: Annotated[
        str,
        Flag(
            "--transfer-interface", "--interface", metavar="NAME", help="network interface of tcp"
        ),
    ] = ""
    devices: Annotated[
        tuple[str, ...],
        Flag(
            "--transfer-device",
            metavar="NAMES",
            help="RDMA devices of nixl, ucx and mooncake, separated by commas",
            parse=lambda lists: tuple(name for each in lists for name in each.split(",")),
        ),
    ] = ()
    is_insecure: Annotated[
        bool,
        Flag(
            "--insecure",
            help="measure between hosts without TANDEM_CLUSTER_KEY: trust the network",
        ),
    ] = False


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem doctor",
        description="Check this machine, or the link between two hosts: what works, how fast KV moves, what is "
        "missing, and how to get it.",
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
    if config.listen and config.connect:
        raise ConfigInvalid(
            "--listen and --connect are the two ends of one link: run each on its own host"
        )
    return config


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status.

    Raises:
        ConfigInvalid: A flag or the cluster's secret is missing or invalid; the message names the remedy.
    """
    # SIGTERM raises SystemExit, so that the processes of the link test end with their parent.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    configure("error")
    config = parse(argv)
    for flag, address in (("--listen", config.listen), ("--connect", config.connect)):
        if address is not None:  # reject a missing secret now, not after a minute of checks
            cluster_key(address.host, is_insecure=config.is_insecure, flag=flag)
    findings = check_machine(config.backends)
    if config.listen is None:
        findings += _check_transports(config)
    render(findings)
    if config.listen is not None:
        sys.stdout.flush()
        where = _settings(config, config.listen.host)
        link.listen(config.listen, config.backends, where, is_insecure=config.is_insecure)
    return int(any(each.status == "failed" for each in findings))


def _settings(config: DoctorConfig, host: str) -> TransportConfig:
    return TransportConfig(host=host, interface=config.interface, devices=config.devices)


def check_machine(backends: Sequence[str]) -> list[Finding]:
    """Return the findings on this machine, for a node with the default pool."""
    pool_bytes, rdma = EngineOptions().kv_bytes, list(machine.check_rdma())
    findings = list(machine.check_cpu())
    if not backends or "shm" in backends:
        findings.append(machine.check_shm(pool_bytes))
    findings += machine.check_limits(pool_bytes, has_rdma=rdma[0].status != "missing")
    return [*findings, *rdma, *machine.check_gpus()]


def _check_transports(config: DoctorConfig) -> list[Finding]:
    """Measure each transport, on this machine or from the peer, if it can be reached."""
    host, peer, found = "127.0.0.1", config.connect, list[Finding]()
    if peer is not None:
        found = [link.reach(peer)]
        if found[0].status == "failed":
            return found
        any_address = "::" if ":" in peer.host else "0.0.0.0"
        host = peer.host if is_loopback(peer.host) else any_address
    where = _settings(config, host)
    measured = []
    for name in config.backends or known():
        if sys.stderr.isatty():
            sys.stderr.write(f"measuring {name} …\n")
        test = link.LinkTest(name=name, config=where, peer=peer, is_insecure=config.is_insecure)
        measured.append(link.measure(test))
    return found + link.judge(measured, config.backends)
