"""Rooms at decode when a transport fails outside its contract."""

import threading
from contextlib import contextmanager

import pytest

from tandem.kvtransfer.agents import receiver_links as prefill_links
from tandem.kvtransfer.events import RoomFailed, RoomGranted, RoomLanded, RoomLost, RoomSafe
from tandem.wire import channel
from tandem.wire.channel import wait
from tandem.wire.errors import TransferFailed, TransferRefused, TransferTimeout
from tandem.wire.generation import Room
from tandem.wire.hand_off import Grant, RankAddress, Withdraw
from tests.calm import calm_receiver
from tests.kvtransfer import rig
from tests.kvtransfer.rig import ROOM
from tests.loopback import LoopbackTransport
from tests.patience import PATIENCE_S, patiently, until


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
    assert decode.next(RoomLanded).room == room
    now = decode.agent.statistics()
    assert (now.num_reserving, now.num_granted, now.num_withdrawn, now.num_fencing) == (0,) * 4


def test_a_request_for_which_no_link_can_be_made_fails(cluster, ends):
    prefill, decode = ends
    cluster.transport.failures = ["admit"]
    rig.request(decode, prefill)
    assert "admit failed" in decode.next(RoomFailed).error.message


def test_a_transport_that_cannot_admit_is_not_offered_and_the_others_are(cluster):
    failing = rig.Scripted("failing")
    cluster.use(failing, LoopbackTransport())
    prefill, decode = cluster.prefill(), cluster.decode()
    failing.failures = ["admit"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(RoomLanded)


def test_prefill_that_floods_delays_nobody_else(cluster, stack, monkeypatch):
    monkeypatch.setattr(channel, "FRAMES_PER_TURN", 10)
    decode, prefill = cluster.decode(), rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    prefill.welcome()
    prefill.expect(Grant)
    assert rig.refused_in_a_turn(decode, lambda: prefill.land(ROOM, epoch=99), 300) <= 10


def hand_over(prefill, decode):
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(RoomLanded)


def test_no_offer_is_made_after_one_that_works(cluster):
    works, spare = rig.Scripted("works"), rig.Scripted("spare")
    cluster.use(works, spare)
    hand_over(cluster.prefill(), cluster.decode())
    assert works.holds["admit"].threads
    assert not spare.holds["admit"].threads


def test_refused_offer_is_fenced_and_the_next_is_made(cluster):
    refused, works = rig.Scripted("refused"), rig.Scripted("works")
    refused.failures, refused.error = ["connect"], TransferRefused("on another host")
    cluster.use(refused, works)
    prefill, decode = cluster.prefill(), cluster.decode()
    hand_over(prefill, decode)
    assert refused.is_fenced
    assert not works.is_fenced
    assert prefill.agent.times.num_lost_links == decode.agent.times.num_lost_links == 0


def test_request_fails_with_the_reason_of_each_refused_offer(cluster):
    transports = [rig.Scripted("one"), rig.Scripted("other")]
    cluster.use(*transports)
    for each in transports:
        each.failures, each.error = ["connect"], TransferRefused(f"{each.name} is far away")
    prefill, decode = cluster.prefill(), cluster.decode()
    rig.request(decode, prefill)
    error = decode.next(RoomFailed).error
    assert isinstance(error, TransferRefused)
    assert all(f"{each.name} is far away" in error.message for each in transports)
    rig.request(decode, prefill, room=Room(43))  # a new link tries all again
    prefill.agent.expect(Room(43))
    rig.push_all(prefill, room=Room(43))
    decode.next(RoomLanded)


def test_unexpected_exception_fails_only_its_request(cluster):
    decode = cluster.decode()
    decode.agent.request(ROOM, None, 1, [1])  # a host is a string
    assert isinstance(decode.next(RoomFailed).error, TransferFailed)


def test_a_room_that_cannot_be_permitted_is_lost_and_its_pages_are_safe_once_fenced(cluster, ends):
    prefill, decode = ends
    cluster.transport.failures = ["permit"]
    rig.request(decode, prefill)
    assert isinstance(decode.next(RoomLost).error, TransferFailed)
    assert decode.next() == RoomSafe(ROOM)
    assert cluster.transport.is_fenced


def test_a_room_that_cannot_be_revoked_has_landed_and_its_writer_is_fenced(cluster, ends):
    prefill, decode = ends
    cluster.transport.failures = ["revoke"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(RoomLanded)
    decode.wait_until(lambda now: now.num_links == 0)
    until(lambda: cluster.transport.is_fenced)


def test_a_room_that_can_neither_be_revoked_nor_fenced_at_once_is_lost(cluster, ends, monkeypatch):
    monkeypatch.setattr(prefill_links, "FENCE_RETRY_S", 0)
    prefill, decode = ends
    transport = cluster.transport
    transport.failures = ["revoke", "fence", "fence"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    prefill.next(RoomGranted)
    rig.push_all(prefill)
    assert isinstance(decode.next(RoomLost).error, TransferFailed)
    assert decode.next() == RoomSafe(ROOM)
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
def test_room_whose_pages_are_not_revoked_in_time_is_lost(cluster, is_link_lost):
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
        error = decode.next(RoomLost).error
        assert isinstance(error, TransferTimeout)
        assert "the transport did not revoke the pages" in error.message
        assert decode.agent.statistics().num_withdrawn == 1  # the pages are in quarantine
    assert decode.next() == RoomSafe(ROOM)


def test_withdraw_behind_a_slow_job_drops_the_link_only_after_its_deadline(cluster):
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
        assert decode.next(RoomLost).room == ROOM
    assert {decode.next(RoomSafe).room, decode.next(RoomSafe).room} == {ROOM, Room(43)}


def test_withdraw_that_crossed_with_the_last_message_keeps_the_link(cluster):
    prefill = cluster.prefill()
    limits = calm_receiver(landed_s=100, released_s=10)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    with hanging_revoke(cluster, prefill, decode):
        decode.agent.withdraw(ROOM)
        decode.wait_until(lambda now: now.num_withdrawn == 1)
        cluster.clock.now_s += 101
        rig.has_turned(decode.agent)
        assert decode.agent.statistics().num_links == 1
    assert decode.next() == RoomSafe(ROOM)


def test_a_room_that_cannot_be_verified_is_lost(cluster, ends):
    prefill, decode = ends
    region, decode.agent._region = decode.agent._region, Gone()
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    prefill.next(RoomGranted)
    rig.push_all(prefill)
    assert isinstance(decode.next(RoomLost).error, TransferFailed)
    assert decode.next() == RoomSafe(ROOM)
    decode.agent._region = region


def test_failed_fence_is_retried_and_pages_are_safe_only_then(cluster, ends, monkeypatch):
    monkeypatch.setattr(prefill_links, "FENCE_RETRY_S", 0)
    prefill, decode = ends
    transport = cluster.transport
    transport.failures = ["permit", "fence", "fence"]
    rig.request(decode, prefill)
    decode.next(RoomLost)
    assert decode.next() == RoomSafe(ROOM)
    assert transport.is_fenced
    assert not transport.failures


def test_fence_works_when_no_new_thread_can_start(cluster, ends, monkeypatch):
    prefill, decode = ends
    rig.request(decode, prefill)
    prefill.wait_until(lambda now: now.num_early_grants == 1)
    cluster.transport.failures = ["permit"]
    with no_threads(monkeypatch):
        rig.request(decode, prefill, room=Room(43))
        assert {decode.next(RoomLost).room, decode.next(RoomLost).room} == {ROOM, Room(43)}
        assert {decode.next(RoomSafe).room, decode.next(RoomSafe).room} == {ROOM, Room(43)}


def test_request_fails_if_no_thread_can_start_for_its_link(ends, monkeypatch):
    prefill, decode = ends
    with no_threads(monkeypatch):
        rig.request(decode, prefill)
        error = decode.next(RoomFailed).error
    assert isinstance(error, TransferFailed)
    assert "TasksMax=" in error.message


def test_decode_receives_the_error_if_prefill_can_start_no_thread(ends, monkeypatch):
    prefill, decode = ends
    with no_threads(monkeypatch, "kv-push"):
        rig.request(decode, prefill)
        error = decode.next(RoomFailed).error
    assert isinstance(error, TransferFailed)
    assert "TasksMax=" in error.message
    assert prefill.agent.statistics().num_refused == 1


def test_decode_with_more_pipeline_stages_is_refused(cluster):
    prefill, decode = cluster.prefill(), cluster.decode(stage=1)
    prefill.agent.expect(rig.ROOM)
    rig.request(decode, prefill)
    assert decode.next(RoomFailed).error.code == "layout_mismatch"


def test_room_over_two_links_is_lost_if_only_one_thread_can_start(cluster, stack, monkeypatch):
    decode, prefill = cluster.decode(), rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    with no_threads(monkeypatch):
        prefill.welcome(more_addresses=[RankAddress(1)])
        assert isinstance(decode.next(RoomLost).error, TransferFailed)
    prefill.expect(Grant)
    prefill.expect(Withdraw)
    prefill.release(ROOM)
    assert decode.next() == RoomSafe(ROOM)


def test_unused_offer_that_cannot_be_fenced_is_fenced_with_its_link(cluster):
    refused, failing = rig.Scripted("refused"), rig.Scripted("failing")
    healthy = LoopbackTransport()
    cluster.use(refused, failing, healthy)
    decode = cluster.decode()
    cluster.use(healthy)
    prefill = cluster.prefill()
    failing.failures = ["fence"]
    prefill.agent.expect(ROOM)
    rig.request(decode, prefill)
    rig.push_all(prefill)
    decode.next(RoomLanded)
    until(lambda: refused.is_fenced)
    assert not failing.is_fenced
    assert decode.agent.statistics().num_links == 1
    prefill.agent.close()
    until(lambda: failing.is_fenced)


def test_grant_that_cannot_be_sent_drops_the_link(cluster, stack):
    decode = cluster.decode(clock=cluster.clock)  # no ping finds the link broken
    prefill = rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    prefill.welcome()
    prefill.expect(Grant)
    prefill.inbox.close()
    port = prefill.port
    for number, _ in enumerate(patiently()):
        if events := list(decode.agent.events()):
            break
        decode.agent.request(Room(100 + number), "127.0.0.1", port, [2])
        wait([], 0.005, decode.waker)
    assert events[0].room == ROOM
    assert isinstance(events[0], RoomLost)
