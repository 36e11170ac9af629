"""Peers that send invalid values, field by field: the other end rejects them and serves the next request."""

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from tandem.kvtransfer.agents.sender_links import MAX_OFFERS
from tandem.kvtransfer.events import (
    PushDone,
    RoomFailed,
    RoomGranted,
    RoomLanded,
    RoomLost,
    RoomSafe,
)
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire import hand_off
from tandem.wire.channel import MAX_MESSAGE_BYTES, wait
from tandem.wire.errors import ErrorInfo, PeerLost, TransferRefused
from tandem.wire.generation import Epoch, Room
from tandem.wire.hand_off import LayoutInfo, RankAddress
from tests.calm import calm_receiver
from tests.kvtransfer import rig
from tests.kvtransfer.rig import DECODE_PAGES, ROOM, serve_the_next
from tests.patience import patiently

HUGE = 2**62


# ── a decode that lies to prefill ────────────────────────────────────────────────────────────────


@pytest.fixture
def liar(cluster, stack):
    prefill = cluster.prefill()
    liar = rig.fake_decode(stack, prefill.agent.port, cluster.transport)
    liar.prefill = prefill
    yield liar
    serve_the_next(prefill, cluster.decode(epoch=9))


def test_a_message_of_another_epoch_is_refused(liar):
    liar.hello()
    liar.grant([1], room=ROOM, epoch=Epoch(3))
    assert isinstance(liar.next(), hand_off.Refused)
    assert not liar.prefill.agent.statistics().num_early_grants


def offers(num, descriptor):
    return {"offers": [hand_off.TransportOffer(name="loopback", descriptor=descriptor)] * num}


SIZES = ("num_pages", "page_size", "num_layers", "num_kv_heads", "head_dim", "itemsize")
FALSE_HELLOS = [
    *[
        ({"layout": LayoutInfo(**{**msgspec.structs.asdict(rig.layout()), name: size})}, "layout")
        for name in SIZES
        for size in (-HUGE, -1, 0, HUGE, 2**63 - 1)
    ],
    ({"fingerprint": "x" * (MAX_MESSAGE_BYTES - 250), "offers": []}, "layout"),
    *[({"tp_rank": rank}, "layout") for rank in (-1, 99, HUGE)],
    *[(offers(1, each), "offer") for each in ({}, {"peer": "x" * 100_000}, {"peer": -HUGE})],
    (offers(MAX_OFFERS + 1, {}), "offer"),
    *[
        ({"protocol": version}, "protocol")
        for version in (-HUGE, -1, 0, hand_off.PROTOCOL + 1, HUGE)
    ],
]


@pytest.mark.parametrize(("lies", "kind"), FALSE_HELLOS)
def test_invalid_hello_is_refused(liar, lies, kind):
    code = {
        "layout": "layout_mismatch",
        "offer": "transfer_refused",
        "protocol": "protocol_mismatch",
    }[kind]
    assert liar.hello(**lies).error.code == code
    liar.prefill.wait_until(lambda now: now.num_links == 0)


def test_too_many_offers_are_refused_before_any_is_tried(liar, cluster, monkeypatch):
    tried = []
    monkeypatch.setattr(cluster.transport, "connect", lambda *args: tried.append(args))
    liar.hello(**offers(MAX_OFFERS + 1, {}))
    assert not tried
    monkeypatch.undo()


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_second_hello_on_a_link_ends_the_first(liar, epoch):
    liar.hello()
    liar.send(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[1]))
    liar.prefill.wait_until(lambda now: now.num_early_grants == 1)
    assert isinstance(liar.hello(epoch=Epoch(epoch)), hand_off.Refused)
    assert isinstance(liar.next(), hand_off.Welcome)
    liar.prefill.wait_until(lambda now: now.num_early_grants == 0)
    assert liar.prefill.agent.statistics().num_links == 1


@pytest.mark.parametrize(
    "lies",
    [
        {"page_ids": [16]},
        {"page_ids": [-1]},
        {"page_ids": [1, 1]},
        {"have_tokens": 3},
        {"have_tokens": -4},
        {"page_ids": [HUGE]},
        {"page_ids": [-HUGE]},
        {"page_ids": list(range(17))},
        {"page_ids": [0] * 1_000_000},
        {"have_tokens": -HUGE},
        {"have_tokens": HUGE + 1},
    ],
)
def test_invalid_grant_is_released_immediately(liar, lies):
    liar.hello()
    liar.send(hand_off.Grant(**{"epoch": Epoch(2), "room": ROOM, "page_ids": [1], **lies}))
    assert liar.next().error.code == "transfer_refused"
    assert liar.prefill.agent.statistics().num_early_grants == 0
    assert liar.prefill.agent.statistics().num_refused == 1


