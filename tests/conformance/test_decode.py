"""The behaviour of a decode node that prefill nodes rely on. Each test makes its own links."""

import time

import msgspec
import pytest

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import PROTOCOL, Withdraw


def is_fenced(prefill, offer):
    """Tell whether an offer is worth nothing any more."""
    with MemoryRegion.private(64) as source:
        try:
            TcpTransport().connect(offer, source).close()
        except TransferRefused:
            return True
    prefill.stay_alive()
    return False


# ── good paths ───────────────────────────────────────────────────────────────────────────────────


def test_decode_introduces_itself(prefill):
    room = prefill.meet()
    hello = prefill.hello
    assert hello.fingerprint
    assert hello.protocol == PROTOCOL
    assert 0 < len(hello.offers) <= 16
    assert prefill.offer().descriptor["secret"]
    layout = KVLayout.from_info(hello.layout)
    assert layout.page_size == prefill.node.page_size
    prefill.node.cancel(room)


def test_decode_continues_from_a_landed_prompt(prefill):
    prefill.finish(prefill.stand())
    for _ in range(3):
        prefill.hand_over()


def test_pages_without_checksums_land(prefill):
    grant = prefill.stand()
    prefill.write(grant.room, *grant.page_ids)
    prefill.land(grant.room)
    assert prefill.outcome(grant.room) == "landed"


def test_both_ends_ping(prefill):
    grant = prefill.stand()
    assert prefill.num_pings(6) >= 3, "decode does not ping"
    prefill.finish(grant)


# ── what prefill gives up, and decode takes back ─────────────────────────────────────────────────


def test_request_that_prefill_released_fails_with_its_reason(prefill):
    grant = prefill.stand()
    prefill.release(grant.room, "engine_failed")
    assert prefill.outcome(grant.room) == "engine_failed"
    prefill.hand_over()


def test_pages_of_a_withdrawn_grant_are_not_reused_until_the_last_message(prefill):
    first = prefill.stand()
    prefill.node.cancel(first.room)
    assert prefill.expect(Withdraw).room == first.room
    second = prefill.granted(prefill.start())
    both = set(first.page_ids) & set(second.page_ids)
    assert not both, f"pages {both} were granted again, and a write may come into them"
    prefill.write(first.room, *first.page_ids)
    prefill.release(first.room)
    prefill.finish(second)
    prefill.hand_over()


def test_a_withdrawal_may_cross_the_landing(prefill):
    grant = prefill.stand()
    prefill.node.cancel(grant.room)
    assert prefill.expect(Withdraw).room == grant.room
    prefill.write(grant.room, *grant.page_ids)
    prefill.land(grant.room, checksums=prefill.sums(grant))
    prefill.release(grant.room)
    prefill.hand_over()


# ── lies of a prefill ────────────────────────────────────────────────────────────────────────────


def test_pages_that_differ_from_their_checksums_fail(prefill):
    grant = prefill.stand()
    for lie in (prefill.sums(grant)[:1], [1, 2], [0] * 3):
        prefill.write(grant.room, *grant.page_ids)
        prefill.land(grant.room, checksums=lie)
        assert prefill.outcome(grant.room) == "kv_corrupted", lie
        grant = prefill.granted(prefill.start())
    prefill.finish(grant)


def test_a_page_that_was_not_written_fails(prefill):
    grant = prefill.stand()
    prefill.write(grant.room, grant.page_ids[0])
    prefill.land(grant.room, checksums=[prefill.sums(grant)[0], 1])
    assert prefill.outcome(grant.room) == "kv_corrupted"
    prefill.hand_over()


def test_last_messages_of_another_epoch_or_room_are_ignored(prefill):
    grant = prefill.stand()
    prefill.land(grant.room, epoch=prefill.epoch ^ 1)
    prefill.land(grant.room ^ 1)
    assert prefill.settle() == []
    assert prefill.node.outcome(grant.room) == "", "a message of another life ended the request"
    prefill.finish(grant)
    prefill.land(grant.room)
    prefill.release(grant.room)
    prefill.hand_over()


def test_a_write_outside_of_the_grant_is_refused(prefill):
    grant = prefill.stand()
    other = min(set(range(prefill.layout.num_pages)) - set(grant.page_ids))
    with pytest.raises(TransferRefused):
        prefill.write(grant.room, grant.page_ids[0], other)
    prefill.release(grant.room)
    assert prefill.outcome(grant.room)


def test_a_write_in_another_room_is_refused(prefill):
    grant = prefill.stand()
    with pytest.raises(TransferRefused):
        prefill.write(type(grant.room)(grant.room ^ 1), *grant.page_ids)
    prefill.release(grant.room)
    assert prefill.outcome(grant.room)


def test_a_write_after_the_last_message_is_refused(prefill):
    grant = prefill.stand()
    prefill.finish(grant)
    with pytest.raises(TransferRefused):
        prefill.write(grant.room, *grant.page_ids)


def test_a_welcome_for_an_unoffered_transport_fails_the_request(prefill):
    room = prefill.meet()
    prefill.welcome(transport="carrier_pigeon")
    assert prefill.outcome(room) == "peer_lost"
    prefill.finish(prefill.stand())


def test_invalid_frames_are_ignored(prefill):
    grant = prefill.stand()
    for frame in (
        b"",
        b"\xc1",
        b"\x80" * 1000,
        bytes(1 << 20),
        msgspec.msgpack.encode({"type": "Hello"}),
    ):
        prefill.send_raw(frame)
    prefill.finish(grant)


# ── versions ─────────────────────────────────────────────────────────────────────────────────────


def test_a_welcome_in_an_unknown_version_fails_the_request(prefill):
    room = prefill.meet()
    prefill.welcome(protocol=1_000)
    assert prefill.outcome(room) != "landed"
    prefill.finish(prefill.stand())


def test_fields_of_a_newer_prefill_are_ignored(prefill):
    new = {"a_field_of_the_future": [1, {"two": None}]}
    prefill.finish(prefill.stand(**new), **new)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────


def test_a_refused_link_fails_the_request_with_the_reason(prefill):
    room = prefill.meet()
    prefill.refuse("layout_mismatch")
    assert prefill.outcome(room) == "layout_mismatch"
    prefill.finish(prefill.stand())


def test_silent_prefill_is_lost_and_fenced(prefill):
    grant, offer = prefill.stand(), prefill.offer()
    prefill.is_pinging = False
    assert prefill.outcome(grant.room) == "peer_lost"
    deadline_s = time.monotonic() + prefill.patience_s
    while not is_fenced(prefill, offer):
        assert time.monotonic() < deadline_s, "the offer of a lost link still lets writers in"
    with pytest.raises(PeerLost):
        prefill.write(grant.room, *grant.page_ids)
    prefill.is_pinging = True
    second = prefill.stand()
    assert prefill.offer().descriptor["secret"] != offer.descriptor["secret"]
    prefill.finish(second)
