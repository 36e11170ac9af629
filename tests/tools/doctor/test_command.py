"""`tandem doctor` as a process: alone, as two ends of a link, and with broken transports."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.tools.doctor.command import parse
from tandem.tools.doctor.link import judge
from tandem.tools.doctor.report import Finding, render
from tandem.wire.errors import ConfigInvalid
from tests.kept_port import kept_port
from tests.patience import eventually, until
from tests.processes import children
from tests.sample import sampled

ROOT = Path(__file__).resolve().parents[3]
RATE = r"\d+\.\d\d GB/s: [\d.]+ ms for 64 KiB, [\d.]+ ms for 4,096 KiB, [\d.]+ ms for 131,072 KiB"
TIMEOUT_S = 600  # a guard: torch and every transport are imported
NO_SECRET = {"TANDEM_CLUSTER_KEY": ""}

# Transports that others could install: one without its library, one that dies, one that lies.
STRANGERS = """
import os
from tandem.kvtransfer.transports.shm import ShmTransport
class Dying(ShmTransport):
    name = "dying"
    def connect(self, offer, region):
        os.abort()
class Lying(ShmTransport):
    name = "lying"
    def connect(self, offer, region):
        connection = super().connect(offer, region)
        write, connection.write = connection.write, lambda room, plan: write(room, plan[:1])
        return connection
"""
ENTRY_POINTS = """[tandem.transports]
absent = tandem_strangers_absent:Absent
dying = tandem_strangers:Dying
lying = tandem_strangers:Lying
"""


def start(*argv: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem", "doctor", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | NO_SECRET | env,
    )


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    """Wait for the end; return status, output and errors. A process that does not end is killed."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in err
    return process.returncode, out, err


