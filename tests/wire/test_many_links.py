"""Cost and isolation of many links in one process."""

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tandem.wire.async_link import AsyncLink
from tandem.wire.channel import DESCRIPTORS_PER_LINK, Inbox, Link, wait
from tandem.wire.errors import PeerLost
from tandem.wire.messages import FromEngine, Ping, ToEngine
from tests.calm import CALM
from tests.patience import patiently

NUM_LINKS = 40


def count(what: str) -> int:
    return len(list(Path(f"/proc/self/{what}").iterdir()))


def send(link: Link[FromEngine]) -> None:
    for _ in patiently():
        try:
            return link.send(Ping())
        except PeerLost:
            wait([link], 0.005)
    raise AssertionError("no connection")


def receive_messages(inbox: Inbox[ToEngine], num: int) -> None:
    for _ in patiently():
        while inbox.receive() is not None:
            num -= 1
        if num <= 0:
            return
        wait([inbox], 0.1)
    raise AssertionError(f"{num} messages did not arrive")


@pytest.fixture
def inbox():
    with Inbox("tcp://127.0.0.1:0", ToEngine, heartbeat=CALM) as made:
        yield made


def make_link(inbox: Inbox[ToEngine]) -> Link[FromEngine]:
    return Link(inbox.address, FromEngine, heartbeat=CALM)


def test_link_uses_no_thread_and_few_descriptors(inbox):
    links = [make_link(inbox)]
    send(links[0])
    receive_messages(inbox, 1)
    threads, descriptors = count("task"), count("fd")
    links += [make_link(inbox) for _ in range(NUM_LINKS)]
    for link in links[1:]:
        send(link)
    receive_messages(inbox, NUM_LINKS)
    assert count("task") == threads
    # The inbox is in this process too and has one descriptor for each connection.
    assert count("fd") - descriptors == NUM_LINKS * (DESCRIPTORS_PER_LINK + 1)
    for link in links:
        link.close()


def test_closed_inbox_has_unbound_its_address():
    address = "tcp://127.0.0.1:0"
    for _ in range(50):
        with Inbox(address, ToEngine, heartbeat=CALM) as inbox:
            address = inbox.address
            link = make_link(inbox)
            send(link)
            receive_messages(inbox, 1)
            link.close()


@pytest.mark.parametrize("kind", [Link, partial(AsyncLink, on_messages=lambda _: None)])
async def test_link_to_host_name_is_rejected(kind):
    """libzmq would resolve the name in the I/O thread that all links of the process share."""
    with pytest.raises(ValueError, match="resolve"):
        kind("tcp://node-1.example.org:8998", FromEngine)


def run_alone(code: str, limit: int, hard: int = 0) -> str:
    """Run code in a new process with `limit` descriptors; return its output."""
    hard_limit = hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": "src:."},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("limit", range(100, 103))  # a link takes three before it is connected
def test_link_beyond_descriptor_limit_is_refused_and_others_keep_working(limit):
    code = """
from tests.wire.test_many_links import CALM, receive_messages, make_link, send
from tandem.wire.channel import Inbox
from tandem.wire.errors import PeerLost
from tandem.wire.messages import ToEngine

with Inbox("tcp://127.0.0.1:0", ToEngine, heartbeat=CALM) as inbox:
    first, others = make_link(inbox), []
    send(first)
    receive_messages(inbox, 1)
    try:
        while True:
            others.append(make_link(inbox))
    except PeerLost as error:
        print(error)
    send(first)
    receive_messages(inbox, 1)
"""
    assert "ulimit -n" in run_alone(code, limit)


def test_process_may_open_more_links_than_libzmq_allows_by_default():
    code = """
from tandem.wire.channel import Link
from tandem.wire.messages import FromEngine

links = [Link("tcp://127.0.0.1:1", FromEngine) for _ in range(500)]
print(len(links))
"""
    assert run_alone(code, 4000) == "500"


LIMITED = """
from structlog.testing import capture_logs
from tandem.wire.channel import raise_descriptor_limit
import resource
with capture_logs() as logs:
    raise_descriptor_limit(1000, used_for="40 nodes")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], logs)
"""


def test_descriptor_limit_is_raised_and_a_low_hard_limit_is_logged_with_remedy():
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_alone(LIMITED, 64) == f"{hard_limit} []"
    logs = run_alone(LIMITED, 500, hard=500)
    assert logs.startswith("500 ")
    for words in (
        "'needed': 1128",
        "'limit': 500",
        "40 nodes",
        "ulimit -n 1128",
        "LimitNOFILE=1128",
    ):
        assert words in logs
