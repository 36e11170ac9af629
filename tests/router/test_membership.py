import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.membership.membership import (
    MAX_CHECK_INTERVAL_S,
    REMOVAL_KEPT_S,
    Announcement,
    Member,
    Membership,
)
from tandem.wire.errors import InvalidRequest

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def urls(membership) -> list[str]:
    return [member.url for member in membership.members().members]


class Heard:
    """A membership and what is announced to it, on a clock of its own."""

    def __init__(self, *listed: Member) -> None:
        self.membership, self.now = Membership(listed), 100.0
        self.up: set[str] = set()
        self.look(0)

    def announce(self, url: str, **fields) -> None:
        self.membership.announce(Announcement(url=url, **fields))

    def look(self, after_s: float) -> list[str]:
        """Look for expired announcements as often as the router does; return those that are forgotten."""
        over = []
        while True:
            over += self.membership.expire(self.now, self.up.__contains__)
            if after_s <= 0:
                return [one.url for one in over]
            self.now += min(1.0, after_s)
            after_s -= 1.0


def test_source_removes_only_nodes_that_it_found():
    membership = Membership([Member(A, "prefill")])
    membership.update_source("dns", [Member(A, "decode"), Member(B, "decode")])
    membership.update_source("pods", [Member(B, "decode"), Member(C)])
    assert urls(membership) == [A, B, C]
    membership.update_source("dns", [])
    assert urls(membership) == [A, B, C]
    membership.update_source("pods", [])
    assert urls(membership) == [A]


def test_listed_node_wins_over_announced_and_discovered_ones():
    heard = Heard(Member(A, "prefill", 8998))
    heard.announce(A, role="decode")
    heard.announce(B, role="decode", zone="z")
    heard.membership.update_source(
        "dns", [Member(B, "prefill", source="dns"), Member(C, source="dns")]
    )
    assert heard.membership.members().members == [
        Member(A, "prefill", 8998),
        Member(B, "decode", zone="z", source="announced"),
        Member(C, source="dns"),
    ]


def test_lease_expires_unless_it_is_renewed_or_the_node_is_up():
    heard = Heard()
    heard.announce(A, ttl_s=10.0)
    assert heard.look(9) == []
    heard.announce(A, ttl_s=10.0)
    assert heard.look(9) == []
    heard.up.add(A)
    assert heard.look(60) == []
    heard.up.clear()
    assert heard.look(9) == []
    assert urls(heard.membership) == [A]
    assert heard.look(3) == [A]
    assert urls(heard.membership) == []


def test_node_announced_without_a_ttl_never_expires():
    heard = Heard()
    heard.announce(A)
    assert heard.look(10_000) == []
    assert urls(heard.membership) == [A]


def test_paused_router_expires_no_lease():
    heard = Heard()
    heard.announce(A, ttl_s=10.0)
    heard.now += 3600
    assert heard.look(10 - MAX_CHECK_INTERVAL_S) == []
    assert urls(heard.membership) == [A]


def test_removed_node_stays_removed_until_it_is_announced_again():
    heard = Heard(Member(A))
    heard.membership.update_source("dns", [Member(B)])
    for url in (A, B):
        heard.announce(url, is_removed=True, hands_over=url == B)
    assert heard.look(10 * REMOVAL_KEPT_S) == []
    assert urls(heard.membership) == []
    assert heard.membership.members().handing_over == [B]
    heard.announce(A, ttl_s=10.0)
    assert urls(heard.membership) == [A]


def test_node_can_be_removed_at_the_announcement_limit(monkeypatch):
    monkeypatch.setattr("tandem.router.membership.membership.MAX_ANNOUNCED", 1)
    heard = Heard(Member(A))
    heard.announce(B)
    with pytest.raises(InvalidRequest, match="limit"):
        heard.announce(C)
    heard.announce(A, is_removed=True)
    assert urls(heard.membership) == [B]


def test_removal_is_forgotten_after_the_last_source_drops_the_node():
    heard = Heard()
    heard.membership.update_source("dns", [Member(A)])
    heard.announce(A, is_removed=True)
    heard.membership.update_source("dns", [])
    assert heard.look(REMOVAL_KEPT_S + 2) == [A]
    heard.membership.update_source("dns", [Member(A)])  # another pod has the address
    assert urls(heard.membership) == [A]


@given(st.lists(st.tuples(st.sampled_from(["dns", "pods"]), st.sets(st.sampled_from([A, B, C])))))
def test_members_are_listed_nodes_and_the_nodes_of_all_sources(findings):
    membership = Membership([Member(A)])
    for source, found in findings:
        membership.update_source(source, [Member(url) for url in found])
    assert set(urls(membership)) == {A}.union(*dict(findings).values())
