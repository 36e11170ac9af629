"""What each policy is for, by single choices and by small clusters that are simulated."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.router.pairing.policy import POLICIES, RoutingRequest
from tandem.wire.messages import NodeLoad
from tandem.wire.prefixes import BLOCK_TOKENS
from tests.router.test_policy import asking, chosen, decode, having, prefill

PROMPT = list(range(10 * BLOCK_TOKENS))
ONE = [decode()]


def sessions_of(prefills, decodes, num_sessions=400) -> dict[str, object]:
    """Return the pair of each of many sessions."""
    return {
        f"s{i}": chosen("session", prefills, decodes, RoutingRequest(100, f"s{i}"), turn=i)
        for i in range(num_sessions)
    }


def without(nodes, url):
    return [node for node in nodes if node.url != url]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(0, 99))
def test_power_of_two_never_chooses_a_single_busiest_node(queues, seed):
    prefills = [prefill(f"p{i}", queued) for i, queued in enumerate(queues)]
    taken = int(chosen("power_of_two", prefills, ONE, seed=seed).prefill[1:])
    assert max(queues) > queues[taken] or queues.count(queues[taken]) > 1


def test_node_without_pages_for_the_prompt_is_chosen_last():
    full = NodeLoad(num_pages=100, pages_free=5, page_size=16, queued_tokens=0)
    roomy = NodeLoad(num_pages=100, pages_free=5, pages_cached=50, page_size=16, queued_tokens=300)
    prefills = [replace(prefill("full"), load=full), replace(prefill("roomy"), load=roomy)]
    for name in ("least_load", "cache_aware", "session"):
        assert chosen(name, prefills, ONE, RoutingRequest(500, "s")).prefill == "roomy"
    assert chosen("least_load", prefills, ONE, RoutingRequest(80)).prefill == "full"


def test_cache_aware_chooses_the_node_with_the_longest_cached_prefix():
    short, long = having(PROMPT[: 2 * BLOCK_TOKENS]), having(PROMPT[: 8 * BLOCK_TOKENS])
    prefills = [prefill("cold"), prefill("short", prefixes=short), prefill("long", prefixes=long)]
    decodes = [decode("d-cold"), decode("d-warm", prefixes=short)]
    for turn in range(3):
        pair = chosen("cache_aware", prefills, decodes, asking(PROMPT), turn)
        assert (pair.prefill, pair.decode) == ("long", "d-warm")


def test_queue_longer_than_the_cached_prefix_sends_the_prompt_to_an_idle_node():
    warm = having(PROMPT)
    saved = asking(PROMPT).cached_tokens(prefill(prefixes=warm))
    for queued, taken in ((saved - 1, "warm"), (saved + 1, "cold")):
        prefills = [prefill("cold"), prefill("warm", queued, prefixes=warm)]
        assert chosen("cache_aware", prefills, ONE, asking(PROMPT)).prefill == taken


@given(st.integers(2, 12), st.integers(2, 40), st.integers(0, 99))
def test_burst_of_one_cached_prompt_is_balanced_within_two_prompts(num_nodes, num_requests, seed):
    """No herd: with nothing told in between, queues stay within one prompt of each other."""
    queues = [0] * num_nodes
    warm = having(PROMPT)
    hot = random.Random(seed).randrange(num_nodes)
    for turn in range(num_requests):
        prefills = [
            prefill(f"p{i}", fresh_tokens=tokens, **({"prefixes": warm} if i == hot else {}))
            for i, tokens in enumerate(queues)
        ]
        taken = chosen("cache_aware", prefills, ONE, asking(PROMPT), turn).prefill
        queues[int(taken[1:])] += len(PROMPT)
    assert max(queues) - min(queues) <= 2 * len(PROMPT)


@given(st.integers(2, 8), st.integers(2, 8), st.sampled_from(["prefill", "decode"]), st.data())
def test_removed_node_moves_only_its_own_sessions(num_prefills, num_decodes, role, data):
    prefills = [prefill(f"p{i}") for i in range(num_prefills)]
    decodes = [decode(f"d{i}") for i in range(num_decodes)]
    gone = data.draw(st.sampled_from(prefills if role == "prefill" else decodes)).url
    before = sessions_of(prefills, decodes, 60)
    after = sessions_of(without(prefills, gone), without(decodes, gone), 60)
    other = "decode" if role == "prefill" else "prefill"
    for session, pair in before.items():
        assert getattr(after[session], other) == getattr(pair, other)
        assert (after[session] == pair) == (getattr(pair, role) != gone)


def test_sessions_keep_their_prefill_when_a_decode_of_the_zone_is_removed():
    prefills = [prefill(f"p{i}", zone=f"z{i % 3}") for i in range(6)]
    decodes = [decode(f"d{i}", zone=f"z{i % 3}") for i in range(9)]
    before, after = sessions_of(prefills, decodes), sessions_of(prefills, decodes[1:])
    moved = [session for session, pair in before.items() if after[session] != pair]
    assert 0 < len(moved) < len(before) / 5
    assert all(before[session].decode == "d0" for session in moved)
    assert all(before[session].prefill == after[session].prefill for session in moved)


def test_sessions_spread_over_all_nodes():
    prefills = [prefill(f"p{i}") for i in range(8)]
    taken = Counter(pair.prefill for pair in sessions_of(prefills, ONE, 1600).values())
    assert all(140 < taken[p.url] < 260 for p in prefills)


def test_session_uses_its_second_node_while_the_first_is_overloaded():
    prefills = [prefill(f"p{i}", 1000) for i in range(6)]
    asked = RoutingRequest(100, "s")
    first = chosen("session", prefills, ONE, asked).prefill
    second = chosen("session", without(prefills, first), ONE, asked).prefill
    busy = [prefill(p.url, 50_000) if p.url == first else p for p in prefills]
    assert chosen("session", busy, ONE, asked).prefill == second
    assert chosen("session", prefills, ONE, asked, turn=1).prefill == first


def test_session_policy_without_a_session_uses_the_cached_prefix():
    prefills = [prefill("cold"), prefill("warm", prefixes=having(PROMPT)), prefill("p3")]
    taken = [chosen("session", prefills, ONE, asking(PROMPT), turn).prefill for turn in range(3)]
    assert taken == ["warm"] * 3


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_single_pair_is_chosen_even_when_full(name):
    full = NodeLoad(num_pages=1, page_size=16, queued_tokens=10**7)
    only = [replace(prefill("only"), load=full)]
    assert chosen(name, only, ONE, asking(PROMPT, "s")).prefill == "only"
