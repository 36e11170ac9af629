"""Crashes, stopped processes and bad links under a real hand-off, over every installed transport.

Both nodes are processes; what dies does so while its bytes are landing. Each time the other end must
say so, have all its pages back, and do the next hand-off with a healthy peer.
"""

import os
import signal
from contextlib import ExitStack

import pytest

from tests.kvtransfer.bad_link import HOSTS, BadLink
from tests.kvtransfer.fault_rig import FarNode, begin_push, hand_off
from tests.kvtransfer.installed import cross_process
from tests.patience import PATIENCE_S


class Nodes:
    """Starts nodes of one transport, and ends them."""

    def __init__(self, stack, transport, directory):
        self._stack, self.transport, self._directory = stack, transport, directory

    def start(self, *kinds, **more):
        nodes = [FarNode(kind, self.transport, self._directory, **more) for kind in kinds]
        for node in nodes:
            self._stack.callback(node.close)
        return [node.ready() for node in nodes]


def pytest_generate_tests(metafunc):
    if "nodes" in metafunc.fixturenames and "link_of" not in metafunc.fixturenames:
        metafunc.parametrize("nodes", cross_process(), indirect=True)


@pytest.fixture
def nodes(request, tmp_path):
    with ExitStack() as stack:
        yield Nodes(stack, request.param, tmp_path)


def notices(node, event, room):
    """Wait for what a node must say by itself, and return it.

    Noticing takes one ping after a death and the heartbeat's limit otherwise, and longer on a busy machine: the limit
    is for a node that does not notice at all.
    """
    return node.hear(event, room, PATIENCE_S)


def test_a_prefill_killed_while_it_pushes_is_lost_and_its_pages_come_back(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "prefill")
    begin_push(prefill, decode, 1)
    prefill.signal(signal.SIGKILL)
    assert notices(decode, "Lost", 1)["error"] == "peer_lost"
    notices(decode, "Safe", 1)
    hand_off(healthy, decode, 2)
    report = decode.report()
    assert report["is_all_free"]
    assert report["is_untouched"]


def test_a_decode_killed_while_it_is_written_releases_prefills_pages(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "decode")
    begin_push(prefill, decode, 1)
    decode.signal(signal.SIGKILL)
    assert notices(prefill, "Released", 1)["error"] == "peer_lost"
    hand_off(prefill, healthy, 2)
    assert prefill.report()["is_all_free"]


def test_a_prefill_stopped_while_it_pushes_writes_nothing_when_it_goes_on(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "prefill", mood="alert")
    begin_push(prefill, decode, 1)
    prefill.signal(signal.SIGSTOP)
    assert notices(decode, "Lost", 1)["error"] == "peer_lost"
    hand_off(healthy, decode, 2)  # while a stopped writer may hold up the fence of its own pages
    prefill.signal(signal.SIGCONT)
    assert notices(prefill, "Released", 1)["error"] == "peer_lost"
    notices(decode, "Safe", 1)
    report = decode.report()
    assert report["is_all_free"]
    assert report["is_untouched"]
    assert prefill.report()["is_all_free"]
    hand_off(prefill, decode, 3)


def test_a_decode_stopped_while_it_is_written_is_lost_to_prefill_and_finds_out(nodes):
    prefill, decode, healthy = nodes.start("prefill", "decode", "decode", mood="alert")
    begin_push(prefill, decode, 1)
    decode.signal(signal.SIGSTOP)
    assert notices(prefill, "Released", 1)["error"] == "peer_lost"
    hand_off(prefill, healthy, 2)
    decode.signal(signal.SIGCONT)
    assert notices(decode, "Lost", 1)["error"] == "peer_lost"
    notices(decode, "Safe", 1)
    hand_off(prefill, decode, 3)
    report = decode.report()
    assert report["is_all_free"]
    assert report["is_untouched"]


# ── links ────────────────────────────────────────────────────────────────────────────────────────

# Namespaces need root: without it these are not collected at all, and the rest stands for itself.
if os.geteuid() == 0:

    @pytest.fixture
    def link_of(request):
        """Returns a function that makes a bad link."""

        def make(**how):
            link = BadLink(**how)
            request.addfinalizer(link.close)
            return link

        return make

    def start_apart(nodes, link, mood):
        """Start a prefill and a decode node with the link between them."""
        return [
            nodes.start(kind, host=host, namespace=namespace, mood=mood)[0]
            for kind, host, namespace in zip(
                ("prefill", "decode"), HOSTS, link.namespaces, strict=True
            )
        ]

    @pytest.mark.parametrize("nodes", ["tcp"], indirect=True)
    def test_a_cut_link_ends_the_room_at_both_ends_and_a_mended_one_serves_the_next(nodes, link_of):
        link = link_of()
        prefill, decode = start_apart(nodes, link, "alert")
        begin_push(prefill, decode, 1)
        link.cut()
        assert notices(decode, "Lost", 1)["error"] == "peer_lost"
        notices(decode, "Safe", 1)
        assert notices(prefill, "Released", 1)["error"] == "peer_lost"
        link.mend()
        hand_off(prefill, decode, 2)
        report = decode.report()
        assert report["is_all_free"]
        assert report["is_untouched"]
        assert prefill.report()["is_all_free"]

    @pytest.mark.parametrize("nodes", ["tcp"], indirect=True)
    def test_a_slow_link_that_loses_packets_hands_off_every_byte(nodes, link_of):
        link = link_of(delay_s=0.01, loss=0.01)
        prefill, decode = start_apart(nodes, link, "calm")
        hand_off(prefill, decode, 1)
        assert link.num_lost
        assert decode.report()["is_all_free"]
        assert prefill.report()["is_all_free"]
