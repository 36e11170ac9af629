import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.router.nodes.prefixes import CachedPrefixes, PrefixIndex, PromptBlocks
from tandem.router.nodes.state import ClusterState, RosterEntry, usable_fingerprint
from tandem.router.pairing.pairing import choose
from tandem.router.pairing.policy import POLICIES, Pair, RoutingRequest, policy_of
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.messages import CacheReport, NodeLoad
from tandem.wire.prefixes import BLOCK_TOKENS, block_names, pack_names

EPOCH = 1
TEN_TOKENS = RoutingRequest(10)
PROMPT = [*range(1, 3 * BLOCK_TOKENS + 2)]
loads = st.builds(
    NodeLoad,
    num_running=st.integers(0, 20),
    num_waiting=st.integers(0, 20),
    num_pages=st.sampled_from([0, 1000]),
    pages_free=st.integers(0, 900),
    pages_held=st.integers(0, 100),
    page_size=st.just(16),
    queued_tokens=st.integers(-1, 50_000),
)
asks = st.builds(
    RoutingRequest, num_tokens=st.integers(1, 20_000), session=st.sampled_from(["", "s1", "s2"])
)


@st.composite
def nodes(draw, role):
    return tuple(
        RosterEntry(
            url=f"http://{role}-{i}",
            role=role,
            is_up=draw(st.booleans()),
            fingerprint=draw(st.sampled_from(["a", "b"])),
            load=draw(loads),
            fresh_tokens=draw(st.integers(0, 1000)),
            is_aside=draw(st.booleans()),
            zone=draw(st.sampled_from(["", "east", "west"])),
        )
        for i in range(draw(st.integers(1, 5)))
    )


states = st.builds(ClusterState, prefills=nodes("prefill"), decodes=nodes("decode"))
policies = st.builds(
    policy_of,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(["", *sorted(POLICIES)]),
    st.sampled_from(["", *sorted(POLICIES)]),
)


def node(name="n", role="decode", **fields) -> RosterEntry:
    return RosterEntry(**{"url": name, "role": role, "is_up": True, "fingerprint": "a"} | fields)


def prefill(name="p", queued_tokens=0, **fields) -> RosterEntry:
    return node(name, "prefill", load=NodeLoad(queued_tokens=queued_tokens), **fields)


def decode(name="d", held_tokens=0, **fields) -> RosterEntry:
    load = NodeLoad(num_running=1, pages_held=held_tokens // 16, page_size=16)
    return node(name, "decode", load=load, **fields)


def having(*prompts) -> CachedPrefixes:
    """What a node told that has these prompts cached."""
    prefixes = PrefixIndex().new_life()
    names = [name for prompt in prompts for name in block_names(prompt)]
    prefixes.take(CacheReport(epoch=EPOCH, position=1, added=pack_names(names)))
    return prefixes


def asking(prompt, session="") -> RoutingRequest:
    return RoutingRequest(len(prompt), session, PromptBlocks(prompt))


def chosen(name, prefills, decodes, routing=TEN_TOKENS, turn=0, seed=0, **kwargs) -> Pair:
    state = ClusterState(tuple(prefills), tuple(decodes))
    rng = random.Random(seed)
    return choose(state, "a", policy_of(name), turn, rng, routing=routing, **kwargs)


def candidates(nodes_of_role, fingerprint):
    usable = [n for n in nodes_of_role if n.is_up and n.fingerprint == fingerprint]
    return [n for n in usable if not n.is_aside] or usable


@given(
    states,
    policies,
    asks,
    st.integers(0, 1000),
    st.sets(st.sampled_from(["http://prefill-0", "http://decode-1"])),
)
def test_chosen_node_is_up_with_the_model_and_not_aside_or_avoided_if_possible(
    state, policy, routing, turn, avoid
):
    rng = random.Random(turn)
    usable = [candidates(state.prefills, "a"), candidates(state.decodes, "a")]
    if not all(usable):
        with pytest.raises(NoNodeAvailable):
            choose(state, "a", policy, turn, rng, routing=routing, avoid=avoid)
        return
    pair = choose(state, "a", policy, turn, rng, routing=routing, avoid=avoid)
    for taken, of_role in zip((pair.prefill, pair.decode), usable, strict=True):
        urls = {n.url for n in of_role}
        assert taken in (urls - avoid or urls)


@given(states, policies, asks, st.integers(0, 99))
def test_choice_depends_only_on_state_turn_and_random_draw(state, policy, routing, turn):
    if not (candidates(state.prefills, "a") and candidates(state.decodes, "a")):
        return
    first, second = (
        choose(state, "a", policy, turn, random.Random(turn), routing=routing) for _ in range(2)
    )
    assert first == second


@given(states, st.data(), policies, asks, st.integers(0, 99))
def test_choice_is_the_same_for_updated_and_rebuilt_candidates(before, data, policy, routing, turn):
    if not (candidates(before.prefills, "a") and candidates(before.decodes, "a")):
        return
    routing = replace(routing, prompt=PromptBlocks(PROMPT))
    choose(before, "a", policy, turn, random.Random(turn), routing=routing)
    for entry in (*before.prefills, *before.decodes):
        entry.load, entry.fresh_tokens = data.draw(loads), data.draw(st.integers(0, 99))
        entry.zone = data.draw(st.sampled_from(["", "east"]))
        if data.draw(st.booleans()):
            entry.prefixes = having(PROMPT)
        entry.weigh()
        for followed in before.candidates.values():
            followed.put(entry)
    anew = ClusterState(before.prefills, before.decodes)
    first, second = (
        choose(
            state,
            *("a", policy, turn, random.Random(turn)),
            routing=replace(routing, prompt=PromptBlocks(PROMPT)),
        )
        for state in (before, anew)
    )
    assert first == second


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["least_load", "round_robin"]))
def test_equal_nodes_are_used_in_rotation(num_prefills, num_decodes, name):
    prefills = [prefill(f"p{i}") for i in range(num_prefills)]
    decodes = [decode(f"d{i}") for i in range(num_decodes)]
    num_turns = num_prefills * num_decodes
    pairs = [chosen(name, prefills, decodes, turn=turn) for turn in range(num_turns)]
    assert sorted(p.prefill for p in pairs) == sorted(num_decodes * [p.url for p in prefills])
    assert sorted(p.decode for p in pairs) == sorted(num_prefills * [d.url for d in decodes])


