"""A peer that lies, field by field: the other end stays whole, says so, and serves the next."""

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from tandem.kvtransfer.bootstrap import MAX_OFFERS
from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, PushDone, Safe
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire import hand_off
from tandem.wire.channel import MAX_MESSAGE_BYTES, wait
from tandem.wire.errors import ErrorInfo, PeerLost, TransferRefused
from tandem.wire.generation import Epoch, Room
from tandem.wire.hand_off import LayoutInfo
from tests.calm import calm_receiver
from tests.kvtransfer import rig
from tests.kvtransfer.rig import DECODE_PAGES, ROOM, serve_the_next
from tests.patience import patiently

HUGE = 2**62


# ── a decode that lies to prefill ────────────────────────────────────────────────────────────────


class LyingDecode(rig.FakeDecode):
    """A decode of one prefill of its own."""

    def __init__(self, stack, cluster):
        self.prefill = cluster.prefill()
        super().__init__(stack, self.prefill.agent.port, cluster.transport)


@pytest.fixture
def liar(cluster, stack):
    liar = LyingDecode(stack, cluster)
    yield liar
    serve_the_next(liar.prefill, cluster.decode(epoch=9))


def test_whoever_did_not_say_hello_is_told_so(liar):
    liar.say(hand_off.LinkPing(epoch=Epoch(2)))
    assert isinstance(liar.next(), hand_off.Refused)


def test_a_message_of_another_epoch_is_refused(liar):
    liar.hello()
    liar.grant([1], epoch=Epoch(3))
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
    *[({"protocol": version}, "protocol") for version in (0, -1, -HUGE)],
]


@pytest.mark.parametrize(("lies", "kind"), FALSE_HELLOS)
def test_a_hello_that_lies_is_refused(liar, lies, kind):
    code = {
        "layout": "layout_mismatch",
        "offer": "transfer_refused",
        "protocol": "protocol_mismatch",
    }[kind]
    assert liar.hello(**lies).error.code == code
    liar.prefill.wait_until(lambda now: now.num_links == 0)


def test_offers_without_end_are_refused_before_any_is_tried(liar, cluster, monkeypatch):
    tried = []
    monkeypatch.setattr(cluster.transport, "connect", lambda *args: tried.append(args))
    liar.hello(**offers(MAX_OFFERS + 1, {}))
    assert not tried
    monkeypatch.undo()


def test_a_decode_of_another_model_learns_what_prefill_serves(liar):
    answer = liar.hello(fingerprint="another")
    assert answer.fingerprint == "llama"
    assert KVLayout.from_info(answer.layout) == rig.layout()


def test_a_newer_decode_is_answered_in_the_version_that_prefill_speaks(liar):
    assert liar.hello(protocol=HUGE).protocol == hand_off.PROTOCOL


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_second_hello_on_a_link_ends_the_first(liar, epoch):
    liar.hello()
    liar.say(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[1]))
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
def test_a_grant_that_lies_is_released_at_once(liar, lies):
    liar.hello()
    liar.say(hand_off.Grant(**{"epoch": Epoch(2), "room": ROOM, "page_ids": [1], **lies}))
    assert liar.next().error.code == "transfer_refused"
    assert liar.prefill.agent.statistics().num_early_grants == 0
    assert liar.prefill.agent.statistics().num_refused == 1


def test_a_grant_for_tokens_beyond_every_prompt_is_released_when_prefill_has_finished(liar):
    liar.hello()
    liar.say(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[1], have_tokens=HUGE))
    liar.prefill.agent.expect(ROOM)
    assert liar.prefill.next(Granted).have_tokens == HUGE
    rig.push_all(liar.prefill)
    assert isinstance(liar.next(), hand_off.Released)
    assert liar.prefill.next().error.code == "transfer_refused"


def test_a_room_granted_twice_costs_the_link_since_writes_of_the_first_go_on(liar):
    liar.hello()
    for page in (1, 2):
        liar.say(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[page]))
    assert isinstance(liar.next(), hand_off.Refused)
    liar.prefill.wait_until(lambda now: now.num_links == 0)


@pytest.mark.parametrize("room", [Room(5), Room(HUGE)])
def test_a_withdraw_of_a_room_of_nobody_is_answered_and_the_link_stays(liar, room):
    liar.hello()
    liar.say(hand_off.Withdraw(epoch=Epoch(2), room=room))
    answer = liar.next()
    assert (type(answer), answer.room) == (hand_off.Released, room)
    assert liar.prefill.agent.statistics().num_links == 1


