"""When prefill's agent releases pages after a failed push."""

import numpy as np
import pytest
from structlog.testing import capture_logs

from tandem.kvtransfer.agents import sender_links
from tandem.kvtransfer.agents import sender_rooms as push_room
from tandem.kvtransfer.events import (
    RoomFailed,
    RoomGranted,
    RoomLanded,
    RoomLost,
    RoomReleased,
    RoomSafe,
)
from tandem.wire import channel
from tandem.wire.errors import Aborted, ConfigInvalid, PeerLost, TransferFailed, TransferRefused
from tandem.wire.generation import Epoch, Room
from tandem.wire.hand_off import Withdraw
from tests.kvtransfer import rig
from tests.kvtransfer.rig import DECODE_PAGES, PROMPT_PAGES, ROOM
from tests.loopback import Fault, LoopbackTransport
from tests.patience import PATIENCE_S, patiently


def test_pages_of_a_broken_push_return_only_after_the_fence(cluster):
    # As of a one-sided library: the first write still is under way when the second breaks.
    cluster.use(LoopbackTransport([Fault("late"), Fault("break", at_write=1)]))
    prefill, decode = rig.begin(cluster)
    prefill.next(RoomGranted)
    prefill.agent.push(ROOM, PROMPT_PAGES[:2], 0)
    prefill.agent.push(ROOM, PROMPT_PAGES[2:], 2)
    assert isinstance(decode.next(RoomLost).error, TransferFailed)
    assert decode.next() == RoomSafe(ROOM)
    assert isinstance(prefill.next(RoomReleased).error, TransferFailed)
    with pytest.raises(PeerLost):
        cluster.transport.release()
    assert not rig.pages(decode, DECODE_PAGES).any()
    rig.serve_the_next(prefill, decode)


def test_layers_computed_during_a_write_are_pushed_together(cluster):
    cluster.use(script := rig.Scripted())
    shape = rig.layout(num_layers=4)
    prefill, decode = rig.begin(cluster, sender={"shape": shape}, receiver={"shape": shape})
    prefill.next(RoomGranted)
    script.holds["write"].begin()
    prefill.agent.push(ROOM, PROMPT_PAGES, 0, range(1))
    assert script.holds["write"].reached.wait(PATIENCE_S)
    for num_layers in (2, 3, 4):
        prefill.agent.push(ROOM, PROMPT_PAGES, 0, range(num_layers))
    prefill.agent.finish(ROOM, first_token=9, seed=77, cached_tokens=4)
    rig.has_turned(prefill.agent)
    script.holds["write"].let_go()
    decode.next(RoomLanded)
    assert script.num_writes == 2
    held, landed = (
        rig.pages(*side, shape) for side in ((prefill, PROMPT_PAGES), (decode, DECODE_PAGES))
    )
    assert np.array_equal(held, landed)


def in_a_write(cluster):
    """Return a prefill whose write does not return, and the script that holds it."""
    cluster.use(script := rig.Scripted())
    prefill, _ = rig.begin(cluster, sender={"clock": cluster.clock})
    prefill.next(RoomGranted)
    script.holds["write"].begin()
    rig.push_all(prefill)
    assert script.holds["write"].reached.wait(PATIENCE_S)
    return prefill, script


def test_write_that_does_not_return_delays_no_close_and_shows_in_the_statistics(
    cluster, monkeypatch
):
    monkeypatch.setattr(sender_links, "CLOSE_S", 0.01)
    prefill, script = in_a_write(cluster)
    assert prefill.agent.statistics().ending_s == 0
    prefill.agent.abort(ROOM)
    cluster.clock.now_s += 400
    assert prefill.agent.statistics().ending_s == 400
    with capture_logs() as logged:
        prefill.agent.close()
    script.holds["write"].let_go()
    assert "kv_write.not_returned" in [each["event"] for each in logged]


def test_age_of_a_failed_hand_off_ends_with_its_last_write(cluster):
    prefill, script = in_a_write(cluster)
    prefill.agent.abort(ROOM)
    script.holds["write"].let_go()
    prefill.next(RoomReleased)
    assert prefill.agent.statistics().ending_s == 0


def test_peer_that_floods_delays_nobody_else(cluster, stack, monkeypatch):
    monkeypatch.setattr(channel, "FRAMES_PER_TURN", 10)
    prefill = cluster.prefill()
    decode = rig.fake_decode(stack, prefill.agent.port, cluster.transport)
    late = Withdraw(epoch=Epoch(99), room=ROOM)
    assert rig.refused_in_a_turn(prefill, lambda: decode.send(late), 300) <= 10


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize(
    "error", [OSError("broken"), ConfigInvalid("no such device"), MemoryError(), Panic()]
)
def test_only_a_refusal_means_that_no_write_is_in_flight(cluster, error):
    cluster.use(script := rig.Scripted())
    script.failures, script.error = ["write"], error
    prefill, decode = rig.begin(cluster)
    prefill.next(RoomGranted)
    rig.push_all(prefill)
    decode.next(RoomLost)
    assert decode.next() == RoomSafe(ROOM)
    prefill.next(RoomReleased)
    rig.serve_the_next(prefill, decode)


def test_checksum_error_at_prefill_fails_the_room_but_keeps_the_link(cluster, monkeypatch):
    prefill, decode = cluster.prefill(), cluster.decode()

    def fail(*_args):
        raise MemoryError

    prefill.agent.expect(ROOM)
    with monkeypatch.context() as patch:
        patch.setattr(push_room, "page_sums", fail)
        rig.request(decode, prefill)
        prefill.next(RoomGranted)
        rig.push_all(prefill)
        assert isinstance(prefill.next(RoomReleased).error, TransferRefused)
        assert isinstance(decode.next(RoomFailed).error, TransferRefused)
    rig.serve_the_next(prefill, decode)
    assert prefill.agent.times.num_lost_links == decode.agent.times.num_lost_links == 0


def test_last_message_rejected_by_a_full_queue_drops_the_link(cluster, stack, monkeypatch):
    monkeypatch.setattr(channel, "HIGH_WATER_MARK", 2)
    prefill = cluster.prefill(clock=cluster.clock)  # no ping finds the queue full
    decode = rig.fake_decode(stack, prefill.agent.port, cluster.transport)
    decode.introduce()
    prefill.wait_until(lambda now: now.num_links == 1)
    # Nothing is read, and each last word says at length why.
    why = Aborted("x" * (1 << 20)).info()
    for number, _ in enumerate(patiently()):
        decode.grant([1], room=Room(number))
        decode.withdraw(Room(number), error=why)
        if not prefill.agent.statistics().num_links:
            return
    raise AssertionError("the link lives on without the word")
