"""The suite for transports catches each of these broken ones."""

import hmac
import threading
from contextlib import closing

import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.errors import TandemError
from tests.conformance import test_transport as suite
from tests.conformance.mutants import cases, check_complete, omits, replaces
from tests.conformance.pair import Pair
from tests.loopback import LoopbackConnection, LoopbackListener, LoopbackTransport

# A broken transport may also fail in the middle of a test.
CAUGHT = (AssertionError, ValueError, IndexError, TandemError, pytest.fail.Exception)


def copies(copy):
    return replaces(LoopbackConnection, "copy", copy)


def copy_into_the_next_page_too(honest, self, room, plan, flip=0):
    honest(self, room, plan, flip)
    source, pool = self._source.array(), self._listener._pool
    for begin, to, size in plan.copies():
        place = (to + pool.page_bytes) % pool.size_bytes
        pool.region.array()[place : place + size] = source[begin : begin + size]


def copy_whole_pages_only(honest, self, room, plan, flip=0):
    is_large = plan.size_bytes >= 4096
    columns = (plan.source_offset, plan.destination_offset, plan.size_bytes)
    honest(self, room, CopyPlan(*(column[is_large] for column in columns)), flip)


def need_a_first_copy(honest, self, room, plan, flip=0):
    assert plan.size_bytes[0]
    honest(self, room, plan, flip)


class Everything(dict):
    """Permits that let everything in."""

    def check(self, room, plan):
        """Let it in."""

    def permit(self, room, page_ids):
        """Forget it."""


def admit_to_everything(honest, self, toward_host):
    admission = honest(self, toward_host)
    self._permits[admission.peer] = Everything()
    return admission


def fence_everybody(honest, self, _peer):
    for each in list(self._permits):
        honest(self, each)


def connect_by_any_offer(_honest, self, _offer, region):
    peer, listener = next(iter(self._listeners.items()))
    return LoopbackConnection(self, listener, peer, region)


FENCED = "a_fenced_peer_cannot_write_and_the_others_can"
SCATTERED = "scattered_pages_land_only_at_their_destinations"
REVOKED = "a_write_after_the_grant_was_revoked_is_refused"
MUTANTS = {
    "writes_into_the_next_page": (SCATTERED, copies(copy_into_the_next_page_too)),
    "returns_before_it_writes": (SCATTERED, omits(LoopbackConnection, "write")),
    "copies_whole_pages_only": (
        "pages_of_another_size_land_in_slices",
        copies(copy_whole_pages_only),
    ),
    "needs_a_first_copy": ("an_empty_plan_lands_at_once", copies(need_a_first_copy)),
    "looks_at_no_permit": (
        f"a_write_outside_the_grant_is_refused {REVOKED} a_copy_that_leaves_the_pool_is_refused "
        "the_room_that_marks_ungranted_pages_cannot_write_them",
        replaces(LoopbackListener, "admit", admit_to_everything),
    ),
    "never_revokes": (REVOKED, omits(LoopbackListener, "revoke")),
    "never_fences": (
        f"{FENCED} the_offer_of_a_fenced_peer_is_refused",
        omits(LoopbackListener, "fence"),
    ),
    "fences_everybody": (FENCED, replaces(LoopbackListener, "fence", fence_everybody)),
    "writes_after_it_was_closed": (
        "a_closed_connection_does_not_write",
        omits(LoopbackConnection, "close"),
    ),
    "takes_every_offer": (
        "an_invalid_offer_is_refused",
        replaces(LoopbackTransport, "connect", connect_by_any_offer),
    ),
    "fences_a_moment_later": (
        "nothing_is_written_after_a_busy_writer_was_fenced",
        replaces(
            LoopbackListener,
            "fence",
            lambda *call: threading.Timer(0.05, *call[:1], call[1:]).start(),
        ),
    ),
}


@pytest.mark.parametrize(("caught_by", "patch"), cases(MUTANTS))
def test_a_broken_transport_is_caught(caught_by, patch, monkeypatch):
    test = vars(suite)[caught_by]
    patch(monkeypatch)
    with closing(Pair(LoopbackTransport())) as broken, pytest.raises(CAUGHT):
        test(broken, **first_arguments(test))


def test_transport_that_checks_no_secret_is_caught(monkeypatch):
    with closing(Pair(TcpTransport())) as broken:
        suite.test_the_secret_of_one_peer_is_refused_for_another(broken)
        monkeypatch.setattr(hmac, "compare_digest", lambda *_both: True)
        with pytest.raises(CAUGHT):
            suite.test_the_secret_of_one_peer_is_refused_for_another(broken)


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
    check_complete(suite, MUTANTS, "test_the_secret_of_one_peer_is_refused_for_another")
