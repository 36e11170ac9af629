"""`tandem doctor` as people and scripts run it: alone, in pairs, and with an end that misbehaves."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.doctor.config import parse
from tandem.doctor.link import judge
from tandem.doctor.report import HandOff, Report, TransportRow, render
from tandem.wire.errors import ConfigInvalid
from tests.kept_port import kept_port
from tests.sample import sampled

ROOT = Path(__file__).resolve().parents[3]
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
    """Wait for the end; return status, output and errors."""
    with process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in err
    return process.returncode, out, err


def report(process: subprocess.Popen) -> tuple[int, Report]:
    status, out, err = end(process)
    assert out, err
    return status, msgspec.json.decode(out, type=Report)


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
def test_a_machine_is_examined_and_strange_transports_harm_only_themselves(tmp_path):
    (tmp_path / "tandem_strangers.py").write_text(STRANGERS)
    info = tmp_path / "tandem_strangers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-strangers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    names = "shm,tcp,absent,dying,lying"
    argv = ("--json", "--transfer-backend", names)
    status, told = report(start(*argv, PYTHONPATH=path))
    assert (status, told.is_well, told.mode) == (1, False, "local")
    rows = {row.name: row for row in told.transports}
    assert list(rows) == names.split(",")
    for name in ("shm", "tcp"):
        assert rows[name].status == "ok"
        assert rows[name].gigabytes_per_s > 0
        sizes = [each.size_bytes for each in rows[name].hand_offs]
        assert sizes == sorted(sizes)
        assert min(each.ms for each in rows[name].hand_offs) > 0
    assert "tandem_strangers_absent" in rows["absent"].advice
    assert "ended with status -6" in rows["dying"].advice
    assert "not those that were sent" in rows["lying"].advice
    areas = ("cpu", "memory", "limits", "rdma", "gpu")
    assert {each.area for each in told.findings} >= set(areas)


def row(name: str, status="ok") -> TransportRow:
    return TransportRow(name=name, status=status)


@pytest.mark.parametrize(
    ("rows", "wanted", "failed"),
    [
        ([row("shm"), row("tcp", "warning"), row("nixl", "missing")], (), []),
        ([row("shm", "missing"), row("tcp", "warning")], (), ["shm", "tcp"]),
        ([row("shm"), row("nixl", "missing")], ("shm", "nixl"), ["nixl"]),
    ],
)
def test_transports_fail_when_they_were_named_or_nothing_else_works(rows, wanted, failed):
    judged = judge(rows, wanted)
    assert [each.name for each in judged if each.status == "failed"] == failed


def test_a_table_has_a_column_for_each_size(capsys):
    hand_offs = [HandOff(64 << 10, 0.5), HandOff(128 << 20, 20.0)]
    good = TransportRow(name="shm", status="ok", hand_offs=hand_offs, gigabytes_per_s=6.7)
    bad = TransportRow(name="e\x1bvil", status="missing", advice="no library")
    render(Report(version="1", host="h", mode="local", is_well=True, transports=[bad, good]))
    head, *lines, _, verdict = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "status"
    assert "64 KiB, ms" in head
    assert "128 MiB, ms" in head
    assert lines[0].split()[:2] == ["missing", "e·vil"]
    assert lines[1].split() == ["ok", "shm", "0.50", "20.00", "6.70"]
    assert verdict == "all that is needed works"


def test_json_has_the_shape_that_scripts_count_on():
    status, out, err = end(start("--json", "--no-measure"))
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert set(told) == {"version", "host", "mode", "is_well", "transports", "findings"}
    assert set(told["findings"][0]) == {"area", "name", "status", "found", "advice"}


@pytest.mark.parametrize("host", sampled(["127.0.0.1", "[::1]"], "127.0.0.1"))
def test_a_pair_with_one_secret_is_measured_again_and_again(host):
    env = {"TANDEM_CLUSTER_KEY": "one secret"}
    argv = ("--json", "--transfer-backend", "tcp")
    with listening(f"{host}:0", "--transfer-backend", "tcp", **env) as (_, address):
        assert address.startswith(host)
        for _ in range(2):
            status, told = report(start("--connect", address, *argv, **env))
            assert (status, told.mode) == (0, "connect")
            assert [(row.name, row.status) for row in told.transports] == [("tcp", "ok")]


def test_an_end_without_the_secret_is_told_so():
    with listening("127.0.0.1:0", TANDEM_CLUSTER_KEY="a secret") as (process, address):
        argv = ("--connect", address, "--transfer-backend", "tcp")
        status, out, _ = end(start(*argv))
        assert process.poll() is None  # and the one with it goes on
    assert status == 1
    assert "the other end" in out
    assert "TANDEM_CLUSTER_KEY" in out


def test_nobody_at_the_other_end_is_told_at_once():
    with kept_port() as port:
        address = f"127.0.0.1:{port}"
        status, out, _ = end(start("--connect", address))
    assert status == 1
    assert f"{address}  cannot be reached (Connection refused)" in out


def test_ctrl_c_ends_a_listening_end_with_a_sentence():
    with listening("127.0.0.1:0") as (process, _):
        process.send_signal(signal.SIGINT)
        status, out, err = end(process)
    assert (status, err) == (130, "tandem doctor: stopped\n")
    assert "all that is needed works" in out


def test_ctrl_c_in_the_middle_of_measuring_leaves_no_process_behind():
    with listening("127.0.0.1:0", "--transfer-backend", "tcp") as (far, address):
        far.send_signal(signal.SIGSTOP)  # it accepts, and does nothing
        process = start("--connect", address, "--transfer-backend", "tcp")
        file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + TIMEOUT_S
        while not (children := file.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        status, _, err = end(process)
    assert (status, err) == (130, "tandem doctor: stopped\n")
    assert children
    # The interpreter's own tracker of resources ends a moment later.
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--listen", "port"), "give [HOST:]PORT"),
        (("--connect", "9000"), "give HOST:PORT"),
        (("--connect", "::1:9000"), "in brackets"),
        (("--connect", "host:0"), "give HOST:PORT"),
        (("--transfer-backend", "pigeon"), "no transport 'pigeon' is installed; there are: shm"),
        (("--node", "10.0.0.1:7000"), "is not a node's URL"),
        (("--listen", "9000", "--connect", "a:9000"), "give one of them"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_give(argv, words):
    with pytest.raises(ConfigInvalid) as refused:
        parse(argv)
    assert words in refused.value.message


@pytest.mark.parametrize("flag", ["--listen", "--connect"])
def test_nothing_is_measured_beyond_loopback_without_a_secret(flag):
    status, out, err = end(start(flag, "192.0.2.1:9000"))
    assert (status, out) == (2, "")
    assert f"{flag} 192.0.2.1 can be reached from other machines" in err
