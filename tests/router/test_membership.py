from hypothesis import given
from hypothesis import strategies as st

from tandem.router.membership import MAX_LOOK_S, REMOVAL_KEPT_S, Member, Membership, Said

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def urls(membership) -> list[str]:
    return list(membership.wanted())


class Heard:
    """A membership and what is said to it, on a clock of its own."""

    def __init__(self, *listed: Member) -> None:
        self.membership, self.said, self.now = Membership(listed), {}, 100.0
        self.up: set[str] = set()
        self.num_marks = 0
        self.look(0)

    def say(self, url: str, **fields) -> None:
        self.num_marks += 1
        self.said[url] = Said(url=url, mark=str(self.num_marks), **fields)
        self.look(0)

    def look(self, after_s: float) -> list[str]:
        """Look at what was said, as often as the router does; return what is to be forgotten."""
        over = []
        while True:
            over += self.membership.hear(self.said, self.now, self.up.__contains__)
            self.said = {url: one for url, one in self.said.items() if one not in over}
            if after_s <= 0:
                return [one.url for one in over]
            self.now += min(1.0, after_s)
            after_s -= 1.0


def test_a_source_takes_away_only_what_it_gave():
    membership = Membership([Member(A, "prefill")])
    membership.give("dns", [Member(A, "decode"), Member(B, "decode")])
    membership.give("pods", [Member(B, "decode"), Member(C)])
    assert urls(membership) == [A, B, C]
    membership.give("dns", [])
    assert urls(membership) == [A, B, C]
    membership.give("pods", [])
    assert urls(membership) == [A]


def test_who_named_a_node_by_hand_is_believed_before_who_announced_it_and_who_found_it():
    heard = Heard(Member(A, "prefill", 8998))
    heard.say(A, role="decode")
    heard.say(B, role="decode", zone="z")
    heard.membership.give("dns", [Member(B, "prefill", source="dns"), Member(C, source="dns")])
    assert list(heard.membership.wanted().values()) == [
        Member(A, "prefill", 8998),
        Member(B, "decode", zone="z", source="announced"),
        Member(C, source="dns"),
    ]


def test_a_lease_holds_while_it_is_renewed_or_the_node_is_up_and_then_runs_out():
    heard = Heard()
    heard.say(A, ttl_s=10.0)
    assert heard.look(9) == []
    heard.say(A, ttl_s=10.0)
    assert heard.look(9) == []
    heard.up.add(A)
    assert heard.look(60) == []
    heard.up.clear()
    assert heard.look(9) == []
    assert urls(heard.membership) == [A]
    assert heard.look(3) == [A]
    assert urls(heard.membership) == []


def test_without_a_lease_a_node_stays():
    heard = Heard()
    heard.say(A)
    assert heard.look(10_000) == []
    assert urls(heard.membership) == [A]


def test_a_router_that_was_stopped_takes_nobody_for_silent():
    heard = Heard()
    heard.say(A, ttl_s=10.0)
    heard.now += 3600
    assert heard.look(10 - MAX_LOOK_S) == []
    assert urls(heard.membership) == [A]


def test_a_removal_holds_against_every_source_until_the_node_is_announced_again():
    heard = Heard(Member(A))
    heard.membership.give("dns", [Member(B)])
    for url in (A, B):
        heard.say(url, is_removed=True, hands_over=url == B)
    assert heard.look(10 * REMOVAL_KEPT_S) == []
    assert urls(heard.membership) == []
    assert [heard.membership.hands_over(url) for url in (A, B, C)] == [False, True, False]
    heard.say(A, ttl_s=10.0)
    assert urls(heard.membership) == [A]


def test_a_removal_is_forgotten_when_no_source_names_the_node_any_more():
    heard = Heard()
    heard.membership.give("dns", [Member(A)])
    heard.say(A, is_removed=True)
    heard.membership.give("dns", [])
    assert heard.look(REMOVAL_KEPT_S + 2) == [A]
    heard.membership.give("dns", [Member(A)])  # another pod has the address
    assert urls(heard.membership) == [A]


@given(st.lists(st.tuples(st.sampled_from(["dns", "pods"]), st.sets(st.sampled_from([A, B, C])))))
def test_whatever_sources_say_a_listed_node_stays_and_all_that_they_name_now_is_wanted(findings):
    membership = Membership([Member(A)])
    for source, found in findings:
        membership.give(source, [Member(url) for url in found])
    assert set(urls(membership)) == {A}.union(*dict(findings).values())
