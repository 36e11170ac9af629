"""What many links of one process cost, and what they may do to each other."""

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tandem.wire.async_link import AsyncLink
from tandem.wire.channel import PER_LINK, Inbox, Link, wait
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


def hear(inbox: Inbox[ToEngine], num: int) -> None:
    for _ in patiently():
        while inbox.receive() is not None:
            num -= 1
        if num <= 0:
            return
        wait([inbox], 0.1)
    raise AssertionError(f"{num} messages did not come")


@pytest.fixture
def inbox():
    with Inbox("tcp://127.0.0.1:0", ToEngine, heartbeat=CALM) as made:
        yield made


def make_link(inbox: Inbox[ToEngine]) -> Link[FromEngine]:
    return Link(inbox.address, FromEngine, heartbeat=CALM)


def test_a_link_costs_no_thread_and_few_descriptors(inbox):
    links = [make_link(inbox)]
    send(links[0])
    hear(inbox, 1)
    threads, descriptors = count("task"), count("fd")
    links += [make_link(inbox) for _ in range(NUM_LINKS)]
    for link in links[1:]:
        send(link)
    hear(inbox, NUM_LINKS)
    assert count("task") == threads
    # The inbox is of this process, too: it has one for each connection.
    assert count("fd") - descriptors == NUM_LINKS * (PER_LINK + 1)
    for link in links:
        link.close()


def test_a_closed_inbox_has_given_its_address_back():
    address = "tcp://127.0.0.1:0"
    for _ in range(50):
        with Inbox(address, ToEngine, heartbeat=CALM) as inbox:
            address = inbox.address
            link = make_link(inbox)
            send(link)
            hear(inbox, 1)
            link.close()


@pytest.mark.parametrize("kind", [Link, partial(AsyncLink, take=lambda _: None)])
async def test_a_link_to_a_name_is_refused(kind):
    """libzmq would resolve it in the thread that all links of the process share."""
    with pytest.raises(ValueError, match="resolve"):
        kind("tcp://node-1.example.org:8998", FromEngine)


def run_alone(code: str, limit: int, hard: int = 0) -> str:
    """Run code in a process of its own that may have so many descriptors; return what it prints."""
    most = hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": "src:."},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("limit", range(100, 103))  # a link takes three until it is connected
def test_without_descriptors_the_next_link_is_refused_and_the_others_live(limit):
    code = """
from tests.wire.test_many_links import CALM, hear, make_link, send
from tandem.wire.channel import Inbox
from tandem.wire.errors import PeerLost
from tandem.wire.messages import ToEngine

with Inbox("tcp://127.0.0.1:0", ToEngine, heartbeat=CALM) as inbox:
    first, others = make_link(inbox), []
    send(first)
    hear(inbox, 1)
    try:
        while True:
            others.append(make_link(inbox))
    except PeerLost as error:
        print(error)
    send(first)
    hear(inbox, 1)
"""
    assert "ulimit -n" in run_alone(code, limit)


def test_a_process_may_have_more_links_than_libzmq_allows_unasked():
    code = """
from tandem.wire.channel import Link
from tandem.wire.messages import FromEngine

links = [Link("tcp://127.0.0.1:1", FromEngine) for _ in range(500)]
print(len(links))
"""
    assert run_alone(code, 4000) == "500"


LIMITED = """
from structlog.testing import capture_logs
from tandem.wire.channel import allow_descriptors
import resource
with capture_logs() as told:
    allow_descriptors(1000, used_for="40 nodes")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], told)
"""


def test_a_process_takes_what_it_may_and_a_limit_that_is_too_low_is_told_with_what_is_needed_and_how_to_raise_it():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_alone(LIMITED, 64) == f"{most} []"
    told = run_alone(LIMITED, 500, hard=500)
    assert told.startswith("500 ")
    for words in (
        "'needed': 1128",
        "'limit': 500",
        "40 nodes",
        "ulimit -n 1128",
        "LimitNOFILE=1128",
    ):
        assert words in told
