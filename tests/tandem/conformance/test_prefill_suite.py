"""The suite for prefill nodes passes an honest agent, and catches each of these broken ones."""

import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tandem.conformance import test_prefill as suite
from tandem.kvtransfer import bootstrap, push_room, sender
from tandem.kvtransfer.bootstrap import BootstrapPort
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.push_room import PushPart
from tandem.kvtransfer.sender import PrefillAgent
from tandem.kvtransfer.transports.lanes import StreamConnection
from tandem.wire.errors import TransferRefused
from tandem.wire.hand_off import Hello, Landed, LinkPing, Released
from tests.tandem.conformance.mutants import (
    Mutants,
    never_takes_silence_for_a_loss,
    takes_false_frames_for,
    takes_known_fields_only,
)

MUTANTS = Mutants(
    suite,
    {
        "test_both_ends_ping": "pings",
        "test_a_decode_that_falls_silent_is_lost_with_its_grants": "silence",
    },
)
of = MUTANTS.of


@pytest.mark.parametrize("name", MUTANTS.tests)
def test_an_honest_prefill_passes(name, decode_player, monkeypatch):
    MUTANTS.check_honest(name, decode_player, monkeypatch)


# ── broken ones: each patches the agent, and names the test that catches it ──────────────────────


def sends(patch, change):
    """Have every message of the agent changed: to none, one or several others."""
    send = BootstrapPort.send

    def changed(self, link, message):
        for each in change(message):
            send(self, link, each)

    patch.setattr(BootstrapPort, "send", changed)


def lands(patch, change):
    """Have every Landed of the agent changed."""
    sends(patch, lambda word: [change(word) if isinstance(word, Landed) else word])


def writes(patch, write):
    """Have `write(connection, room, plan, honestly)` do every write of the agent."""
    honest = StreamConnection.write
    patch.setattr(
        StreamConnection,
        "write",
        lambda self, room, plan: write(lambda other: honest(self, room, other), plan),
    )


WHOLE = "a_prompt_lands_whole_in_its_pages_and_nowhere_else"


@of(WHOLE)
def never_lands(patch):
    sends(patch, lambda word: [] if isinstance(word, Landed) else [word])


@of(WHOLE)
def lands_twice(patch):
    sends(patch, lambda word: [word] * (2 if isinstance(word, Landed) else 1))


@of(WHOLE)
def lands_another_room(patch):
    lands(patch, lambda word: msgspec.structs.replace(word, room=word.room ^ 1))


@of(WHOLE)
def lands_in_another_epoch(patch):
    lands(patch, lambda word: msgspec.structs.replace(word, epoch=word.epoch + 1))


@of(WHOLE)
def sums_up_wrongly(patch):
    honest = push_room.page_sums
    patch.setattr(push_room, "page_sums", lambda *args, **kw: [n ^ 1 for n in honest(*args, **kw)])


@of(WHOLE)
def swaps_keys_and_values(patch):
    def write(honestly, plan):
        half = rig_slab()
        pieces = [
            (s + at, d + (at ^ half), half)
            for s, d, size in plan.copies()
            for at in range(0, size, half)
        ]
        honestly(plan_of(pieces))

    writes(patch, write)


@of(WHOLE)
def leaves_the_last_bytes_out(patch):
    def write(honestly, plan):
        sizes = plan.size_bytes.copy()
        sizes[-1] -= 8
        honestly(replace(plan, size_bytes=sizes))

    writes(patch, write)


@of(WHOLE)
def writes_into_the_next_page(patch):
    def write(honestly, plan):
        honestly(plan)
        page_bytes = rig_slab() * 4
        beyond = [(s, d + 5 * page_bytes, size) for s, d, size in plan.copies()]
        with pytest.raises(TransferRefused):
            honestly(plan_of(beyond))

    writes(patch, write)


@of(WHOLE, "nothing_is_written_after_the_last_message_of_a_withdrawn_room")
def writes_once_more_after_the_end(patch):
    def write(honestly, plan):
        honestly(plan)
        threading.Timer(0.02, attempt, (honestly, plan)).start()

    writes(patch, write)


@of("a_grant_may_come_after_the_request")
def forgets_a_request_without_a_grant(patch):
    honest = PrefillAgent._expect

    def expect(self, room, now_s):
        if room in self._rooms:
            honest(self, room, now_s)

    patch.setattr(PrefillAgent, "_expect", expect)


@of("tokens_that_decode_holds_are_not_pushed")
def pushes_from_the_beginning(patch):
    honest = PrefillAgent._take_grant

    def take(self, link, grant, known):
        honest(self, link, msgspec.structs.replace(grant, have_tokens=0), known)

    patch.setattr(PrefillAgent, "_take_grant", take)


