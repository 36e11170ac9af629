"""The suite for prefill nodes catches each of these broken ones."""

import dataclasses
import threading

import numpy as np
import pytest
from msgspec.structs import replace

from tandem.kvtransfer.agents import sender, sender_links, sender_rooms
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_links import BootstrapPort
from tandem.kvtransfer.agents.sender_rooms import PushPart
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.transports.lanes import StreamConnection
from tandem.wire.errors import TransferRefused
from tandem.wire.hand_off import PROTOCOL, Hello, Landed, LinkPing, Released
from tests.conformance import test_prefill as suite
from tests.conformance.mutants import (
    cases,
    check_caught,
    check_complete,
    never_takes_silence_for_a_loss,
    omits,
    replaces,
    takes_false_frames_for,
    takes_known_fields_only,
)
from tests.kvtransfer.rig import layout

PAGE_BYTES = layout().page_bytes
SLAB_BYTES = PAGE_BYTES // layout().num_layers // 2


def sends(kind, change):
    """Return a patch: messages of this kind become none, one or several others."""

    def send(honest, self, link, message):
        for each in change(message) if isinstance(message, kind) else [message]:
            honest(self, link, each)

    return replaces(BootstrapPort, "send", send)


def lands(change):
    """Return a patch: fields of every Landed are changed."""
    return sends(Landed, lambda landed: [replace(landed, **change(landed))])


def writes(write):
    """Return a patch: `write(honestly, plan)` does every write."""

    def changed(honest, self, room, plan):
        write(lambda other: honest(self, room, other), plan)

    return replaces(StreamConnection, "write", changed)


def greets(change):
    """Return a patch: Hello is changed before it is checked."""
    return replaces(
        BootstrapPort, "_pair_with", lambda honest, self, hello: honest(self, change(self, hello))
    )


def plan_of(copies):
    return CopyPlan(*(np.array(column, np.int64) for column in zip(*copies, strict=True)))


def swap_keys_and_values(honestly, plan):
    slabs = [
        (begin + at, to + (at ^ SLAB_BYTES), SLAB_BYTES)
        for begin, to, size in plan.copies()
        for at in range(0, size, SLAB_BYTES)
    ]
    honestly(plan_of(slabs))


def leave_the_last_bytes_out(honestly, plan):
    sizes = plan.size_bytes.copy()
    sizes[-1] -= 8
    honestly(dataclasses.replace(plan, size_bytes=sizes))


def write_into_another_page(honestly, plan):
    honestly(plan)
    with pytest.raises(TransferRefused):
        honestly(plan_of([(s, d + 5 * PAGE_BYTES, size) for s, d, size in plan.copies()]))


def write_once_more_after_the_end(honestly, plan):
    honestly(plan)
    threading.Timer(0.02, attempt, (honestly, plan)).start()


def attempt(write, plan):
    """Write although it is too late: whatever comes of it."""
    try:
        write(plan)
    except Exception:  # noqa: BLE001 - the link may be closed by now
        return


def expect_granted_only(honest, self, room, now_s):
    if room in self._rooms:
        honest(self, room, now_s)


def release_for_a_reason_only(honest, self, link, room, error):
    if error is not None:
        honest(self, link, room, error)


def take_every_model(port, hello):
    is_known = hello.layout.dtype != "none"
    return replace(hello, fingerprint=port._end.fingerprint) if is_known else hello


def choose_tcp(honest, *args):
    try:
        return honest(*args)
    except TransferRefused:
        return "tcp", None


def lands_pages_that_it_never_wrote(patch):
    omits(PushPart, "check_complete")(patch)
    omits(PushPart, "add_checksums")(patch)


def hear_in_every_epoch(honest, self, peer, message):
    link = self.links.get(peer)
    if link is not None and not isinstance(message, Hello):
        message = replace(message, epoch=link.epoch)
    honest(self, peer, message)


def refuse_no_lost_peer(honest, self, peer, error):
    if error.code != "peer_lost":
        honest(self, peer, error)


