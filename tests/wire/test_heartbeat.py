import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tandem.wire.async_link import AsyncLink
from tandem.wire.channel import Heartbeat, heartbeat_of
from tandem.wire.errors import ConfigInvalid, PeerLost
from tandem.wire.messages import FromEngine, Ping
from tests.patience import PATIENCE_S, patiently

PEER = """
import sys, time, zmq
from tandem.wire.channel import Inbox
from tandem.wire.messages import ToEngine
inbox = Inbox("tcp://127.0.0.1:0", ToEngine)
print(inbox.address, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("interval_ms", [0, -1, 19, 60_001, float("nan"), float("inf")])
def test_heartbeat_interval_out_of_range_is_rejected(interval_ms):
    with pytest.raises(ConfigInvalid, match="use 20 to 60000"):
        heartbeat_of(interval_ms)


@pytest.fixture
def peer():
    """Yield a process with an inbox, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process.pid, process.stdout.readline().strip()
    process.send_signal(signal.SIGCONT)
    process.communicate()


async def established_link(address, heartbeat) -> AsyncLink[FromEngine]:
    """Return a link that has sent a message. With short heartbeats a link may be lost earlier: then retry."""
    for _ in patiently():
        link = AsyncLink(address, FromEngine, lambda _: None, heartbeat=heartbeat)
        lost = asyncio.ensure_future(link.wait_lost())
        while not lost.done():
            try:
                link.send(Ping())
            except PeerLost:
                await asyncio.sleep(0.001)
            else:
                lost.cancel()
                return link
        link.close()
    raise AssertionError("no link was established")


async def test_stopped_peer_is_lost_while_its_connection_is_still_open(peer):
    pid, address = peer
    patient = await established_link(address, Heartbeat(60))
    hasty = await established_link(address, Heartbeat(0.02))
    try:
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            await hasty.wait_lost()
        patient.send(Ping())
    finally:
        hasty.close()
        patient.close()