@given(states, asks, st.integers(0, 9))
def test_least_load_chooses_the_pair_with_the_lowest_cost(state, routing, turn):
    prefills, decodes = candidates(state.prefills, "a"), candidates(state.decodes, "a")
    if not (prefills and decodes):
        return

    def cost(p, d):
        lacks_room = sum(n.room_tokens < routing.num_tokens for n in (p, d))
        crossing = routing.num_tokens if p.zone != d.zone else 0
        return p.busy_tokens + d.busy_tokens + 100_000 * lacks_room + crossing

    policy = policy_of("least_load")
    pair = choose(state, "a", policy, turn, random.Random(0), routing=routing)
    costs = {(p.url, d.url): cost(p, d) for p in prefills for d in decodes}
    assert costs[pair.prefill, pair.decode] == pytest.approx(min(costs.values()))


def test_pair_within_a_zone_is_preferred_to_the_least_busy_nodes_of_two_zones():
    prefills = [prefill("p-east", 0, zone="east"), prefill("p-west", 500, zone="west")]
    decodes = [decode("d-east", 900, zone="east"), decode("d-west", 0, zone="west")]
    together = chosen("least_load", prefills, decodes, RoutingRequest(1000))
    assert together == Pair("p-west", "d-west")
    # A prompt so short that its KV travels sooner than either queue is done.
    assert chosen("least_load", prefills, decodes, RoutingRequest(100)) == Pair("p-east", "d-west")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_pairs_equal_nodes_within_their_zone(name):
    zones = ["east", "west", "south"]
    prefills = [prefill(f"{zone}-p{i}", zone=zone) for zone in zones for i in range(2)]
    decodes = [decode(f"{zone}-d{i}", zone=zone) for i in range(3) for zone in zones]
    pairs = [
        chosen(
            name, prefills, decodes, RoutingRequest(500, session=f"s{turn}"), turn=turn, seed=turn
        )
        for turn in range(60)
    ]
    assert all(p.prefill.split("-")[0] == p.decode.split("-")[0] for p in pairs)
    assert {p.prefill.split("-")[0] for p in pairs} == set(zones)


def test_busy_tokens_include_requests_started_since_the_report():
    assert prefill(queued_tokens=5, fresh_tokens=10).busy_tokens == pytest.approx(15)
    assert decode(held_tokens=32, fresh_tokens=10).busy_tokens == pytest.approx(42, abs=0.1)


def test_busy_tokens_exclude_requests_finished_since_the_report():
    load = NodeLoad(queued_tokens=600, num_waiting=2, num_edges=2, num_own=1)
    prompt = list(range(5 * BLOCK_TOKENS))
    for in_flight, busy in ((1, 600), (0, 300)):
        warm = node(
            "w", "prefill", load=load, in_flight_requests=in_flight, prefixes=having(prompt)
        )
        assert warm.busy_tokens == pytest.approx(busy, abs=0.1)
        taken = chosen("cache_aware", [prefill("cold"), warm], [decode()], asking(prompt))
        assert taken.prefill == ("w" if busy < 4 * BLOCK_TOKENS else "cold")


def test_queued_requests_at_decode_count_as_load_without_pages():
    load = NodeLoad(num_running=2, pages_held=10, page_size=16)
    queued = NodeLoad(num_running=2, num_waiting=6, pages_held=10, page_size=16)
    assert node(load=queued).busy_tokens > 3 * node(load=load).busy_tokens


def test_preferred_model_is_kept_while_a_pair_serves_it():
    both = [node(str(i), fingerprint=f) for i, f in enumerate("ab")]
    state = ClusterState(prefills=tuple(both), decodes=tuple(both))
    assert usable_fingerprint(state) == "a"
    assert usable_fingerprint(state, preferred="b") == "b"
    assert usable_fingerprint(state, preferred="gone") == "a"


def test_cached_tokens_exclude_the_last_prompt_token():
    prompt = list(range(3 * BLOCK_TOKENS))
    warm = node(prefixes=having(prompt))
    # All of it is cached, and the last token is computed all the same.
    assert asking(prompt).cached_tokens(warm) == 2 * BLOCK_TOKENS
    assert asking([*prompt, 7]).cached_tokens(warm) == 3 * BLOCK_TOKENS
    assert asking([7, *prompt]).cached_tokens(warm) == 0
