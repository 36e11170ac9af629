"""The behaviour of a prefill node that decode nodes rely on. Each test makes its own links."""

import msgspec

from tandem.wire.generation import Epoch, Room, new_room
from tandem.wire.hand_off import PROTOCOL, Landed, Refused, Released, TransportOffer, Welcome
from tests.conformance.played_decode import MARK


def refusal(decode, **lies):
    """Return the code with which a Hello that lies is refused, over a new connection."""
    decode.reconnect()
    answer = decode.hello(**lies)
    assert isinstance(answer, Refused), f"{answer} came to a Hello with {lies}"
    return answer.error.code


# ── good paths ───────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_lands_completely_in_its_pages_and_nowhere_else(decode):
    decode.stand()
    decode.hand_over()
    decode.check_rests()


def test_a_grant_may_come_after_the_request(decode):
    decode.stand()
    room, num_tokens = new_room(), 2 * decode.layout.page_size
    decode.node.start(room, num_tokens)
    assert decode.settle() == []
    decode.grant(room=room)
    decode.landed(room, num_tokens)


def test_tokens_that_decode_holds_are_not_pushed(decode):
    decode.stand()
    decode.hand_over(have_pages=1)


def test_many_rooms_go_over_one_link(decode):
    decode.stand()
    for _ in range(4):
        decode.hand_over()
    decode.check_rests()


def test_both_ends_ping(decode):
    decode.stand()
    assert decode.num_pings(6) >= 3, "prefill does not ping"


# ── what decode takes back ───────────────────────────────────────────────────────────────────────


def test_a_grant_without_a_request_is_released_on_withdrawal(decode):
    decode.stand()
    room = decode.grant()
    decode.withdraw(room)
    assert isinstance(decode.last(room), Released)
    decode.check_rests()
    decode.hand_over()


def test_a_withdrawal_of_an_unknown_room_is_answered(decode):
    decode.stand()
    for room in (new_room(), Room(2**62)):
        decode.withdraw(room)
        assert isinstance(decode.last(room), Released)


def test_a_withdrawal_of_a_room_that_landed_is_answered(decode):
    decode.stand()
    room = decode.hand_over()
    decode.withdraw(room)
    assert isinstance(decode.last(room), Released)


def test_nothing_is_written_after_the_last_message_of_a_withdrawn_room(decode):
    decode.stand()
    room = decode.grant([1, 2, 3])
    decode.node.start(room, 3 * decode.layout.page_size)
    decode.wait_written(room)
    decode.withdraw(room)
    if isinstance(decode.last(room), Landed):  # it crossed Withdraw
        assert isinstance(decode.last(room), Released)
    decode.check_rests()
    decode.hand_over()


# ── lies of a decode ─────────────────────────────────────────────────────────────────────────────


def test_another_model_is_refused(decode):
    assert refusal(decode, fingerprint="of another model") == "layout_mismatch"
    decode.stand()


def test_other_layouts_are_refused(decode):
    layout = decode.layout
    for lie in (
        {"dtype": "of another kind"},
        {"num_layers": layout.num_layers + 1},
        {"head_dim": layout.head_dim + 1},
        {"itemsize": 2 * layout.itemsize},
        {"page_size": 0},
        {"num_pages": -1},
    ):
        false = msgspec.to_builtins(layout) | lie
        assert refusal(decode, layout=false) == "layout_mismatch", lie
    decode.stand()


def test_offers_of_unknown_transports_are_refused(decode):
    pigeon = TransportOffer(name="carrier_pigeon", descriptor={})
    for offers in ([], [pigeon], [TransportOffer(name="tcp", descriptor={"host": 5})]):
        assert refusal(decode, offers=offers) == "transfer_refused", offers
    decode.stand()


def test_an_offer_with_another_secret_is_refused(decode):
    offer = decode.listener.admit(decode.node.host).offer
    false = TransportOffer(name="tcp", descriptor={**offer.descriptor, "secret": "00" * 32})
    assert refusal(decode, offers=[false]) == "transfer_refused"
    decode.stand()


def test_a_grant_of_invalid_pages_fails_the_room(decode):
    decode.stand()
    lies = [
        {"page_ids": [decode.num_pages]},
        {"page_ids": [-1]},
        {"page_ids": [1, 1]},
        {"have_tokens": decode.layout.page_size + 1},
        {"have_tokens": -decode.layout.page_size},
    ]
    for lie in lies:
        room = decode.grant(**lie)
        released = decode.last(room)
        assert isinstance(released, Released), f"{released} came to a grant with {lie}"
        assert released.error is not None
        assert released.error.code == "transfer_refused", lie
    decode.hand_over()


def test_a_grant_of_more_pages_than_the_prompt_has_fails_the_room(decode):
    decode.stand()
    room = decode.grant([1, 2, 3])
    decode.node.start(room, decode.layout.page_size)
    assert isinstance(decode.last(room), Released), "pages that were never written landed"
    decode.pages[:] = MARK
    decode.hand_over()


def test_a_room_that_is_granted_twice_drops_the_link(decode):
    decode.stand()
    room = decode.grant()
    decode.grant([4, 5], room=room)
    decode.expect(Refused)
    decode.withdraw(room)
    decode.expect(Refused)
    decode.stand()
    decode.hand_over()


def test_a_message_of_another_epoch_is_refused(decode):
    decode.stand()
    decode.grant(epoch=Epoch(decode.epoch ^ 1))
    decode.expect(Refused)


def test_a_message_before_hello_is_refused(decode):
    decode.reconnect()
    decode.withdraw(new_room())
    decode.expect(Refused)


def test_a_second_hello_of_one_epoch_ends_the_first_link(decode):
    decode.stand()
    answers = [decode.hello(), decode.next()]
    assert [type(each) for each in answers] == [Refused, Welcome]
    decode.hand_over()


def test_invalid_frames_are_ignored(decode):
    decode.stand()
    for frame in (
        b"",
        b"\xc1",
        b"\x80" * 1000,
        bytes(1 << 20),
        msgspec.msgpack.encode({"type": "Welcome"}),
    ):
        decode.send_raw(frame)
    decode.hand_over()


# ── versions ─────────────────────────────────────────────────────────────────────────────────────


def test_a_decode_of_another_version_is_refused(decode):
    for version in (0, PROTOCOL + 1, 1_000):
        assert refusal(decode, protocol=version) == "protocol_mismatch", version
    decode.stand()


def test_fields_of_a_newer_decode_are_ignored(decode):
    new = {"a_field_of_the_future": [1, {"two": None}]}
    decode.stand(**new)
    decode.hand_over(**new)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────


def test_silent_decode_is_lost_with_its_grants(decode):
    decode.stand()
    room = decode.grant()
    decode.is_pinging = False
    refused = decode.expect(Refused)
    assert refused.error.code == "peer_lost"
    decode.is_pinging = True
    decode.withdraw(room)
    decode.expect(Refused)
    decode.stand()
    decode.hand_over()


def test_a_decode_that_reconnects_is_served(decode):
    decode.stand()
    decode.grant()
    decode.epoch = Epoch(decode.epoch ^ 1)
    decode.stand()
    decode.hand_over()
