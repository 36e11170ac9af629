"""The suite for decode nodes passes an honest agent, and catches each of these broken ones."""

import secrets

import msgspec
import pytest

from tandem.conformance import test_decode as suite
from tandem.kvtransfer import prefill_links
from tandem.kvtransfer.prefill_links import PrefillLinks
from tandem.kvtransfer.receiver import LandPart
from tandem.kvtransfer.transports.base import Permits
from tandem.kvtransfer.transports.tcp_stream import TcpListener
from tandem.wire.channel import Link
from tandem.wire.errors import ErrorInfo
from tandem.wire.hand_off import Grant, Hello, Landed, LinkPing, Refused, Released, Withdraw
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
        "test_a_prefill_that_falls_silent_is_lost_and_fenced": "silence",
    },
)
of = MUTANTS.of


@pytest.mark.parametrize("name", MUTANTS.tests)
def test_an_honest_decode_passes(name, prefill_player, monkeypatch):
    MUTANTS.check_honest(name, prefill_player, monkeypatch)


# ── broken ones: each patches the agent, and names the tests that catch it ───────────────────────


def sends(patch, change):
    """Have every message of the agent changed: to another, or to none."""
    honest = Link.send

    def send(self, message):
        if (other := change(message)) is not None:
            honest(self, other)

    patch.setattr(Link, "send", send)


def ignores(patch, *kinds):
    """Have the agent pass over messages of these kinds."""
    honest = PrefillLinks._hear

    def hear(self, link, message):
        if not isinstance(message, kinds):
            honest(self, link, message)

    patch.setattr(PrefillLinks, "_hear", hear)


def grants(patch, change):
    """Have the page ids of each grant changed."""
    sends(
        patch,
        lambda word: (
            msgspec.structs.replace(word, page_ids=change(word.page_ids))
            if isinstance(word, Grant)
            else word
        ),
    )


@of("decode_introduces_itself")
def offers_nothing(patch):
    sends(
        patch,
        lambda word: msgspec.structs.replace(word, offers=[]) if isinstance(word, Hello) else word,
    )


@of("a_prompt_that_landed_is_gone_on_from")
def grants_a_page_twice(patch):
    grants(patch, lambda pages: [pages[0]] * len(pages))


@of("a_prompt_that_landed_is_gone_on_from")
def grants_pages_outside_of_its_pool(patch):
    grants(patch, lambda pages: [page + 1000 for page in pages])


@of("a_prompt_that_landed_is_gone_on_from")
def grants_too_few_pages(patch):
    grants(patch, lambda pages: pages[1:])


@of("a_prompt_that_landed_is_gone_on_from", "pages_without_checksums_land")
def ignores_landings(patch):
    ignores(patch, Landed)


@of("both_ends_ping")
def never_pings(patch):
    sends(patch, lambda word: None if isinstance(word, LinkPing) else word)


@of("a_request_that_prefill_gave_up_fails_with_its_reason")
def ignores_releases(patch):
    ignores(patch, Released)


@of("pages_of_a_withdrawn_grant_rest_until_the_last_message", "a_withdrawal_may_cross_the_landing")
def never_withdraws(patch):
    sends(patch, lambda word: None if isinstance(word, Withdraw) else word)


@of("pages_of_other_bytes_than_their_checksums_fail", "a_page_that_was_not_written_fails")
def looks_at_no_checksum(patch):
    patch.setattr(LandPart, "verify", lambda *_args: "")


@of("last_messages_of_another_life_or_room_are_passed_over")
def looks_at_no_epoch(patch):
    honest = PrefillLinks._hear

    def hear(self, link, message):
        if isinstance(message, Landed):
            message = msgspec.structs.replace(message, epoch=link.epoch)
        honest(self, link, message)

    patch.setattr(PrefillLinks, "_hear", hear)


@of(
    "a_write_outside_of_the_grant_is_refused",
    "a_write_in_another_room_is_refused",
    "a_write_after_the_last_message_is_refused",
)
def lets_every_write_in(patch):
    patch.setattr(Permits, "check", lambda *_args: None)


@of("a_write_after_the_last_message_is_refused")
def never_closes_pages(patch):
    patch.setattr(TcpListener, "revoke", lambda *_args: None)


@of("a_welcome_to_what_was_not_offered_fails_the_request")
def takes_every_transport_for_tcp(patch):
    honest = PrefillLinks._welcome

    def welcome(self, link, message):
        honest(self, link, msgspec.structs.replace(message, transport="tcp"))

    patch.setattr(PrefillLinks, "_welcome", welcome)


WHAT = Refused(error=ErrorInfo(code="message_invalid", message="what is that?"))
of("frames_that_are_no_message_are_passed_over")(takes_false_frames_for(WHAT))
of("fields_of_a_newer_prefill_are_ignored")(takes_known_fields_only)
of("a_prefill_that_falls_silent_is_lost_and_fenced")(never_takes_silence_for_a_loss)


@of("a_welcome_in_an_unknown_version_fails_the_request")
def takes_every_version(patch):
    patch.setattr(prefill_links, "PROTOCOL", 2**31)


@of("a_refused_link_fails_the_request_with_the_reason")
def ignores_refusals(patch):
    ignores(patch, Refused)


@of("a_prefill_that_falls_silent_is_lost_and_fenced")
def reports_a_fence_that_is_none(patch):
    patch.setattr(TcpListener, "fence", lambda *_args: None)


@of("a_prefill_that_falls_silent_is_lost_and_fenced")
def gives_every_peer_the_same_secret(patch):
    patch.setattr(secrets, "token_bytes", bytes)


@pytest.mark.parametrize(("caught_by", "patch"), MUTANTS.cases)
def test_a_broken_decode_is_caught(caught_by, patch, prefill_player, monkeypatch):
    MUTANTS.check_caught(caught_by, patch, prefill_player, monkeypatch)


def test_pages_that_are_granted_again_too_early_are_caught(prefill_player):
    player = prefill_player("")
    subject = player.node

    def cancel(room):
        subject.node.agent.withdraw(room)
        subject.free = subject.pages[room] + subject.free

    subject.cancel = cancel
    with pytest.raises(AssertionError, match="granted again"):
        suite.test_pages_of_a_withdrawn_grant_rest_until_the_last_message(player)


def test_every_test_of_the_suite_catches_a_mutant():
    MUTANTS.check_complete()
