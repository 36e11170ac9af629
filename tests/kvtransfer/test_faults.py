"""Crashes, stopped processes and bad links under a real hand-off, over every installed transport.

Both nodes are processes; what dies does so while its bytes are landing. Each time the other end must
say so, have all its pages back, and do the next hand-off with a healthy peer.
"""

import signal
from contextlib import ExitStack, closing

import pytest

from tests.faults.network import Network, has_network
from tests.kvtransfer.far_node import FarNode, begin_push, hand_off
from tests.kvtransfer.makers import cross_process
from tests.sample import sampled

KINDS = ("prefill", "decode")


class Nodes:
    """Starts nodes of one transport, and ends them."""

    def __init__(self, stack, transport):
        self._stack, self.transport = stack, transport

    def start(self, *kinds, **more):
        nodes = [FarNode(kind, self.transport, **more) for kind in kinds]
        for node in nodes:
            self._stack.callback(node.close)
        return [node.ready() for node in nodes]


def pytest_generate_tests(metafunc):
    if "nodes" in metafunc.fixturenames and "network" not in metafunc.fixturenames:
        metafunc.parametrize("nodes", cross_process(), indirect=True)


@pytest.fixture
def nodes(request):
    with ExitStack() as stack:
        yield Nodes(stack, request.param)


def test_prefill_killed_during_a_push_is_lost_and_its_pages_return(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "prefill")
    begin_push(prefill, decode, 1)
    prefill.signal(signal.SIGKILL)
    assert decode.hear("RoomLost", 1)["error"] == "peer_lost"
    decode.hear("RoomSafe", 1)
    hand_off(healthy, decode, 2)
    decode.check_all_back()


def test_a_decode_killed_while_it_is_written_releases_prefills_pages(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "decode")
    begin_push(prefill, decode, 1)
    decode.signal(signal.SIGKILL)
    assert prefill.hear("RoomReleased", 1)["error"] == "peer_lost"
    hand_off(prefill, healthy, 2)
    prefill.check_all_back()


def test_prefill_stopped_during_a_push_writes_nothing_when_resumed(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "prefill", mood="alert")
    begin_push(prefill, decode, 1)
    prefill.signal(signal.SIGSTOP)
    assert decode.hear("RoomLost", 1)["error"] == "peer_lost"
    hand_off(healthy, decode, 2)  # while a stopped writer may hold up the fence of its own pages
    prefill.signal(signal.SIGCONT)
    assert prefill.hear("RoomReleased", 1)["error"] == "peer_lost"
    decode.hear("RoomSafe", 1)
    decode.check_all_back()
    prefill.check_all_back()
    hand_off(prefill, decode, 3)


def test_decode_stopped_during_a_push_is_lost_and_learns_it_when_resumed(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "decode", mood="alert")
    begin_push(prefill, decode, 1)
    decode.signal(signal.SIGSTOP)
    assert prefill.hear("RoomReleased", 1)["error"] == "peer_lost"
    hand_off(prefill, healthy, 2)
    decode.signal(signal.SIGCONT)
    assert decode.hear("RoomLost", 1)["error"] == "peer_lost"
    decode.hear("RoomSafe", 1)
    hand_off(prefill, decode, 3)
    decode.check_all_back()


@pytest.mark.parametrize("kind", sampled(KINDS, "prefill"))
def test_link_to_a_process_that_is_busy_for_three_seconds_lasts(kind):
    with ExitStack() as stack:
        nodes = dict(zip(KINDS, Nodes(stack, "tcp").start(*KINDS, mood="alert"), strict=True))
        hand_off(*nodes.values(), 1)
        nodes[kind].do("hold_gil", 3.0)
        hand_off(*nodes.values(), 2)
        for node in nodes.values():
            assert node.report()["num_lost_links"] == 0


# ── links ────────────────────────────────────────────────────────────────────────────────────────

# Namespaces need root: without it these are not collected at all, and the rest stands for itself.
if has_network():

    @pytest.fixture
    def network():
        with closing(Network(["prefill", "decode"])) as made:
            yield made

    def start_apart(nodes, network, mood):
        """Start a prefill and a decode node with a network between them."""
        return [
            nodes.start(
                kind,
                host=network.addresses[kind],
                namespace=network.namespace(kind),
                mood=mood,
            )[0]
            for kind in ("prefill", "decode")
        ]

    @pytest.mark.parametrize("nodes", ["tcp"], indirect=True)
    def test_cut_link_ends_the_room_at_both_ends_and_a_repaired_one_works(nodes, network):
        prefill, decode = start_apart(nodes, network, "alert")
        begin_push(prefill, decode, 1)
        network.set_link("decode", is_cut=True)
        assert decode.hear("RoomLost", 1)["error"] == "peer_lost"
        decode.hear("RoomSafe", 1)
        assert prefill.hear("RoomReleased", 1)["error"] == "peer_lost"
        network.set_link("decode", is_cut=False)
        hand_off(prefill, decode, 2)
        decode.check_all_back()
        prefill.check_all_back()

    @pytest.mark.parametrize("nodes", ["tcp"], indirect=True)
    def test_a_slow_link_that_loses_packets_hands_off_every_byte(nodes, network):
        network.set_link("decode", delay_ms=10, loss=0.01)
        prefill, decode = start_apart(nodes, network, "calm")
        hand_off(prefill, decode, 1)
        decode.check_all_back()
        prefill.check_all_back()