def test_grant_beyond_the_prompt_is_released_when_prefill_has_finished(liar):
    liar.hello()
    liar.send(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[1], have_tokens=HUGE))
    liar.prefill.agent.expect(ROOM)
    assert liar.prefill.next(RoomGranted).have_tokens == HUGE
    rig.push_all(liar.prefill)
    assert isinstance(liar.next(), hand_off.Released)
    assert liar.prefill.next().error.code == "transfer_refused"


def test_room_granted_twice_drops_the_link(liar):
    liar.hello()
    for page in (1, 2):
        liar.send(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[page]))
    assert isinstance(liar.next(), hand_off.Refused)
    liar.prefill.wait_until(lambda now: now.num_links == 0)


@pytest.mark.parametrize("room", [Room(5), Room(HUGE)])
def test_withdraw_of_an_unknown_room_is_answered_and_keeps_the_link(liar, room):
    liar.hello()
    liar.send(hand_off.Withdraw(epoch=Epoch(2), room=room))
    answer = liar.next()
    assert (type(answer), answer.room) == (hand_off.Released, room)
    assert liar.prefill.agent.statistics().num_links == 1


def test_withdraw_over_a_different_link_is_answered_and_stops_nothing(liar, cluster):
    decode = cluster.decode(epoch=9)
    rig.request(decode, liar.prefill)
    liar.prefill.wait_until(lambda now: now.num_early_grants == 1)
    liar.hello()
    liar.send(hand_off.Withdraw(epoch=Epoch(2), room=ROOM))
    assert isinstance(liar.next(), hand_off.Released)
    liar.prefill.agent.expect(ROOM)
    rig.push_all(liar.prefill)
    decode.next(RoomLanded)
    assert isinstance(liar.prefill.next(), RoomGranted)
    assert isinstance(liar.prefill.next(), PushDone)
    decode.close()


# ── a prefill that lies to decode ────────────────────────────────────────────────────────────────


@pytest.fixture
def false_prefill(cluster, stack):
    """A port that decode takes for a prefill's."""
    decode = cluster.decode(timeouts=calm_receiver(connect_s=10), clock=cluster.clock)
    prefill = rig.fake_prefill(stack)
    prefill.decode = decode
    rig.meet(prefill, decode)
    yield prefill
    serve_the_next(cluster.prefill(), decode)
    now = decode.agent.statistics()
    assert (now.num_reserving, now.num_granted, now.num_withdrawn, now.num_fencing) == (0,) * 4


def come_to_grant(false_prefill):
    """Be an honest prefill as far as the grant."""
    false_prefill.welcome()
    false_prefill.expect(hand_off.Grant)


def is_cut_off(false_prefill, cluster):
    """Check that a link that lied is gone, and what it was offered."""
    assert false_prefill.decode.agent.statistics().num_links == 0
    with MemoryRegion.private(64) as source, pytest.raises(TransferRefused):
        cluster.transport.connect(false_prefill.hello.offers[0], source)


def failed_in_time(decode, clock):
    """Let time pass for decode until its request has failed."""
    for _ in patiently():
        for event in decode.agent.events():
            assert isinstance(event, RoomFailed), event
            return event
        clock.now_s += 0.5
        wait([], 0.005, decode.waker)
    raise AssertionError(decode.agent)


@pytest.mark.parametrize("room", [ROOM, Room(ROOM + 1)])
def test_a_write_outside_the_grant_is_refused_and_counted(cluster, false_prefill, room):
    come_to_grant(false_prefill)
    decode, page_bytes = false_prefill.decode, rig.layout().page_bytes
    ungranted = min(set(range(16)) - set(DECODE_PAGES))
    plan = CopyPlan(*(np.array([each]) for each in (0, ungranted * page_bytes, page_bytes)))
    with MemoryRegion.private(page_bytes) as source:
        connection = cluster.transport.connect(false_prefill.hello.offers[0], source)
        with pytest.raises(TransferRefused):
            connection.write(room, plan)
    assert decode.agent.statistics().num_refused == 1
    false_prefill.release(ROOM)
    decode.next(RoomFailed)