def findings(out: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the status and the rest of each line of a report, by area and name."""
    lines = [line.split(maxsplit=3) for line in out.partition("\n\n")[0].splitlines()[1:]]
    return {(area, name): (status, rest) for status, area, name, rest in lines}


@contextmanager
def listening(*argv: str, **env: str):
    """Run a listening end; yield it and where it is."""
    process = start("--listen", *argv, **env)
    try:
        line = process.stderr.readline()
        assert line.startswith("listening; at the other end: tandem doctor --connect "), line
        yield process, line.split()[8]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.thorough
def test_each_transport_is_measured_and_broken_ones_cost_one_row(tmp_path):
    (tmp_path / "tandem_strangers.py").write_text(STRANGERS)
    info = tmp_path / "tandem_strangers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-strangers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    names = "shm,tcp,absent,dying,lying"
    status, out, _ = end(start("--transfer-backend", names, PYTHONPATH=path))
    assert status == 1
    assert out.splitlines()[-1].startswith("does not work: ")
    found = findings(out)
    assert [name for area, name in found if area == "transport"] == names.split(",")
    for name in ("shm", "tcp"):
        status, measured = found["transport", name]
        assert status == "ok"
        assert re.fullmatch(RATE, measured)
    reasons = {name: found["transport", name][1] for name in ("absent", "dying", "lying")}
    assert "tandem_strangers_absent" in reasons["absent"]
    assert "ended with status -6" in reasons["dying"]
    assert "not those that were sent" in reasons["lying"]
    areas = {"cpu", "memory", "limits", "rdma", "gpu", "transport"}
    assert {area for area, _ in found} == areas


def transport(name: str, status="ok", **texts) -> Finding:
    return Finding(area="transport", name=name, status=status, **{"found": "", **texts})


@pytest.mark.parametrize(
    ("measured", "wanted", "failed"),
    [
        (
            [transport("shm"), transport("tcp", "warning"), transport("nixl", "missing")],
            (),
            [],
        ),
        ([transport("shm", "missing"), transport("tcp", "warning")], (), ["shm", "tcp"]),
        ([transport("shm"), transport("nixl", "missing")], ("shm", "nixl"), ["nixl"]),
    ],
)
def test_transports_fail_if_required_or_if_none_works(measured, wanted, failed):
    judged = judge(measured, wanted)
    assert [each.name for each in judged if each.status == "failed"] == failed


def test_the_table_is_aligned_and_ends_with_the_outcome(capsys):
    bad = transport("e\x1bvil", "missing", found="not usable", advice="no library")
    render([bad, transport("shm", found="6.70 GB/s"), transport("tcp", "warning")])
    head, *lines, _, outcome = capsys.readouterr().out.splitlines()
    assert head.index("found") == lines[0].index("not usable") == lines[1].index("6.70 GB/s")
    assert lines[0].split(maxsplit=3)[:3] == ["missing", "transport", "e·vil"]
    assert outcome == "everything required works; 1 warning"


@pytest.mark.parametrize("host", sampled(["127.0.0.1", "[::1]"], "127.0.0.1"))
@pytest.mark.thorough
def test_a_link_with_one_secret_can_be_measured_repeatedly(host):
    env = {"TANDEM_CLUSTER_KEY": "one secret"}
    argv = ("--transfer-backend", "tcp")
    with listening(f"{host}:0", "--transfer-backend", "tcp", **env) as (_, address):
        assert address.startswith(host)
        for _ in range(2):
            status, out, _ = end(start("--connect", address, *argv, **env))
            assert (status, findings(out)["transport", "tcp"][0]) == (0, "ok")


@pytest.mark.thorough
def test_a_connecting_end_without_the_secret_fails_with_the_remedy():
    with listening("127.0.0.1:0", TANDEM_CLUSTER_KEY="a secret") as (process, address):
        argv = ("--connect", address, "--transfer-backend", "tcp")
        status, out, _ = end(start(*argv))
        assert process.poll() is None
    assert status == 1
    assert "the other end" in out
    assert "TANDEM_CLUSTER_KEY" in out


def test_an_unreachable_peer_fails_at_once():
    with kept_port() as port:
        address = f"127.0.0.1:{port}"
        status, out, _ = end(start("--connect", address))
    assert status == 1
    assert f"{address}  cannot be reached (Connection refused)" in out


def test_ctrl_c_ends_a_listening_end():
    with listening("127.0.0.1:0") as (process, _):
        process.send_signal(signal.SIGINT)
        status, out, err = end(process)
    assert (status, err) == (130, "tandem doctor: stopped\n")
    assert "everything required works" in out


def test_ctrl_c_while_measuring_leaves_no_process_behind():
    with listening("127.0.0.1:0", "--transfer-backend", "tcp") as (far, address):
        far.send_signal(signal.SIGSTOP)  # it accepts, and does nothing
        process = start("--connect", address, "--transfer-backend", "tcp")
        assert eventually(lambda: children(process.pid), within_s=TIMEOUT_S)
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        status, _, err = end(process)
    assert (status, err) == (130, "tandem doctor: stopped\n")
    # The interpreter's own tracker of resources ends a moment later.
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in started))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--listen", "port"), "set [HOST:]PORT"),
        (("--connect", "9000"), "set HOST:PORT"),
        (("--connect", "::1:9000"), "in brackets"),
        (("--connect", "host:0"), "set HOST:PORT"),
        (
            ("--transfer-backend", "pigeon"),
            "no transport 'pigeon' is installed; installed are: shm",
        ),
        (("--listen", "9000", "--connect", "a:9000"), "each on its own host"),
    ],
)
def test_invalid_values_are_refused(argv, words):
    with pytest.raises(ConfigInvalid) as refused:
        parse(argv)
    assert words in refused.value.message


@pytest.mark.parametrize("flag", ["--listen", "--connect"])
def test_a_link_between_hosts_requires_a_secret(flag):
    status, out, err = end(start(flag, "192.0.2.1:9000"))
    assert (status, out) == (2, "")
    assert f"{flag} 192.0.2.1 can be reached from other machines" in err
