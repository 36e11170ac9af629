from tandem.router.health import explain
from tandem.router.policy import ClusterSnapshot, NodeSnapshot


def node(role, name, *, is_up=True, fingerprint="a", reason="") -> NodeSnapshot:
    return NodeSnapshot(
        url=f"http://{name}", role=role, is_up=is_up, fingerprint=fingerprint, reason=reason
    )


PREFILL = node("prefill", "p")
DECODE_DOWN = node("decode", "d", is_up=False, reason="Connection refused")


def test_a_role_without_a_node_is_named_with_the_reason():
    snapshot = ClusterSnapshot(prefills=(PREFILL,), decodes=(DECODE_DOWN,))
    health = explain(snapshot, None)
    assert not health.is_serving
    assert health.detail == "no decode node reachable: http://d Connection refused; retrying"


def test_two_models_are_named_by_both_fingerprints():
    decode = node("decode", "d", fingerprint="b")
    health = explain(ClusterSnapshot(prefills=(PREFILL,), decodes=(decode,)), None)
    assert not health.is_serving
    assert "prefill serves a and decode serves b" in health.detail


def test_a_cluster_that_serves_still_names_the_nodes_it_does_not_use():
    other = node("decode", "e", fingerprint="b")
    decodes = (node("decode", "c"), DECODE_DOWN, other)
    health = explain(ClusterSnapshot(prefills=(PREFILL,), decodes=decodes), "a")
    assert health.is_serving
    assert health.detail == (
        "1 of 1 prefill nodes and 1 of 3 decode nodes serve; decode http://d Connection refused; "
        "decode http://e serves another model: b"
    )