def test_a_withdraw_of_a_room_that_is_over_is_answered_again(liar):
    liar.hello()
    liar.say(hand_off.Grant(epoch=Epoch(2), room=ROOM, page_ids=[], have_tokens=16))
    liar.prefill.agent.expect(ROOM)
    rig.push_all(liar.prefill)
    assert isinstance(liar.next(), hand_off.Landed)
    liar.say(hand_off.Withdraw(epoch=Epoch(2), room=ROOM))
    assert isinstance(liar.next(), hand_off.Released)
    assert isinstance(liar.prefill.next(), Granted)
    assert isinstance(liar.prefill.next(), PushDone)


def test_a_withdraw_over_another_link_than_the_grant_is_answered_and_stops_nothing(liar, cluster):
    decode = cluster.decode(epoch=9)
    rig.request(decode, liar.prefill)
    liar.prefill.wait_until(lambda now: now.num_early_grants == 1)
    liar.hello()
    liar.say(hand_off.Withdraw(epoch=Epoch(2), room=ROOM))
    assert isinstance(liar.next(), hand_off.Released)
    liar.prefill.agent.expect(ROOM)
    rig.push_all(liar.prefill)
    decode.next(Landed)
    assert isinstance(liar.prefill.next(), Granted)
    assert isinstance(liar.prefill.next(), PushDone)
    decode.close()


# ── a prefill that lies to decode ────────────────────────────────────────────────────────────────


class LyingPrefill(rig.FakePrefill):
    """A port that decode takes for a prefill's."""

    def __init__(self, stack, decode):
        super().__init__(stack)
        self.decode = decode
        self.hello = self.meet(decode)

    def stand(self, transport="loopback"):
        """Be an honest prefill as far as the grant."""
        self.welcome(transport=transport)
        self.next(hand_off.Grant)


@pytest.fixture
def false_prefill(cluster, stack):
    decode = cluster.decode(timeouts=calm_receiver(connect_s=10), clock=cluster.clock)
    yield LyingPrefill(stack, decode)
    serve_the_next(cluster.prefill(), decode)
    now = decode.agent.statistics()
    assert (now.num_reserving, now.num_granted, now.num_withdrawn, now.num_fencing) == (0,) * 4


def is_cut_off(false_prefill, cluster):
    """Check that a link that lied is gone, and what it was offered."""
    assert false_prefill.decode.agent.statistics().num_links == 0
    with MemoryRegion.private(64) as source, pytest.raises(TransferRefused):
        cluster.transport.connect(false_prefill.hello.offers[0], source)


def failed_in_time(decode, clock):
    """Let time pass for decode until its request has failed."""
    for _ in patiently():
        for event in decode.agent.events():
            assert isinstance(event, Failed), event
            return event
        clock.now_s += 0.5
        wait([], 0.005, decode.waker)
    raise AssertionError(decode.agent)


@pytest.mark.parametrize("room", [ROOM, Room(ROOM + 1)])
def test_a_write_outside_the_grant_is_refused_and_counted(cluster, false_prefill, room):
    false_prefill.stand()
    decode, page_bytes = false_prefill.decode, rig.layout().page_bytes
    ungranted = min(set(range(16)) - set(DECODE_PAGES))
    plan = CopyPlan(*(np.array([each]) for each in (0, ungranted * page_bytes, page_bytes)))
    with MemoryRegion.private(page_bytes) as source:
        connection = cluster.transport.connect(false_prefill.hello.offers[0], source)
        with pytest.raises(TransferRefused):
            connection.write(room, plan)
    assert decode.agent.statistics().num_refused == 1
    false_prefill.released()
    decode.next(Failed)


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
def test_a_welcome_to_what_was_not_offered_fails_the_request_and_costs_the_link(
    cluster, false_prefill, lie
):
    false_prefill.welcome(**lie)
    assert isinstance(false_prefill.decode.next(Failed).error, PeerLost)
    false_prefill.decode.wait_until(lambda now: now.num_links == 0)


@pytest.mark.parametrize("version", [0, hand_off.PROTOCOL + 1])
def test_a_welcome_in_another_version_fails_the_request_and_costs_the_link(false_prefill, version):
    false_prefill.welcome(protocol=version)
    assert false_prefill.decode.next(Failed).error.code == "protocol_mismatch"
    false_prefill.decode.wait_until(lambda now: now.num_links == 0)


