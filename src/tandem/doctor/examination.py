"""One examination: gathers, measures, has it judged, and puts the report together."""

import asyncio
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.doctor import gather
from tandem.doctor.arguments import DoctorConfig
from tandem.doctor.checks import check
from tandem.doctor.facts import Facts, Model
from tandem.doctor.judging import judge, link_limits
from tandem.doctor.measuring import (
    QUICK,
    THOROUGH,
    Effort,
    FarEnd,
    ReceivingProbe,
    measure_all,
    measure_limits,
)
from tandem.doctor.pair import HEARTBEAT, Listening, RemoteFarEnd
from tandem.doctor.pair_messages import Begin, Finished, ToListening, Welcome
from tandem.doctor.probe import Where
from tandem.doctor.render import printable
from tandem.doctor.report import Finding, Report
from tandem.kvtransfer.transports.registry import AUTO, known
from tandem.kvtransfer.transports.tcp_listener import address_toward
from tandem.telemetry.version import package_version
from tandem.wire.channel import Inbox, tcp_address
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.keys import cluster_key, is_loopback

WILDCARDS = ("0.0.0.0", "::")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What was measured, from whom to whom, in pages of which size."""

    finished: Finished
    writer: str
    receiver: str
    page_bytes: int


def examine(config: DoctorConfig, progress: Progress) -> Report:
    """Do what the command line asks for.

    Args:
        progress: Told what is being done.

    Raises:
        ConfigInvalid: It cannot be done this way; the sentence says what to give.
    """
    if config.mode == "nodes":
        progress("asking the nodes")
        return _report(config, _ask_nodes(config.nodes))
    progress("looking at this machine")
    facts = _facts(config)
    findings = check(facts)
    if not config.is_measuring:
        return _report(config, findings)
    try:
        match config.mode:
            case "listen":
                measurement, versions = _listen(config, progress)
                findings.append(versions)
            case "connect":
                measurement, versions = _connect(config, facts, progress)
                findings.append(versions)
            case _:
                measurement = _measure_here(config, facts, progress)
    except ConfigInvalid:
        raise
    except TandemError as error:
        return _report(config, [*findings, _broken_link(config, error)])
    return _report(config, findings, measurement)


def _report(
    config: DoctorConfig, findings: list[Finding], measurement: _Measurement | None = None
) -> Report:
    statuses = [finding.status for finding in findings]
    report = Report(
        version=package_version(),
        host=socket.gethostname(),
        mode=config.mode,
        is_well="failed" not in statuses,
        findings=findings,
    )
    if measurement is None:
        return report
    statuses += [row.status for row in measurement.finished.transports]
    return Report(
        version=report.version,
        host=report.host,
        mode=report.mode,
        is_well="failed" not in statuses,
        findings=findings,
        between=[measurement.writer, measurement.receiver],
        page_bytes=measurement.page_bytes,
        limits=measurement.finished.limits,
        transports=measurement.finished.transports,
    )


def _ask_nodes(urls: Sequence[str]) -> list[Finding]:
    # Here, because HTTP takes as long to import as all the rest, and only this needs it.
    from tandem.doctor.nodes import ask
    from tandem.doctor.pairing import check_nodes

    return check_nodes(asyncio.run(ask(urls)))


def _facts(config: DoctorConfig) -> Facts:
    wanted_python, packages = gather.packages()
    model = _model(config)
    return Facts(
        python=gather.python(),
        wanted_python=wanted_python,
        packages=packages,
        cpu=gather.cpu(),
        memory=gather.memory(),
        limits=gather.limits(),
        rdma=gather.rdma(),
        gpus=gather.gpus(),
        network=gather.network(),
        ports=gather.ports(config.host, config.ports),
        pool_bytes=config.engine.kv_bytes if model is None else model.pool_bytes,
        # As `tandem.node.transfer` decides it; a pool in GPU memory is nowhere else.
        needs_shm=config.engine.device == "cpu"
        and (not config.backends or "shm" in config.backends),
        model=model,
    )


def _model(config: DoctorConfig) -> Model | None:
    if not config.engine.model_dir:
        return None
    # Here, because both bring torch, which takes seconds to import.
    from tandem.doctor.fit import model_facts
    from tandem.node.command import default_cache_dir

    cache_dir: Path = default_cache_dir() / "models"
    return model_facts(config.engine, cache_dir)


def _measure_here(config: DoctorConfig, facts: Facts, progress: Progress) -> _Measurement:
    host = "127.0.0.1" if config.host in WILDCARDS else config.host
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as scratch:
        where = _where(config, host, config.directory or scratch)
        far = ReceivingProbe(_effort(config).shape, where, host)
        finished = _run(config, facts, far, where, progress)
    return _Measurement(finished, "this machine", "itself", _effort(config).shape.page_bytes)


def _connect(
    config: DoctorConfig, facts: Facts, progress: Progress
) -> tuple[_Measurement, Finding]:
    host, port, shape = config.address.host, config.address.port, _effort(config).shape
    key = cluster_key(host, is_insecure=config.is_insecure, flag="--connect")
    progress(f"connecting to {host}")
    own = address_toward(host, "::" if ":" in host else "0.0.0.0")
    begin = Begin(
        version=package_version(),
        host=socket.gethostname(),
        address=own,
        page_bytes=shape.page_bytes,
        num_pages=shape.num_pages,
    )
    far = RemoteFarEnd(host, port, key, begin)
    try:
        finished = _run(config, facts, far, _where(config, own, config.directory), progress)
        far.finish(finished)
    finally:
        far.close()
    measurement = _Measurement(finished, begin.host, far.peer.host, shape.page_bytes)
    return measurement, _versions(far.peer.host, far.peer.version)


def _listen(config: DoctorConfig, progress: Progress) -> tuple[_Measurement, Finding]:
    host = config.address.host
    key = cluster_key(host, is_insecure=config.is_insecure, flag="--listen")
    me = Welcome(version=package_version(), host=socket.gethostname())
    address = tcp_address(host, config.address.port)
    inbox: Inbox[ToListening] = Inbox(address, ToListening, key, HEARTBEAT)
    with inbox:
        _announce(host, inbox.port)
        progress("waiting for the other end")
        session = Listening(
            inbox,
            _where(config, host, config.directory),
            me,
            lambda begin: progress(f"being measured by {printable(begin.host)}"),
        ).serve()
    peer = session.peer
    measurement = _Measurement(session.finished, peer.host, me.host, peer.page_bytes)
    return measurement, _versions(peer.host, peer.version)


def _announce(host: str, port: int) -> None:
    """Say what to type at the other end: on standard error, since the report goes to the other one."""
    shown = socket.gethostname() if host in WILDCARDS else host
    address = tcp_address(shown, port).removeprefix("tcp://")
    note = " (from this host only: --listen HOST:PORT is for others)" if is_loopback(host) else ""
    sys.stderr.write(f"listening; at the other end: tandem doctor --connect {address}{note}\n")
    sys.stderr.flush()


def _run(
    config: DoctorConfig, facts: Facts, far: FarEnd, where: Where, progress: Progress
) -> Finished:
    """Measure everything toward the far end, and judge it."""
    effort = _effort(config)
    active = [port.bytes_per_s for port in facts.rdma.ports if port.state == "ACTIVE"]
    progress("measuring the limits")
    limits = link_limits(*measure_limits(far, effort, where), max(active, default=0.0))
    names = config.backends or known()
    outcomes = measure_all(far, names, effort, where, lambda name: progress(f"measuring {name}"))
    return Finished(limits=limits, transports=judge(outcomes, limits, config.backends, AUTO))


def _effort(config: DoctorConfig) -> Effort:
    return QUICK if config.is_quick else THOROUGH


def _where(config: DoctorConfig, host: str, directory: str) -> Where:
    return Where(host=host, interface=config.interface, directory=directory)


def _versions(host: str, version: str) -> Finding:
    own = package_version()
    return Finding(
        area="link",
        name="versions",
        status="ok" if own == version else "warning",
        found=f"{own} here, {version} at {host}",
        advice="" if own == version else "one release apart is safe, more is not",
    )


def _broken_link(config: DoctorConfig, error: TandemError) -> Finding:
    return Finding(
        area="link",
        name=tcp_address(config.address.host, config.address.port).removeprefix("tcp://"),
        status="failed",
        found=error.message,
        advice="see what the other end says, and run both again" if config.mode == "listen" else "",
    )
