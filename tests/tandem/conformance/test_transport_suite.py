"""The suite for transports catches each of these broken ones. `tests/kvtransfer` runs it over ours."""

import hmac
import threading
from contextlib import closing

import pytest

from tandem.conformance import test_transport as suite
from tandem.conformance.pair import Pair
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.errors import TandemError
from tests.loopback import LoopbackConnection, LoopbackListener, LoopbackTransport
from tests.tandem.conformance.mutants import Mutants

MUTANTS = Mutants(suite)
of = MUTANTS.of
# A broken transport may also fail in the middle of a test.
CAUGHT = (AssertionError, ValueError, IndexError, TandemError, pytest.fail.Exception)


@of("scattered_pages_land_where_the_plan_says_and_nowhere_else")
def writes_into_the_next_page(patch):
    honest = LoopbackConnection.copy

    def copy(self, room, plan, flip=0):
        honest(self, room, plan, flip)
        source, pool = self._source.array(), self._listener._pool
        for begin, to, size in plan.copies():
            place = (to + pool.page_bytes) % pool.size_bytes
            pool.region.array()[place : place + size] = source[begin : begin + size]

    patch.setattr(LoopbackConnection, "copy", copy)


@of("scattered_pages_land_where_the_plan_says_and_nowhere_else")
def returns_before_it_writes(patch):
    patch.setattr(LoopbackConnection, "write", lambda *_args: None)


@of("pages_of_another_size_land_in_slices")
def copies_whole_pages_only(patch):
    honest = LoopbackConnection.copy

    def copy(self, room, plan, flip=0):
        is_large = plan.size_bytes >= 4096
        columns = (plan.source_offset, plan.destination_offset, plan.size_bytes)
        honest(self, room, CopyPlan(*(column[is_large] for column in columns)), flip)

    patch.setattr(LoopbackConnection, "copy", copy)


@of("an_empty_plan_lands_at_once")
def needs_a_first_copy(patch):
    honest = LoopbackConnection.copy

    def copy(self, room, plan, flip=0):
        assert plan.size_bytes[0]
        honest(self, room, plan, flip)

    patch.setattr(LoopbackConnection, "copy", copy)


@of(
    "a_write_outside_the_grant_is_refused",
    "a_write_after_the_grant_was_revoked_is_refused",
    "a_page_without_a_grant_is_not_of_the_room_that_stands_for_none",
    "a_copy_that_leaves_the_pool_is_refused",
)
def looks_at_no_permit(patch):
    class Everything(dict):
        def check(self, room, plan):
            """Let it in."""

        def permit(self, room, page_ids):
            """Forget it."""

    honest = LoopbackListener.admit

    def admit(self, toward_host):
        admission = honest(self, toward_host)
        self._permits[admission.peer] = Everything()
        return admission

    patch.setattr(LoopbackListener, "admit", admit)


@of("a_write_after_the_grant_was_revoked_is_refused")
def never_revokes(patch):
    patch.setattr(LoopbackListener, "revoke", lambda *_args: None)


@of(
    "a_fenced_peer_cannot_write_and_the_others_can",
    "a_fenced_peers_offer_is_worth_nothing",
)
def never_fences(patch):
    patch.setattr(LoopbackListener, "fence", lambda *_args: None)


@of("a_fenced_peer_cannot_write_and_the_others_can")
def fences_everybody(patch):
    honest = LoopbackListener.fence

    def fence(self, peer):
        for each in list(self._permits):
            honest(self, each)

    patch.setattr(LoopbackListener, "fence", fence)


@of("a_closed_connection_does_not_write")
def writes_after_it_was_closed(patch):
    patch.setattr(LoopbackConnection, "close", lambda self: None)


@of("an_offer_that_is_not_understood_is_refused")
def takes_every_offer(patch):
    def connect(self, offer, region):
        peer, listener = next(iter(self._listeners.items()))
        return LoopbackConnection(self, listener, peer, region)

    patch.setattr(LoopbackTransport, "connect", connect)


@of("nothing_is_written_after_a_busy_writer_was_fenced")
def fences_a_moment_later(patch):
    honest = LoopbackListener.fence

    def fence(self, peer):
        threading.Timer(0.05, honest, (self, peer)).start()

    patch.setattr(LoopbackListener, "fence", fence)


@pytest.mark.parametrize(("caught_by", "patch"), MUTANTS.cases)
def test_a_broken_transport_is_caught(caught_by, patch, monkeypatch):
    test = vars(suite)[caught_by]
    arguments = first_arguments(test)
    patch(monkeypatch)
    with closing(Pair(LoopbackTransport())) as broken, pytest.raises(CAUGHT):
        test(broken, **arguments)


def test_a_transport_that_looks_at_no_secret_is_caught(monkeypatch):
    with closing(Pair(TcpTransport())) as broken:
        suite.test_a_secret_of_one_peer_is_worth_nothing_for_another(broken)
        monkeypatch.setattr(hmac, "compare_digest", lambda *_both: True)
        with pytest.raises(CAUGHT):
            suite.test_a_secret_of_one_peer_is_worth_nothing_for_another(broken)


def first_arguments(test):
    """Return the first set of arguments that a test of the suite is parametrised with."""
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        names = [names] if isinstance(names, str) else names
        first = values[0] if len(names) > 1 else [values[0]]
        return dict(zip(names, first, strict=True))
    return {}


def test_every_test_of_the_suite_catches_a_mutant():
    # The other one is of TCP, above.
    MUTANTS.check_complete("test_a_secret_of_one_peer_is_worth_nothing_for_another")