@pytest.mark.parametrize(
    "lie",
    [
        {"transport": "carrier pigeon"},
        {"transport": ""},
        {"transport": "x" * 100_000},
        {"first_head": -1},
        {"first_head": 1},
        {"num_heads": 3},
        {"num_heads": -1},
        {"first_head": HUGE, "num_heads": HUGE},
    ],
)
def test_welcome_for_an_unoffered_transport_fails_the_request_and_the_link(
    cluster, false_prefill, lie
):
    false_prefill.welcome(**lie)
    assert isinstance(false_prefill.decode.next(RoomFailed).error, PeerLost)
    false_prefill.decode.wait_until(lambda now: now.num_links == 0)


@pytest.mark.parametrize("version", [0, hand_off.PROTOCOL + 1])
def test_welcome_in_another_version_fails_the_request_and_the_link(false_prefill, version):
    false_prefill.welcome(protocol=version)
    assert false_prefill.decode.next(RoomFailed).error.code == "protocol_mismatch"
    false_prefill.decode.wait_until(lambda now: now.num_links == 0)


def test_a_rank_is_redirected_once(cluster, false_prefill, stack):
    own = rig.fake_prefill(stack)
    false_prefill.say("Redirect", address=RankAddress(own.port))
    assert own.expect(hand_off.Hello) == false_prefill.hello
    with capture_logs() as told:
        own.say("Redirect", address=RankAddress(false_prefill.port))
        assert "redirected twice" in false_prefill.decode.next(RoomFailed).error.message
    assert "kv_control.failed" not in [line["event"] for line in told]


@pytest.mark.parametrize("port", [-HUGE, -1, 0, 1, 65536, HUGE])
def test_redirect_to_a_closed_port_fails_the_request(cluster, false_prefill, port):
    false_prefill.say("Redirect", address=RankAddress(port))
    assert isinstance(failed_in_time(false_prefill.decode, cluster.clock).error, PeerLost)


def test_redirect_to_a_host_name_fails_the_request(cluster, false_prefill):
    false_prefill.say("Redirect", address=RankAddress(1, "elsewhere"))
    assert "no IP address" in false_prefill.decode.next(RoomFailed).error.message


LIES_ON_A_LINK_THAT_IS_UP = {
    "another welcome": lambda liar: liar.welcome(epoch=Epoch(6)),
    "redirect": lambda liar: liar.say("Redirect", address=RankAddress(liar.port)),
    "refusal": lambda liar: liar.refuse(""),
}


@pytest.mark.parametrize("lie", LIES_ON_A_LINK_THAT_IS_UP)
def test_unexpected_message_on_an_open_link_drops_the_link(cluster, false_prefill, lie):
    come_to_grant(false_prefill)
    LIES_ON_A_LINK_THAT_IS_UP[lie](false_prefill)
    false_prefill.decode.next(RoomLost)
    assert false_prefill.decode.next() == RoomSafe(ROOM)
    is_cut_off(false_prefill, cluster)


@pytest.mark.parametrize(
    "checksums",
    [
        *([1], [1] * 3, [0] * 4, [1] * 5, [2**64 - 1] * 1_000_000),
        *([-1] * 4, [-(2**63)] * 4),
    ],
)
def test_landed_with_wrong_checksums_or_a_wrong_number_of_them_fails(false_prefill, checksums):
    come_to_grant(false_prefill)
    false_prefill.land(ROOM, checksums=checksums)
    assert false_prefill.decode.next(RoomFailed).error.code == "kv_corrupted"


@pytest.mark.parametrize("lie", [{"epoch": Epoch(6)}, {"room": Room(43)}, {"room": Room(-HUGE)}])
def test_last_messages_of_another_epoch_or_room_and_duplicates_are_ignored(false_prefill, lie):
    false_prefill.land(ROOM)  # before the welcome
    come_to_grant(false_prefill)
    false_prefill.land(**{"room": ROOM, **lie})
    false_prefill.release(**{"room": ROOM, **lie})
    false_prefill.release(ROOM)
    false_prefill.land(ROOM)
    assert false_prefill.decode.next(RoomFailed).room == ROOM


@pytest.mark.parametrize("status", [-1, 0, 200, 999, HUGE])
def test_error_with_an_invalid_status_keeps_its_message(false_prefill, status):
    come_to_grant(false_prefill)
    info = ErrorInfo(code="no such code", message="so it is", status=status)
    false_prefill.release(ROOM, error=info)
    error = false_prefill.decode.next(RoomFailed).error
    assert (error.message, error.status) == ("so it is", 500)
