"""What decode nodes rely on in a prefill node. Each test is a function of a `DecodePlayer`, and makes its links."""

from typing import Any

import msgspec

from tandem.conformance.play_decode import MARK, NUM_PAGES, DecodePlayer
from tandem.wire.generation import Epoch, new_room
from tandem.wire.hand_off import PROTOCOL, Refused, Released, TransportOffer, Welcome


def refusal(decode: DecodePlayer, **lies: Any) -> str:
    """Return the code with which a Hello that lies is refused, over a new connection."""
    decode.reconnect()
    answer = decode.hello(**lies)
    assert isinstance(answer, Refused), f"{answer} came to a Hello with {lies}"
    return answer.error.code


# ── good paths ───────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_lands_whole_in_its_pages_and_nowhere_else(decode: DecodePlayer) -> None:
    decode.stand()
    decode.hand_over()
    decode.check_rests()


def test_a_grant_may_come_after_the_request(decode: DecodePlayer) -> None:
    decode.stand()
    room, num_tokens = new_room(), 2 * decode.layout.page_size
    decode.node.start(room, num_tokens)
    assert decode.settle() == []
    decode.grant(room=room)
    decode.landed(room, num_tokens)


def test_tokens_that_decode_holds_are_not_pushed(decode: DecodePlayer) -> None:
    decode.stand()
    num_tokens = 3 * decode.layout.page_size
    room = decode.grant(2, have_tokens=decode.layout.page_size)
    decode.node.start(room, num_tokens)
    decode.landed(room, num_tokens)


def test_many_rooms_go_over_one_link(decode: DecodePlayer) -> None:
    decode.stand()
    for _ in range(4):
        decode.hand_over()
    decode.check_rests()


def test_both_ends_ping(decode: DecodePlayer) -> None:
    decode.stand()
    assert decode.num_pings(6) >= 3, "prefill does not ping"


# ── what decode takes back ───────────────────────────────────────────────────────────────────────


def test_a_grant_that_nobody_asked_for_yet_is_released_on_withdrawal(decode: DecodePlayer) -> None:
    decode.stand()
    room = decode.grant()
    decode.withdraw(room)
    assert isinstance(decode.last(room), Released)
    decode.check_rests()
    decode.hand_over()


def test_a_withdrawal_of_an_unknown_room_is_answered(decode: DecodePlayer) -> None:
    decode.stand()
    room = new_room()
    decode.withdraw(room)
    assert isinstance(decode.last(room), Released)


def test_a_withdrawal_of_a_room_that_landed_is_answered(decode: DecodePlayer) -> None:
    decode.stand()
    num_tokens = decode.layout.page_size
    room = decode.grant(1)
    decode.node.start(room, num_tokens)
    decode.landed(room, num_tokens)
    decode.withdraw(room)
    assert isinstance(decode.last(room), Released)


def test_nothing_is_written_after_the_last_message_of_a_withdrawn_room(
    decode: DecodePlayer,
) -> None:
    decode.stand()
    room = decode.grant(3)
    decode.node.start(room, 3 * decode.layout.page_size)
    decode.wait_written(room)
    decode.withdraw(room)
    if not isinstance(decode.last(room), Released):
        assert isinstance(decode.last(room), Released), "a Withdraw that crossed Landed"
    decode.check_rests()
    decode.hand_over()


# ── lies of a decode ─────────────────────────────────────────────────────────────────────────────


def test_another_model_is_refused(decode: DecodePlayer) -> None:
    assert refusal(decode, fingerprint="of another model") == "layout_mismatch"
    decode.stand()


def test_other_layouts_are_refused(decode: DecodePlayer) -> None:
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


def test_offers_of_unknown_transports_are_refused(decode: DecodePlayer) -> None:
    pigeon = TransportOffer(name="carrier_pigeon", descriptor={})
    for offers in ([], [pigeon], [TransportOffer(name="tcp", descriptor={"host": 5})]):
        assert refusal(decode, offers=offers) == "transfer_refused", offers
    decode.stand()


def test_an_offer_with_another_secret_is_refused(decode: DecodePlayer) -> None:
    offer = decode.listener.admit(decode.node.host).offer
    false = TransportOffer(name="tcp", descriptor={**offer.descriptor, "secret": "00" * 32})
    assert refusal(decode, offers=[false]) == "transfer_refused"
    decode.stand()


def test_a_grant_of_pages_that_cannot_be_costs_the_room(decode: DecodePlayer) -> None:
    decode.stand()
    lies: list[dict[str, Any]] = [
        {"page_ids": [NUM_PAGES]},
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


def test_a_grant_of_more_pages_than_the_prompt_has_costs_the_room(decode: DecodePlayer) -> None:
    decode.stand()
    room = decode.grant(3)
    decode.node.start(room, decode.layout.page_size)
    assert isinstance(decode.last(room), Released), "pages that were never written landed"
    decode.pages[:] = MARK
    decode.hand_over()


def test_a_room_that_is_granted_twice_costs_the_link(decode: DecodePlayer) -> None:
    decode.stand()
    room = decode.grant()
    decode.grant(room=room, page_ids=[4, 5])
    decode.expect(Refused)
    decode.withdraw(room)
    decode.expect(Refused)
    decode.stand()
    decode.hand_over()


def test_a_message_of_another_epoch_is_refused(decode: DecodePlayer) -> None:
    decode.stand()
    decode.grant(epoch=Epoch(decode.epoch ^ 1))
    decode.expect(Refused)


def test_a_message_before_hello_is_refused(decode: DecodePlayer) -> None:
    decode.reconnect()
    decode.withdraw(new_room())
    decode.expect(Refused)


def test_a_second_hello_of_one_life_ends_the_first_link(decode: DecodePlayer) -> None:
    decode.stand()
    answers = [decode.hello(), decode.next()]
    assert [type(each) for each in answers] == [Refused, Welcome]
    decode.hand_over()


def test_frames_that_are_no_message_are_passed_over(decode: DecodePlayer) -> None:
    decode.stand()
    for frame in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Welcome"})):
        decode.send_raw(frame)
    decode.hand_over()


# ── versions ─────────────────────────────────────────────────────────────────────────────────────


def test_a_version_that_is_too_old_is_refused(decode: DecodePlayer) -> None:
    assert refusal(decode, protocol=0) == "protocol_mismatch"
    decode.stand()


def test_a_newer_decode_is_answered_in_a_version_that_both_speak(decode: DecodePlayer) -> None:
    decode.reconnect()
    welcome = decode.hello(protocol=1_000)
    assert isinstance(welcome, Welcome)
    assert 1 <= welcome.protocol <= PROTOCOL


def test_fields_of_a_newer_decode_are_ignored(decode: DecodePlayer) -> None:
    new: dict[str, Any] = {"a_field_of_the_future": [1, {"two": None}]}
    decode.stand(**new)
    room, num_tokens = new_room(), decode.layout.page_size
    decode.grant(1, room=room, **new)
    decode.node.start(room, num_tokens)
    decode.landed(room, num_tokens)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────


def test_a_decode_that_falls_silent_is_lost_with_its_grants(decode: DecodePlayer) -> None:
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


def test_a_decode_that_comes_back_finds_a_node_that_serves(decode: DecodePlayer) -> None:
    decode.stand()
    decode.grant()
    decode.epoch = Epoch(decode.epoch ^ 1)
    decode.stand()
    decode.hand_over()