WHOLE = "a_prompt_lands_completely_in_its_pages_and_nowhere_else"
MUTANTS = {
    "never_lands": (WHOLE, sends(Landed, lambda _landed: [])),
    "lands_twice": (WHOLE, sends(Landed, lambda landed: [landed] * 2)),
    "lands_another_room": (WHOLE, lands(lambda landed: {"room": landed.room ^ 1})),
    "lands_in_another_epoch": (WHOLE, lands(lambda landed: {"epoch": landed.epoch + 1})),
    "sums_up_wrongly": (
        WHOLE,
        replaces(
            sender_rooms,
            "page_sums",
            lambda honest, *args, **kw: [n ^ 1 for n in honest(*args, **kw)],
        ),
    ),
    "swaps_keys_and_values": (WHOLE, writes(swap_keys_and_values)),
    "leaves_the_last_bytes_out": (WHOLE, writes(leave_the_last_bytes_out)),
    "writes_into_another_page": (WHOLE, writes(write_into_another_page)),
    "writes_once_more_after_the_end": (
        f"{WHOLE} nothing_is_written_after_the_last_message_of_a_withdrawn_room",
        writes(write_once_more_after_the_end),
    ),
    "forgets_a_request_without_a_grant": (
        "a_grant_may_come_after_the_request",
        replaces(PrefillAgent, "_expect", expect_granted_only),
    ),
    "pushes_from_the_beginning": (
        "tokens_that_decode_holds_are_not_pushed",
        replaces(
            PrefillAgent,
            "_take_grant",
            lambda honest, self, link, grant, known: honest(
                self, link, replace(grant, have_tokens=0), known
            ),
        ),
    ),
    "never_pings": ("both_ends_ping", sends(LinkPing, lambda _ping: [])),
    "ignores_withdrawals": (
        "a_grant_without_a_request_is_released_on_withdrawal",
        sends(Released, lambda _released: []),
    ),
    "answers_withdrawals_of_known_rooms_only": (
        "a_withdrawal_of_an_unknown_room_is_answered a_withdrawal_of_a_room_that_landed_is_answered",
        replaces(PrefillAgent, "_release", release_for_a_reason_only),
    ),
    "takes_every_model": ("another_model_is_refused", greets(take_every_model)),
    "takes_every_dtype": (
        "other_layouts_are_refused",
        replaces(
            KVLayout,
            "holds_same_heads",
            lambda honest, self, other: self.dtype == "of another kind" or honest(self, other),
        ),
    ),
    "welcomes_without_a_transport": (
        "offers_of_unknown_transports_are_refused an_offer_with_another_secret_is_refused",
        replaces(sender_links, "choose", choose_tcp),
    ),
    "looks_at_no_grant": (
        "a_grant_of_invalid_pages_fails_the_room",
        omits(sender, "grant_fault", ""),
    ),
    "lands_pages_that_it_never_wrote": (
        "a_grant_of_more_pages_than_the_prompt_has_fails_the_room",
        lands_pages_that_it_never_wrote,
    ),
    "takes_a_grant_twice": (
        "a_room_that_is_granted_twice_drops_the_link",
        omits(PushPart, "may_write", result=False),
    ),
    "looks_at_no_epoch": (
        "a_message_of_another_epoch_is_refused",
        replaces(BootstrapPort, "_handle", hear_in_every_epoch),
    ),
    "refuses_nobody_by_message": (
        "a_message_before_hello_is_refused a_second_hello_of_one_epoch_ends_the_first_link",
        replaces(BootstrapPort, "_refuse", refuse_no_lost_peer),
    ),
    "takes_false_frames_for_messages": (
        "invalid_frames_are_ignored",
        takes_false_frames_for(LinkPing(epoch=0)),
    ),
    "takes_known_fields_only": ("fields_of_a_newer_decode_are_ignored", takes_known_fields_only),
    "takes_every_version": (
        "a_decode_of_another_version_is_refused",
        greets(lambda _port, hello: replace(hello, protocol=PROTOCOL)),
    ),
    "never_takes_silence_for_a_loss": (
        "silent_decode_is_lost_with_its_grants",
        never_takes_silence_for_a_loss,
    ),
}


@pytest.mark.parametrize(("caught_by", "patch"), cases(MUTANTS))
def test_a_broken_prefill_is_caught(caught_by, patch, make_decode, monkeypatch):
    check_caught(suite, caught_by, patch, make_decode, monkeypatch)


def test_every_test_of_the_suite_catches_a_mutant():
    check_complete(
        suite,
        MUTANTS,
        "test_many_rooms_go_over_one_link",
        "test_a_decode_that_reconnects_is_served",
    )
