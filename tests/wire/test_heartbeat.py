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
def test_a_rhythm_that_cannot_be_kept_is_refused(interval_ms):
    with pytest.raises(ConfigInvalid, match="give 20 to 60000"):
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


async def link_that_stood(address, heartbeat) -> AsyncLink[FromEngine]:
    """Return a link over which something was sent. A hasty one may be lost before: then another is made."""
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
    raise AssertionError("no link stood")


async def test_a_stopped_peer_is_lost_although_its_connection_stands(peer):
    pid, address = peer
    patient = await link_that_stood(address, Heartbeat(60))
    hasty = await link_that_stood(address, Heartbeat(0.02))
    try:
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            await hasty.wait_lost()
        patient.send(Ping())
    finally:
        hasty.close()
        patient.close()
