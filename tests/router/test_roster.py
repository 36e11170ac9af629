import pytest

from tandem.router.nodes.cluster import Roster
from tandem.router.nodes.fleet import explain
from tandem.router.nodes.node import Node, NodeUnusable
from tandem.router.nodes.state import ClusterState, RosterEntry
from tandem.wire.messages import ModelInfo, NodeInfo, NodeLoad


class LinkedNode(Node):
    has_client, reported = False, NodeLoad()

    @property
    def is_up(self) -> bool:
        return self.has_client

    @property
    def load(self) -> NodeLoad:
        return self.reported

    def report(self, **load) -> None:
        self.reported = NodeLoad(**load)
        self._link_changed()


def roster_of(*nodes: tuple[str, str]) -> Roster:
    roster = Roster()
    for url, role in nodes:
        roster.add(LinkedNode(url, role, on_change=roster.note_change))
    return roster


def urls(nodes) -> list[str]:
    return [node.url for node in nodes]


def info(role: str, **fields) -> NodeInfo:
    model = ModelInfo(name="m", fingerprint="f", context_length=9, vocab_size=9, eos_token_ids=[2])
    return NodeInfo(role=role, version="1", epoch=1, engine_port=1, model=model, **fields)


def test_load_and_counts_change_the_state_in_place():
    roster = roster_of(("p", "prefill"), ("d", "decode"), ("e", "decode"))
    before = roster.state()
    assert urls(before.prefills) == ["p"]
    assert urls(before.decodes) == ["d", "e"]
    roster.find("d").count(1, 10)
    assert roster.state() is before, "load is no change of what can be served"
    changed, unchanged = before.decodes
    assert (changed.in_flight_requests, changed.in_flight_tokens) == (1, 10)
    assert changed.busy_tokens > unchanged.busy_tokens


def test_equal_load_report_keeps_later_counts():
    node = LinkedNode("d", "decode")
    for _ in range(2):
        node.report(queued_tokens=300)
    node.count_fresh(500)
    node.count_backlog(500)
    node.changed()
    assert (node.entry.fresh_tokens, node.entry.backlog_tokens) == (500, 800)


def test_node_that_is_added_again_replaces_the_old_one():
    roster = roster_of(("p", "prefill"), ("d", "decode"))
    before = roster.state()
    roster.remove(roster.find("d"))
    roster.add(LinkedNode("d", "decode", on_change=roster.note_change))
    (added,) = roster.state().decodes
    assert added is roster.find("d").entry
    assert added is not before.decodes[0]


def test_lost_node_makes_a_new_state():
    roster = roster_of(("p", "prefill"), ("d", "decode"))
    roster.find("d").has_client = True
    roster.find("d").changed()
    before = roster.state()
    roster.find("d").has_client = False
    roster.find("d").changed()
    after = roster.state()
    assert after is not before
    assert after.version > before.version


def test_candidates_update_with_load_and_are_rebuilt_when_a_node_is_lost():
    roster = roster_of(("p", "prefill"), ("d", "decode"), ("e", "decode"))
    for url in "de":
        roster.find(url).info = info("decode")
        roster.find(url).has_client = True
        roster.find(url).changed()
    known = roster.state().in_use("decode", "f")
    assert urls(known.nodes) == ["d", "e"]
    roster.find("e").count(1, 10)
    roster.find("e").count_fresh(10)
    seen = roster.state()
    assert seen.in_use("decode", "f") is known
    assert known.nodes == list(seen.decodes)
    assert known.busy_tokens == [node.busy_tokens for node in seen.decodes]
    assert known.busy_tokens[1] > known.busy_tokens[0]
    roster.find("d").has_client = False
    roster.find("d").changed()
    assert urls(roster.state().in_use("decode", "f").nodes) == ["e"]


def test_node_is_listed_under_its_reported_role():
    roster = roster_of(("p", "prefill"), ("q", "prefill"), ("x", ""))
    assert urls(roster.state().prefills) == ["p", "q"]
    roster.find("p").validate(info("decode"))
    assert urls(roster.state().prefills) == ["q"]
    assert urls(roster.state().decodes) == ["p"]
    with pytest.raises(NodeUnusable):
        roster.find("x").validate(info("prefill", is_healthy=False))
    assert urls(roster.state().prefills) == ["q", "x"]


def node(role, name, *, is_up=True, fingerprint="a", reason="") -> RosterEntry:
    return RosterEntry(
        url=f"http://{name}", role=role, is_up=is_up, fingerprint=fingerprint, reason=reason
    )


PREFILL = node("prefill", "p")
DECODE_DOWN = node("decode", "d", is_up=False, reason="Connection refused")


def test_health_names_the_role_without_a_reachable_node():
    state = ClusterState(prefills=(PREFILL,), decodes=(DECODE_DOWN,))
    health = explain(state, None)
    assert not health.is_serving
    assert health.detail == "no decode node reachable: http://d Connection refused; retrying"


def test_health_names_both_fingerprints_of_different_models():
    decode = node("decode", "d", fingerprint="b")
    health = explain(ClusterState(prefills=(PREFILL,), decodes=(decode,)), None)
    assert not health.is_serving
    assert "prefill serves a and decode serves b" in health.detail


def test_health_of_a_serving_cluster_names_its_unused_nodes():
    other = node("decode", "e", fingerprint="b")
    decodes = (node("decode", "c"), DECODE_DOWN, other)
    health = explain(ClusterState(prefills=(PREFILL,), decodes=decodes), "a")
    assert health.is_serving
    assert health.detail == (
        "1 of 1 prefill nodes and 1 of 3 decode nodes serve; decode http://d Connection refused; "
        "decode http://e serves another model: b"
    )
