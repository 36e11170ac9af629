"""Agents in this process as nodes under test."""

from contextlib import ExitStack

import pytest

from tandem.conformance.play_decode import DecodePlayer
from tandem.conformance.play_prefill import PrefillPlayer
from tandem.kvtransfer.events import Landed, Lost
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.channel import Heartbeat
from tests.calm import CALM, CalmHeartbeat, calm_receiver, calm_sender
from tests.kvtransfer.rig import PROMPT_PAGES, Cluster, layout, pages

# By the rhythm that a test is about: of silence, which is a loss soon, or of pings.
BEATS = {"silence": Heartbeat(0.2), "pings": CalmHeartbeat(0.1), "": CALM}


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
        self.beat = heartbeat
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


class DecodeAgentUnderTest:
    """A decode agent without an engine. It owns its pages as a role does: they rest until no write can come."""

    host, key, page_size = "127.0.0.1", None, layout().page_size

    def __init__(self, stack, heartbeat):
        cluster = Cluster(stack)
        cluster.use(TcpTransport())
        self.beat = heartbeat
        self.node = cluster.decode(timeouts=calm_receiver(heartbeat=heartbeat))
        self.free, self.pages, self.outcomes = list(range(layout().num_pages)), {}, {}

    def start(self, room, num_tokens, host, port):
        num_pages = num_tokens // self.page_size
        self.pages[room], self.free = self.free[:num_pages], self.free[num_pages:]
        self.node.agent.request(room, host, port, self.pages[room])

    def cancel(self, room):
        self.node.agent.withdraw(room)

    def outcome(self, room):
        return self.outcomes.get(room, "")

    def keep_alive(self):
        for event in self.node.agent.events():
            if isinstance(event, Landed):
                self.outcomes[event.room] = "landed"
            elif error := getattr(event, "error", None):
                self.outcomes[event.room] = error.code
            if not isinstance(event, Lost):
                self.free = self.pages.pop(event.room) + self.free


def _players(stack, make_player, make_subject):
    """Return what makes a player against a new agent of a rhythm."""

    def make(rhythm):
        player = make_player(make_subject(stack, BEATS[rhythm]))
        stack.callback(player.close)
        return player

    return make


@pytest.fixture
def decode_player(stack):
    return _players(stack, DecodePlayer, PrefillAgentUnderTest)


@pytest.fixture
def prefill_player(stack):
    return _players(stack, PrefillPlayer, DecodeAgentUnderTest)