@of("both_ends_ping")
def never_pings(patch):
    sends(patch, lambda word: [] if isinstance(word, LinkPing) else [word])


@of("a_grant_that_nobody_asked_for_yet_is_released_on_withdrawal")
def ignores_withdrawals(patch):
    sends(patch, lambda word: [] if isinstance(word, Released) else [word])


@of(
    "a_withdrawal_of_an_unknown_room_is_answered",
    "a_withdrawal_of_a_room_that_landed_is_answered",
)
def answers_withdrawals_of_known_rooms_only(patch):
    honest = PrefillAgent._release

    def release(self, link, room, error):
        if error is not None:
            honest(self, link, room, error)

    patch.setattr(PrefillAgent, "_release", release)


@of("another_model_is_refused")
def takes_every_model(patch):
    honest = BootstrapPort._paired

    def paired(self, hello):
        known = hello.layout.dtype != "none"
        name = self._end.fingerprint if known else hello.fingerprint
        return honest(self, msgspec.structs.replace(hello, fingerprint=name))

    patch.setattr(BootstrapPort, "_paired", paired)


@of("other_layouts_are_refused")
def takes_every_dtype(patch):
    honest = KVLayout.holds_same_heads

    def same(self, other):
        return self.dtype == "of another kind" or honest(self, other)

    patch.setattr(KVLayout, "holds_same_heads", same)


@of("offers_of_unknown_transports_are_refused", "an_offer_with_another_secret_is_refused")
def welcomes_without_a_transport(patch):
    honest = bootstrap.choose

    def choose(offers, allowed, region):
        try:
            return honest(offers, allowed, region)
        except TransferRefused:
            return "tcp", None

    patch.setattr(bootstrap, "choose", choose)


@of("a_grant_of_pages_that_cannot_be_costs_the_room")
def looks_at_no_grant(patch):
    patch.setattr(sender, "grant_fault", lambda grant, layout: "")


@of("a_grant_of_more_pages_than_the_prompt_has_costs_the_room")
def lands_pages_that_it_never_wrote(patch):
    patch.setattr(PushPart, "check_complete", lambda self, page_size: None)
    patch.setattr(PushPart, "sum_up", lambda self, region, layout: None)


@of("a_room_that_is_granted_twice_costs_the_link")
def takes_a_grant_twice(patch):
    patch.setattr(PushPart, "may_write", lambda self, link: False)


@of("a_message_of_another_epoch_is_refused")
def looks_at_no_epoch(patch):
    honest = BootstrapPort._hear

    def hear(self, peer, message):
        link = self.links.get(peer)
        if link is not None and not isinstance(message, Hello):
            message = msgspec.structs.replace(message, epoch=link.epoch)
        honest(self, peer, message)

    patch.setattr(BootstrapPort, "_hear", hear)


@of("a_message_before_hello_is_refused", "a_second_hello_of_one_life_ends_the_first_link")
def refuses_nobody_by_message(patch):
    honest = BootstrapPort._refuse

    def refuse(self, peer, error):
        if error.code != "peer_lost":
            honest(self, peer, error)

    patch.setattr(BootstrapPort, "_refuse", refuse)


of("frames_that_are_no_message_are_passed_over")(takes_false_frames_for(LinkPing(epoch=0)))
of("fields_of_a_newer_decode_are_ignored")(takes_known_fields_only)
of("a_decode_that_falls_silent_is_lost_with_its_grants")(never_takes_silence_for_a_loss)


@of("a_version_that_is_too_old_is_refused")
def takes_every_version(patch):
    patch.setattr(bootstrap, "OLDEST_PROTOCOL", -9)


@of("a_newer_decode_is_answered_in_a_version_that_both_speak")
def echoes_the_version(patch):
    patch.setattr(bootstrap, "PROTOCOL", 2**31)


def rig_slab():
    """Return the bytes of K, or of V, of one layer of a page of the rig."""
    return 2 * 4 * 8 * 4


def plan_of(copies):
    return CopyPlan(*(np.array(column, np.int64) for column in zip(*copies, strict=True)))


def attempt(write, plan):
    """Write although it is too late: whatever comes of it."""
    try:
        write(plan)
    except Exception:  # noqa: BLE001 - the link may be closed by now
        return


@pytest.mark.parametrize(("caught_by", "patch"), MUTANTS.cases)
def test_a_broken_prefill_is_caught(caught_by, patch, decode_player, monkeypatch):
    MUTANTS.check_caught(caught_by, patch, decode_player, monkeypatch)


def test_every_test_of_the_suite_catches_a_mutant():
    MUTANTS.check_complete(
        "test_many_rooms_go_over_one_link",
        "test_a_decode_that_comes_back_finds_a_node_that_serves",
    )
