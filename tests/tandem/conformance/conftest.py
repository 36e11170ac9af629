"""Agents in this process as nodes under test."""

from contextlib import ExitStack

import pytest

from tandem.conformance.play_decode import DecodePlayer
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.channel import Heartbeat
from tests.calm import CALM, calm_sender
from tests.kvtransfer.rig import PROMPT_PAGES, Cluster, layout, pages

ALERT = Heartbeat(0.1)


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


class PrefillAgentUnderTest:
    """A prefill agent without an engine: every prompt is in its pages already."""

    host, key = "127.0.0.1", None

    def __init__(self, stack, heartbeat):
        cluster = Cluster(stack)
        cluster.use(TcpTransport())
        self.node = cluster.prefill(verify="always", timeouts=calm_sender(heartbeat=heartbeat))
        self.port = self.node.agent.port

    def start(self, room, num_tokens):
        page_ids = PROMPT_PAGES[: num_tokens // layout().page_size]
        self.node.agent.expect(room)
        self.node.agent.push(room, page_ids, 0)
        self.node.agent.finish(room, first_token=9, seed=77)

    def content(self, num_tokens):
        return pages(self.node, PROMPT_PAGES[: num_tokens // layout().page_size]).tobytes()

    def keep_alive(self):
        pass


@pytest.fixture
def decode_player(stack):
    """Makes a player against a new prefill agent; an alert agent takes silence for a loss, and soon."""

    def make(*, is_alert=False):
        subject = PrefillAgentUnderTest(stack, ALERT if is_alert else CALM)
        player = DecodePlayer(subject)
        player.beat = ALERT if is_alert else player.beat
        stack.callback(player.close)
        return player

    return make
