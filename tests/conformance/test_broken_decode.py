"""The suite for decode nodes catches each of these broken ones."""

import secrets

import pytest
from msgspec.structs import replace

from tandem.kvtransfer.agents.receiver import LandPart
from tandem.kvtransfer.agents.receiver_links import PrefillLinks
from tandem.kvtransfer.transports.base import Permits
from tandem.kvtransfer.transports.tcp_stream import TcpListener
from tandem.wire.channel import Link
from tandem.wire.errors import ErrorInfo
from tandem.wire.hand_off import (
    PROTOCOL,
    Grant,
    Hello,
    Landed,
    LinkPing,
    Refused,
    Released,
    Welcome,
    Withdraw,
)
from tests.conformance import test_decode as suite
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


def sends(kind, change):
    """Return a patch: messages of this kind are changed before they are sent, or dropped for None."""

    def send(honest, self, message):
        other = change(message) if isinstance(message, kind) else message
        if other is not None:
            honest(self, other)

    return replaces(Link, "send", send)


def hears(kind, change):
    """Return a patch: messages of this kind are taken for others, or passed over for None."""

    def hear(honest, self, link, message):
        other = change(link, message) if isinstance(message, kind) else message
        if other is not None:
            honest(self, link, other)

    return replaces(PrefillLinks, "_handle", hear)


def grants(change):
    return sends(Grant, lambda grant: replace(grant, page_ids=change(grant.page_ids)))


def ignores(kind):
    return hears(kind, lambda *_args: None)


SILENT = "silent_prefill_is_lost_and_fenced"
GONE_ON = "decode_continues_from_a_landed_prompt"
AFTER = "a_write_after_the_last_message_is_refused"
WHAT = Refused(error=ErrorInfo(code="message_invalid", message="what is that?"))
MUTANTS = {
    "offers_nothing": (
        "decode_introduces_itself",
        sends(Hello, lambda hello: replace(hello, offers=[])),
    ),
    "grants_a_page_twice": (GONE_ON, grants(lambda pages: [pages[0]] * len(pages))),
    "grants_pages_outside_of_its_pool": (
        GONE_ON,
        grants(lambda pages: [page + 1000 for page in pages]),
    ),
    "grants_too_few_pages": (GONE_ON, grants(lambda pages: pages[1:])),
    "ignores_landings": (f"{GONE_ON} pages_without_checksums_land", ignores(Landed)),
    "never_pings": ("both_ends_ping", sends(LinkPing, lambda _ping: None)),
    "ignores_releases": (
        "request_that_prefill_released_fails_with_its_reason",
        ignores(Released),
    ),
    "never_withdraws": (
        "pages_of_a_withdrawn_grant_are_not_reused_until_the_last_message a_withdrawal_may_cross_the_landing",
        sends(Withdraw, lambda _withdraw: None),
    ),
    "looks_at_no_checksum": (
        "pages_that_differ_from_their_checksums_fail a_page_that_was_not_written_fails",
        omits(LandPart, "verify", ""),
    ),
    "looks_at_no_epoch": (
        "last_messages_of_another_epoch_or_room_are_ignored",
        hears(Landed, lambda link, landed: replace(landed, epoch=link.epoch)),
    ),
    "lets_every_write_in": (
        f"a_write_outside_of_the_grant_is_refused a_write_in_another_room_is_refused {AFTER}",
        omits(Permits, "check"),
    ),
    "never_closes_pages": (AFTER, omits(TcpListener, "revoke")),
    "takes_every_transport_for_tcp": (
        "a_welcome_for_an_unoffered_transport_fails_the_request",
        hears(Welcome, lambda _link, welcome: replace(welcome, transport="tcp")),
    ),
    "takes_false_frames_for_messages": (
        "invalid_frames_are_ignored",
        takes_false_frames_for(WHAT),
    ),
    "takes_known_fields_only": (
        "fields_of_a_newer_prefill_are_ignored",
        takes_known_fields_only,
    ),
    "takes_every_version": (
        "a_welcome_in_an_unknown_version_fails_the_request",
        hears(Welcome, lambda _link, welcome: replace(welcome, protocol=PROTOCOL)),
    ),
    "ignores_refusals": (
        "a_refused_link_fails_the_request_with_the_reason",
        ignores(Refused),
    ),
    "never_takes_silence_for_a_loss": (SILENT, never_takes_silence_for_a_loss),
    "reports_a_fence_that_is_none": (SILENT, omits(TcpListener, "fence")),
    "gives_every_peer_the_same_secret": (
        SILENT,
        replaces(secrets, "token_bytes", lambda _honest, size: bytes(size)),
    ),
}


@pytest.mark.parametrize(("caught_by", "patch"), cases(MUTANTS))
def test_a_broken_decode_is_caught(caught_by, patch, make_prefill, monkeypatch):
    check_caught(suite, caught_by, patch, make_prefill, monkeypatch)


def test_pages_that_are_granted_again_too_early_are_caught(make_prefill):
    half = make_prefill()
    agent = half.node

    def cancel(room):
        agent.node.agent.withdraw(room)
        agent.free = agent.pages[room] + agent.free

    agent.cancel = cancel
    with pytest.raises(AssertionError, match="granted again"):
        suite.test_pages_of_a_withdrawn_grant_are_not_reused_until_the_last_message(half)


def test_every_test_of_the_suite_catches_a_mutant():
    check_complete(suite, MUTANTS)
