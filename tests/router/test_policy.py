import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import (
    POLICIES,
    ClusterSnapshot,
    NodeSnapshot,
    choose,
    least_load,
    load_of,
    usable_fingerprint,
)
from wire.errors import NoNodeAvailable
from wire.messages import NodeLoad

loads = st.builds(
    NodeLoad,
    num_running=st.integers(0, 20),
    num_waiting=st.integers(0, 20),
    pages_held=st.integers(0, 100),
    page_size=st.just(16),
)


@st.composite
def nodes(draw, role):
    return tuple(
        NodeSnapshot(
            url=f"http://{role}-{i}",
            role=role,
            is_up=draw(st.booleans()),
            fingerprint=draw(st.sampled_from(["a", "b"])),
            load=draw(loads),
            in_flight_tokens=draw(st.integers(0, 1000)),
        )
        for i in range(draw(st.integers(1, 5)))
    )


snapshots = st.builds(ClusterSnapshot, prefills=nodes("prefill"), decodes=nodes("decode"))
policies = st.sampled_from(sorted(POLICIES))


def node(name="n", **fields) -> NodeSnapshot:
    return NodeSnapshot(
        **{"url": name, "role": "decode", "is_up": True, "fingerprint": "a"} | fields
    )


def candidates(nodes_of_role, fingerprint):
    return [n for n in nodes_of_role if n.is_up and n.fingerprint == fingerprint]


@given(
    snapshots,
    policies,
    st.integers(0, 1000),
    st.sets(st.sampled_from(["http://prefill-0", "http://decode-1"])),
)
def test_a_choice_is_up_of_the_model_and_not_avoided_where_there_is_another(
    snapshot, policy, turn, avoid
):
    rng = random.Random(turn)
    usable = [candidates(snapshot.prefills, "a"), candidates(snapshot.decodes, "a")]
    if not all(usable):
        with pytest.raises(NoNodeAvailable):
            choose(snapshot, "a", POLICIES[policy], turn, rng, avoid=avoid)
        return
    pair = choose(snapshot, "a", POLICIES[policy], turn, rng, avoid=avoid)
    for chosen, of_role in zip((pair.prefill, pair.decode), usable, strict=True):
        urls = {n.url for n in of_role}
        assert chosen in (urls - avoid or urls)


@given(nodes("decode"), st.integers(0, 1000))
def test_least_load_takes_a_least_busy_node(of_role, turn):
    chosen = least_load(of_role, turn, random.Random(0))
    assert load_of(chosen) == min(load_of(n) for n in of_role)


@given(st.integers(1, 6), st.sampled_from(["least_load", "round_robin"]))
def test_equal_nodes_are_used_in_rotation(num_nodes, policy):
    equal = [node(str(i)) for i in range(num_nodes)]
    chosen = [POLICIES[policy](equal, turn, random.Random(0)).url for turn in range(2 * num_nodes)]
    assert sorted(chosen) == sorted(2 * [n.url for n in equal])


@given(nodes("decode"), policies, st.integers(0, 99))
def test_the_same_snapshot_turn_and_draw_give_the_same_choice(of_role, policy, turn):
    first, second = (POLICIES[policy](of_role, turn, random.Random(turn)) for _ in range(2))
    assert first == second


@given(nodes("decode"), st.integers(0, 99))
def test_power_of_two_never_takes_the_one_busiest_node_when_there_is_another(of_role, seed):
    chosen = POLICIES["power_of_two"](of_role, 0, random.Random(seed))
    busier = [n for n in of_role if load_of(n) >= load_of(chosen) and n != chosen]
    assert busier or len(of_role) == 1


def test_own_requests_count_before_the_node_has_reported_them():
    assert load_of(node(in_flight_tokens=10)) > load_of(node())


def test_a_queue_at_a_node_weighs_even_though_it_holds_no_pages():
    load = NodeLoad(num_running=2, pages_held=10, page_size=16)
    queued = NodeLoad(num_running=2, num_waiting=6, pages_held=10, page_size=16)
    assert load_of(node(load=queued)) > load_of(node(load=load))


def test_the_preferred_model_is_kept_while_a_pair_has_it():
    both = [node(str(i), fingerprint=f) for i, f in enumerate("ab")]
    snapshot = ClusterSnapshot(prefills=tuple(both), decodes=tuple(both))
    assert usable_fingerprint(snapshot) == "a"
    assert usable_fingerprint(snapshot, preferred="b") == "b"
    assert usable_fingerprint(snapshot, preferred="gone") == "a"


def test_nodes_of_different_models_are_no_pair():
    snapshot = ClusterSnapshot(prefills=(node(fingerprint="a"),), decodes=(node(fingerprint="b"),))
    assert usable_fingerprint(snapshot) is None
