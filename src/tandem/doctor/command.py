"""Runs `tandem doctor`: performs the checks that the flags select and prints the report."""

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from tandem.doctor import link, machine
from tandem.doctor.config import DoctorConfig, parse
from tandem.doctor.nodes import ask, check_nodes
from tandem.doctor.report import Finding, Report, TransportRow, render
from tandem.engine.config import EngineConfig
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import known
from tandem.telemetry.log import configure
from tandem.telemetry.version import package_version
from tandem.wire.keys import cluster_key, is_loopback


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    # SIGTERM raises SystemExit, so that the processes of the link test end with their parent.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    configure("error")
    config = parse(argv)
    report = examine(config)
    if config.is_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        render(report)
    if config.mode == "listen":
        sys.stdout.flush()
        listen(config)
    return 0 if report.is_well else 1


def examine(config: DoctorConfig) -> Report:
    """Run the checks that the command line selects.

    Raises:
        ConfigInvalid: A flag or the cluster's secret is missing or invalid; the message names the remedy.
    """
    rows: list[TransportRow] = []
    if config.mode == "nodes":
        findings = check_nodes(asyncio.run(ask(config.nodes)))
    else:
        if (address := config.listen or config.connect) is not None:
            # Reject a missing secret now, not after a minute of checks.
            cluster_key(address.host, is_insecure=config.is_insecure, flag=f"--{config.mode}")
        findings = check_machine(config)
        if config.is_measuring and config.mode != "listen":
            rows = _measure(config, findings)
    statuses = [each.status for each in findings] + [row.status for row in rows]
    return Report(
        version=package_version(),
        host=socket.gethostname(),
        mode=config.mode,
        is_well="failed" not in statuses,
        transports=rows,
        findings=findings,
    )


def check_machine(config: DoctorConfig) -> list[Finding]:
    """Return the findings on this machine, for a node with the default pool."""
    pool_bytes, rdma = EngineConfig().kv_bytes, list(machine.check_rdma())
    needs_shm = not config.backends or "shm" in config.backends
    return [
        *machine.check_cpu(),
        *machine.check_memory(pool_bytes, needs_shm=needs_shm),
        *machine.check_limits(pool_bytes, has_rdma=rdma[0].status != "missing"),
        *rdma,
        *machine.check_gpus(),
    ]


def _measure(config: DoctorConfig, findings: list[Finding]) -> list[TransportRow]:
    host, peer = "127.0.0.1", config.connect
    if peer is not None:
        findings.append(link.reach(peer))
        if findings[-1].status == "failed":
            return []
        host = _own_host(peer.host)
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as scratch:
        directory = config.directory or (scratch if peer is None else "")
        where = TransportConfig(host=host, interface=config.interface, directory=directory)
        for name in config.backends or known():
            _progress(f"measuring {name}")
            asked = link.Link(name=name, config=where, peer=peer, is_insecure=config.is_insecure)
            rows.append(link.measure(asked))
    return link.judge(rows, config.backends)


def _own_host(peer: str) -> str:
    """Return the address where transports listen: loopback for a loopback peer, else all addresses."""
    if is_loopback(peer):
        return peer
    return "::" if ":" in peer else "0.0.0.0"


def listen(config: DoctorConfig) -> None:
    """Run prefill's end of a link test until Ctrl-C.

    Raises:
        ConfigInvalid: The address cannot be bound, or requires a secret.
    """
    assert config.listen is not None
    host, port = config.listen.host, config.listen.port
    where = TransportConfig(host=host, interface=config.interface, directory=config.directory)
    allowed = link.usable(config.backends or known(), where)
    source = link.Source(host, port, allowed, is_insecure=config.is_insecure)
    try:
        sys.stderr.write(link.listening_words(host, source.port) + "\n")
        sys.stderr.flush()
        source.serve()
    finally:
        source.close()


def _progress(step: str) -> None:
    """Print the current step if standard error is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{step} …\n")