def test_a_pool_in_strips_is_not_written_by_a_prefill_that_knows_none(cluster, stack):
    shape = rig.layout()
    strips = (hand_off.Strip(0, shape.page_bytes + 8, 2 * shape.num_layers),)
    decode = cluster.decode(shape=msgspec.structs.replace(shape, strips=strips))
    prefill = rig.FakePrefill(stack)
    assert prefill.meet(decode).layout.strips == strips
    prefill.welcome(protocol=hand_off.STRIPS_PROTOCOL - 1)
    assert decode.next(Failed).error.code == "protocol_mismatch"


def test_a_rank_is_redirected_once(cluster, false_prefill, stack):
    own = rig.FakePrefill(stack)
    false_prefill.say(hand_off.Redirect(epoch=Epoch(5), port=own.port))
    assert own.next(hand_off.Hello) == false_prefill.hello
    with capture_logs() as told:
        own.say(hand_off.Redirect(epoch=Epoch(5), port=false_prefill.port))
        assert "redirected twice" in false_prefill.decode.next(Failed).error.message
    assert "kv_control.failed" not in [line["event"] for line in told]


@pytest.mark.parametrize("port", [-HUGE, -1, 0, 1, 65536, HUGE])
def test_a_redirect_to_a_port_of_nobody_fails_the_request(cluster, false_prefill, port):
    false_prefill.say(hand_off.Redirect(epoch=Epoch(5), port=port))
    assert isinstance(failed_in_time(false_prefill.decode, cluster.clock).error, PeerLost)


LIES_ON_A_LINK_THAT_IS_UP = {
    "another welcome": lambda liar: liar.welcome(epoch=Epoch(6)),
    "redirect": lambda liar: liar.say(hand_off.Redirect(epoch=Epoch(5), port=liar.port)),
    "refusal": lambda liar: liar.say(hand_off.Refused(error=ErrorInfo(code="", message=""))),
}


@pytest.mark.parametrize("lie", LIES_ON_A_LINK_THAT_IS_UP)
def test_a_word_that_cannot_come_on_a_link_that_is_up_costs_the_link(cluster, false_prefill, lie):
    false_prefill.stand()
    LIES_ON_A_LINK_THAT_IS_UP[lie](false_prefill)
    false_prefill.decode.next(Lost)
    assert false_prefill.decode.next() == Safe(ROOM)
    is_cut_off(false_prefill, cluster)


@pytest.mark.parametrize(
    "checksums",
    [
        *([1], [1] * 3, [0] * 4, [1] * 5, [2**64 - 1] * 1_000_000),
        *([-1] * 4, [-(2**63)] * 4),
    ],
)
def test_a_landed_with_other_checksums_or_another_number_of_them_fails(false_prefill, checksums):
    false_prefill.stand()
    false_prefill.landed(checksums=checksums)
    assert false_prefill.decode.next(Failed).error.code == "kv_corrupted"


@pytest.mark.parametrize("lie", [{"epoch": Epoch(6)}, {"room": Room(43)}, {"room": Room(-HUGE)}])
def test_last_words_of_another_life_or_room_and_second_ones_are_passed_over(false_prefill, lie):
    false_prefill.landed()  # before the welcome
    false_prefill.stand()
    false_prefill.landed(**lie)
    false_prefill.released(**lie)
    false_prefill.released()
    false_prefill.landed()
    assert false_prefill.decode.next(Failed).room == ROOM


@pytest.mark.parametrize("status", [-1, 0, 200, 999, HUGE])
def test_an_error_with_a_status_that_is_none_keeps_its_words(false_prefill, status):
    false_prefill.stand()
    info = ErrorInfo(code="no such code", message="so it is", status=status)
    false_prefill.released(error=info)
    error = false_prefill.decode.next(Failed).error
    assert (error.message, error.status) == ("so it is", 500)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80" * 1000, bytes(1 << 20)])
def test_bytes_that_are_no_message_are_passed_over(false_prefill, frame):
    false_prefill.stand()
    false_prefill.inbox.socket.send_multipart([false_prefill.peer, frame])
    false_prefill.released()
    assert false_prefill.decode.next(Failed).room == ROOM
