"""`tandem doctor` as people and scripts run it: alone, in pairs, and with an end that misbehaves."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.doctor.arguments import parse
from tandem.doctor.pair import HEARTBEAT
from tandem.doctor.pair_messages import (
    Alive,
    Begin,
    Open,
    Refused,
    ToConnecting,
    ToListening,
    Welcome,
)
from tandem.doctor.probe import NotOpened, Opened
from tandem.doctor.report import Report
from tandem.wire.channel import Inbox, Link, wait
from tandem.wire.errors import ConfigInvalid, PeerLost
from tests.kept_port import kept_port

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


def test_a_machine_is_examined_and_strange_transports_harm_only_themselves(tmp_path):
    (tmp_path / "tandem_strangers.py").write_text(STRANGERS)
    info = tmp_path / "tandem_strangers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tandem-strangers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, told = report(start("--quick", "--json", PYTHONPATH=path))
    assert (status, told.is_well, told.mode) == (0, True, "local")
    rows = {row.name: row for row in told.transports}
    for name, limit in (("shm", "memcpy"), ("tcp", "socket")):
        assert rows[name].status in ("ok", "warning")  # a warning: this machine is busy
        assert rows[name].gigabytes_per_s > 0
        assert rows[name].latency_us > 0
        assert rows[name].limit == limit
    assert (rows["absent"].status, rows["absent"].gigabytes_per_s) == ("missing", None)
    assert "tandem_strangers_absent" in rows["absent"].advice
    assert rows["dying"].status == "warning"
    assert "ended with status -6" in rows["dying"].advice
    assert rows["lying"].status == "warning"
    assert "not those that were sent" in rows["lying"].advice
    assert told.limits.memcpy_gigabytes_per_s > 0
    assert told.limits.round_trip_us > 0
    assert {each.area for each in told.findings} >= {
        *("packages", "cpu", "memory", "limits", "rdma", "gpu", "network", "ports")
    }


def test_json_has_the_shape_that_scripts_count_on():
    status, out, err = end(start("--json", "--no-measure"))
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert set(told) == {
        *("version", "host", "mode", "is_well", "between", "page_bytes"),
        *("limits", "transports", "findings"),
    }
    assert set(told["limits"]) == {
        *("memcpy_gigabytes_per_s", "socket_gigabytes_per_s", "rdma_gigabytes_per_s"),
        *("round_trip_us", "page_us"),
    }
    assert set(told["findings"][0]) == {"area", "name", "status", "found", "advice"}


def test_a_port_that_was_asked_for_and_is_taken_fails():
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        status, out, _ = end(start("--no-measure", "--port", str(number)))
    assert status == 1
    [line] = [line for line in out.splitlines() if line.startswith("failed")]
    assert f"127.0.0.1:{number}" in line
    assert "Address already in use" in line
    assert out.splitlines()[-1].startswith(f"does not work: 127.0.0.1:{number}")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_pair_with_one_secret_measures_and_both_ends_tell_the_same(host):
    env = {"TANDEM_CLUSTER_KEY": "one secret"}
    argv = ("--quick", "--json", "--transfer-backend", "tcp")
    with listening(f"{host}:0", *argv, **env) as (process, address):
        assert address.startswith(host)
        status, told = report(start("--connect", address, *argv, **env))
        far_status, far = report(process)
    assert (status, far_status) == (0, 0)
    assert (told.mode, far.mode) == ("connect", "listen")
    assert [row.name for row in told.transports] == ["tcp"]
    assert told.transports == far.transports
    assert (told.limits, told.between) == (far.limits, far.between)
    assert [each.status for each in far.findings if each.name == "versions"] == ["ok"]


def test_an_end_without_the_secret_is_told_so():
    with listening("127.0.0.1:0", TANDEM_CLUSTER_KEY="a secret") as (process, address):
        status, out, _ = end(start("--connect", address, "--quick"))
        assert process.poll() is None  # and the one with it still waits
    assert status == 1
    assert "TANDEM_CLUSTER_KEY must be the same at both ends (it is not set here)" in out


def test_nobody_at_the_other_end_is_told_at_once():
    with kept_port() as port:
        address = f"127.0.0.1:{port}"
        status, out, _ = end(start("--connect", address, "--quick"))
    assert status == 1
    assert f"nobody listens at {address} (Connection refused)" in out


def next_of(link: Link) -> object:
    """Return the next message that says something."""
    while True:
        wait([link], TIMEOUT_S)
        while (message := link.receive()) is not None:
            if not isinstance(message, Alive):
                return message


def say(link: Link, message) -> None:
    """Send once the connection stands."""
    while True:
        try:
            return link.send(message)
        except PeerLost:
            wait([link], 0.01)


def begin(num_pages: int = 8) -> Begin:
    return Begin(version="9", host="far", address="127.0.0.1", page_bytes=4096, num_pages=num_pages)


def test_a_listening_end_refuses_what_it_should_and_notices_that_the_other_went_away():
    with listening("127.0.0.1:0", "--json") as (process, address):
        links = [Link(f"tcp://{address}", ToConnecting, heartbeat=HEARTBEAT) for _ in range(2)]
        first, second = links
        say(first, Open(transport="tcp"))
        refusal = next_of(first)
        assert isinstance(refusal, Refused)
        assert "started anew" in refusal.error.message
        say(first, begin(num_pages=1 << 40))
        refusal = next_of(first)
        assert isinstance(refusal, Refused)
        assert "no pool of that size" in refusal.error.message
        say(first, begin())
        assert isinstance(next_of(first), Welcome)
        say(second, begin())
        refusal = next_of(second)
        assert isinstance(refusal, Refused)
        assert "another one" in refusal.error.message
        say(first, Open(transport="../evil"))
        assert isinstance(next_of(first), NotOpened)
        say(first, Open(transport="tcp"))
        assert isinstance(next_of(first), Opened)
        for link in links:
            link.close()
        status, told = report(process)
    assert status == 1
    [link] = [each for each in told.findings if each.area == "link"]
    assert (link.status, link.found) == ("failed", "far went away before it was done")


def welcome_until_open(inbox: Inbox) -> None:
    """Be a listening end until the other one wants the first receiver, which it does not get."""
    while True:
        wait([inbox], TIMEOUT_S)
        while envelope := inbox.receive():
            if isinstance(envelope.message, Begin):
                inbox.send(envelope.peer, Welcome(version="9", host="far"))
            if isinstance(envelope.message, Open):
                return


def test_a_connecting_end_notices_that_the_other_went_away():
    with Inbox("tcp://127.0.0.1:0", ToListening, heartbeat=HEARTBEAT) as inbox:
        process = start("--connect", f"127.0.0.1:{inbox.port}", "--quick", "--json")
        welcome_until_open(inbox)
    status, told = report(process)
    assert status == 1
    [link] = [each for each in told.findings if each.area == "link"]
    assert "went away before it was done" in link.found


def test_ctrl_c_ends_a_listening_end_with_a_sentence():
    with listening("127.0.0.1:0") as (process, _):
        process.send_signal(signal.SIGINT)
        status, out, err = end(process)
    assert (status, out, err) == (130, "", "tandem doctor: stopped\n")


def test_ctrl_c_in_the_middle_of_measuring_leaves_no_process_behind():
    with Inbox("tcp://127.0.0.1:0", ToListening, heartbeat=HEARTBEAT) as inbox:
        process = start("--connect", f"127.0.0.1:{inbox.port}", "--quick")
        welcome_until_open(inbox)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        status, _, err = end(process)
    assert (status, err) == (130, "tandem doctor: stopped\n")
    assert children
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--listen", "port"), "give [HOST:]PORT"),
        (("--connect", "9000"), "give HOST:PORT"),
        (("--connect", "::1:9000"), "in brackets"),
        (("--connect", "host:0"), "give HOST:PORT"),
        (("--transfer-backend", "pigeon"), "no transport 'pigeon' is installed; there are: shm"),
        (("--node", "10.0.0.1:7000"), "is not a node's URL"),
        (("--port", "70000"), "give 1 to 65535"),
        (("--page-size", "0"), "--page-size is 0"),
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


def test_help_says_how_a_pair_is_run_and_what_the_exit_status_means():
    status, out, _ = end(start("--help"))
    assert status == 0
    assert "--connect 10.0.0.5:9000" in out
    assert "exit status: 0" in out


def test_two_places_at_once_are_refused():
    with pytest.raises(SystemExit) as refused:
        parse(("--listen", "9000", "--connect", "a:9000"))
    assert refused.value.code == 2
