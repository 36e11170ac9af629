"""What becomes of a room at decode when a transport fails in a way that no contract names."""

import threading
from contextlib import contextmanager

import pytest

from tandem.kvtransfer import prefill_links
from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, Safe
from tandem.wire.channel import wait
from tandem.wire.errors import TransferFailed, TransferTimeout
from tandem.wire.generation import Room
from tandem.wire.hand_off import Grant, Withdraw
from tests.calm import calm_receiver
from tests.kvtransfer import rig
from tests.kvtransfer.rig import ROOM
from tests.loopback import LoopbackTransport
from tests.patience import PATIENCE_S, patiently


class Gone:
    """What was there, and cannot be used any more."""

    def __getattr__(self, name):
        raise OSError(f"there is no {name} any more")


@contextmanager
def no_threads(monkeypatch, name=""):
    """Let no thread start, or none of a name."""
    start_one = threading.Thread.start

    def start(thread):
        if not name or thread.name == name:
            raise RuntimeError("can't start new thread")
        start_one(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


@pytest.fixture
def cluster(stack):
    made = rig.Cluster(stack)
    made.use(rig.Scripted())
    return made


@pytest.fixture
def ends(cluster):
    """Both ends, which must do the next hand-off whatever a test did to them."""
    prefill, decode = cluster.prefill(), cluster.decode()
    yield prefill, decode
    room = Room(777)
    prefill.agent.expect(room)
    rig.request(decode, prefill, room=room)
    rig.push_all(prefill, room=room)
    assert decode.next(Landed).room == room
    now = decode.agent.statistics()
    assert (now.num_reserving, now.num_granted, now.num_withdrawn, now.num_fencing) == (0,) * 4


def test_a_request_for_which_no_link_can_be_made_fails(cluster, ends):
    prefill, decode = ends
    cluster.transport.failures = ["admit"]
    rig.request(decode, prefill)
    assert "admit failed" in decode.next(Failed).error.message


def test_a_transport_that_cannot_admit_is_not_offered_and_the_others_are(cluster):
    failing = rig.Scripted("failing")
    cluster.use(failing, LoopbackTransport())
    prefill, decode = cluster.prefill(), cluster.decode()
    failing.failures = ["admit"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(Landed)


def test_a_request_that_trips_over_a_bug_fails(cluster):
    decode = cluster.decode()
    decode.agent.request(ROOM, None, 1, [1])  # a host is a string
    assert isinstance(decode.next(Failed).error, TransferFailed)


def test_a_room_that_cannot_be_permitted_is_lost_and_its_pages_are_safe_once_fenced(cluster, ends):
    prefill, decode = ends
    cluster.transport.failures = ["permit"]
    rig.request(decode, prefill)
    assert isinstance(decode.next(Lost).error, TransferFailed)
    assert decode.next() == Safe(ROOM)
    assert cluster.transport.is_fenced


def test_a_room_that_cannot_be_revoked_has_landed_and_its_writer_is_fenced(cluster, ends):
    prefill, decode = ends
    cluster.transport.failures = ["revoke"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(Landed)
    decode.wait_until(lambda now: now.num_links == 0)
    rig.until(lambda: cluster.transport.is_fenced)


def test_a_room_that_can_neither_be_revoked_nor_fenced_at_once_is_lost(cluster, ends, monkeypatch):
    monkeypatch.setattr(prefill_links, "FENCE_RETRY_S", 0)
    prefill, decode = ends
    transport = cluster.transport
    transport.failures = ["revoke", "fence", "fence"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    prefill.next(Granted)
    rig.push_all(prefill)
    assert isinstance(decode.next(Lost).error, TransferFailed)
    assert decode.next() == Safe(ROOM)
    assert transport.is_fenced
    assert not transport.failures


@contextmanager
def hanging_revoke(cluster, prefill, decode):
    """Do a hand-off of which decode's listener does not take the pages back while the block runs."""
    revoke = cluster.transport.holds["revoke"]
    revoke.begin()
    try:
        prefill.agent.expect(ROOM)
        rig.request(decode, prefill)
        rig.push_all(prefill)
        assert revoke.reached.wait(PATIENCE_S)
        yield
    finally:
        revoke.let_go()


@pytest.mark.parametrize("is_link_lost", [False, True])
def test_a_room_whose_pages_the_transport_does_not_take_back_is_lost_in_time(cluster, is_link_lost):
    prefill = cluster.prefill()
    decode = cluster.decode(timeouts=calm_receiver(landed_s=1e6), clock=cluster.clock)

    def is_unlinked(now):
        cluster.clock.now_s += 1  # a ping finds the link broken
        return now.num_links == 0

    with hanging_revoke(cluster, prefill, decode):
        if is_link_lost:
            prefill.close()
            decode.wait_until(is_unlinked)
        assert not list(decode.agent.events())
        cluster.clock.now_s += 1e6
        error = decode.next(Lost).error
        assert isinstance(error, TransferTimeout)
        assert "the transport did not take the pages back" in error.message
        assert decode.agent.statistics().num_withdrawn == 1  # the pages are in quarantine
    assert decode.next() == Safe(ROOM)


def test_a_withdraw_that_waits_for_the_transport_costs_the_link_no_sooner_than_it_hangs(cluster):
    prefill = cluster.prefill()
    limits = calm_receiver(landed_s=100, released_s=10)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    with hanging_revoke(cluster, prefill, decode):
        rig.request(decode, prefill, room=Room(43))
        decode.wait_until(lambda now: now.num_granted == 2)
        decode.agent.withdraw(Room(43))
        decode.wait_until(lambda now: now.num_withdrawn == 1)
        cluster.clock.now_s += 50
        rig.has_turned(decode.agent)
        assert decode.agent.statistics().num_links == 1
        cluster.clock.now_s += 51
        decode.wait_until(lambda now: now.num_links == 0)
        assert decode.next(Lost).room == ROOM
    assert {decode.next(Safe).room, decode.next(Safe).room} == {ROOM, Room(43)}


def test_a_room_that_cannot_be_verified_is_lost(cluster, ends):
    prefill, decode = ends
    region, decode.agent._region = decode.agent._region, Gone()
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    prefill.next(Granted)
    rig.push_all(prefill)
    assert isinstance(decode.next(Lost).error, TransferFailed)
    assert decode.next() == Safe(ROOM)
    decode.agent._region = region


def test_a_fence_that_fails_is_tried_again_and_pages_are_safe_only_then(cluster, ends, monkeypatch):
    monkeypatch.setattr(prefill_links, "FENCE_RETRY_S", 0)
    prefill, decode = ends
    transport = cluster.transport
    transport.failures = ["permit", "fence", "fence"]
    rig.request(decode, prefill)
    decode.next(Lost)
    assert decode.next() == Safe(ROOM)
    assert transport.is_fenced
    assert not transport.failures


def test_a_fence_needs_no_thread_that_there_may_not_be(cluster, ends, monkeypatch):
    prefill, decode = ends
    rig.request(decode, prefill)
    prefill.wait_until(lambda now: now.num_early_grants == 1)
    cluster.transport.failures = ["permit"]
    with no_threads(monkeypatch):
        rig.request(decode, prefill, room=Room(43))
        assert {decode.next(Lost).room, decode.next(Lost).room} == {ROOM, Room(43)}
        assert {decode.next(Safe).room, decode.next(Safe).room} == {ROOM, Room(43)}


def test_a_request_for_whose_link_there_is_no_thread_fails(ends, monkeypatch):
    prefill, decode = ends
    with no_threads(monkeypatch):
        rig.request(decode, prefill)
        error = decode.next(Failed).error
    assert isinstance(error, TransferFailed)
    assert "TasksMax=" in error.message


def test_decode_is_told_that_prefill_has_no_thread_for_its_link(ends, monkeypatch):
    prefill, decode = ends
    with no_threads(monkeypatch, "kv-push"):
        rig.request(decode, prefill)
        error = decode.next(Failed).error
    assert isinstance(error, TransferFailed)
    assert "TasksMax=" in error.message
    assert prefill.agent.statistics().num_refused == 1


def test_a_room_that_goes_over_two_links_is_lost_if_there_is_a_thread_for_one(
    cluster, stack, monkeypatch
):
    decode, prefill = cluster.decode(), rig.FakePrefill(stack)
    prefill.meet(decode)
    with no_threads(monkeypatch):
        prefill.welcome(more_ports=[1])
        assert isinstance(decode.next(Lost).error, TransferFailed)
    prefill.next(Withdraw)
    prefill.released()
    assert decode.next() == Safe(ROOM)


def test_an_offer_that_is_not_taken_and_cannot_be_fenced_is_fenced_with_its_link(cluster):
    refused, failing = rig.Scripted("refused"), rig.Scripted("failing")
    healthy = LoopbackTransport()
    cluster.use(refused, failing, healthy)
    decode = cluster.decode()
    cluster.use(healthy)
    prefill = cluster.prefill()
    refused.failures = ["fence"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(Landed)
    rig.until(lambda: failing.is_fenced)
    assert not refused.is_fenced
    assert decode.agent.statistics().num_links == 1
    prefill.agent.close()
    rig.until(lambda: refused.is_fenced)


def test_a_grant_that_cannot_be_sent_costs_the_link(cluster, stack):
    decode = cluster.decode(clock=cluster.clock)  # no ping finds the link broken
    prefill = rig.FakePrefill(stack)
    prefill.meet(decode)
    prefill.welcome()
    prefill.next(Grant)
    prefill.inbox.close()
    port = prefill.port
    for number, _ in enumerate(patiently()):
        if events := list(decode.agent.events()):
            break
        decode.agent.request(Room(100 + number), "127.0.0.1", port, [2])
        wait([], 0.005, decode.waker)
    assert events[0].room == ROOM
    assert isinstance(events[0], Lost)
