import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.profile import PrefillTimes, Profile
from tandem.plan.seam import Fleet, NodeKind, Outcome, PlannedRequest
from tandem.plan.simulation import Simulation, simulate
from tandem.router.policies import POLICIES
from tests.tandem.plan.fleets import PROFILE, fleet, kind, load


def run(told: Fleet, requests, *, leaps: bool, **changes) -> tuple[Outcome, list]:
    """Return the outcome and, when all is quiet, the pages of every node."""
    simulation = Simulation(told, requests, leaps=leaps, **changes)
    outcome = simulation.run()
    simulation.agenda.run(outcome.end_s + 60)
    nodes = [*simulation.prefills, *simulation.decodes]
    for node in nodes:
        node.engine.cache.check_integrity()
    return outcome, [node.engine.counts() for node in nodes]


def same(a: Outcome, b: Outcome) -> None:
    assert len(a.requests) == len(b.requests)
    for one, other in zip(a.requests, b.requests, strict=True):
        np.testing.assert_allclose(one.token_s, other.token_s, rtol=0, atol=1e-9)
        assert (one.prefill, one.decode, one.error) == (other.prefill, other.decode, other.error)
        assert (one.num_cached, one.num_kept) == (other.num_cached, other.num_kept)
    assert a.num_retracted == b.num_retracted
    assert a.busy_s == pytest.approx(b.busy_s)


loads = st.builds(
    load,
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.sampled_from([2.0, 20.0, 200.0]),
    prompt=st.sampled_from([300, 3000]),
    output=st.sampled_from([10, 300]),
)
fleets = st.builds(
    fleet,
    st.integers(1, 3),
    st.integers(1, 3),
    policy=st.sampled_from(sorted(POLICIES)),
    num_tokens=st.sampled_from([4_000, 40_000]),
    page_size=st.sampled_from([16, 64]),
    max_running=st.sampled_from([3, 64]),
    host_step_s=st.sampled_from([0.0, 0.0007, 0.03]),
    is_overlapped=st.booleans(),
)


@settings(max_examples=15, deadline=None)
@given(told=fleets, requests=loads)
def test_leaping_over_steps_gives_what_stepping_gives(told: Fleet, requests) -> None:
    leapt, leapt_pages = run(told, requests, leaps=True)
    stepped, stepped_pages = run(told, requests, leaps=False)
    same(leapt, stepped)
    assert leapt_pages == stepped_pages


def test_those_in_line_are_tried_again_in_a_leap_when_they_are_in_steps() -> None:
    # Answers so long that the growth kept free for them decides who gets pages, and when.
    told = fleet(1, 1, num_tokens=6_000, max_running=64)
    requests = [
        PlannedRequest(arrival_s=0.02 * i, num_prompt=400, num_output=700) for i in range(24)
    ]
    leapt, _ = run(told, requests, leaps=True)
    stepped, _ = run(told, requests, leaps=False)
    same(leapt, stepped)


@settings(max_examples=15, deadline=None)
@given(told=fleets, requests=loads)
def test_every_request_ends_once_and_all_pages_come_back(told: Fleet, requests) -> None:
    outcome, pages = run(told, requests, leaps=True)
    for one in outcome.requests:
        assert one.is_complete != bool(one.error)
        assert (np.diff(one.token_s) >= 0).all()
        if one.is_complete:
            assert one.ttft_s > 0
    for counts in pages:
        assert counts.free + counts.cached == counts.total


def test_the_same_seed_gives_the_same_outcome() -> None:
    told, requests = fleet(policy="power_of_two"), load(3, 80, 10.0)
    once, again = simulate(told, requests, seed=5), simulate(told, requests, seed=5)
    same(once, again)
    other = simulate(told, requests, seed=6)
    assert [each.prefill for each in other.requests] != [each.prefill for each in once.requests]


def one_alone(each: NodeKind, num_prompt: int, num_output: int, **changes) -> Outcome:
    told = Fleet(prefill=each, num_prefill=1, decode=each, num_decode=1, **changes)
    return simulate(
        told, [PlannedRequest(arrival_s=1.0, num_prompt=num_prompt, num_output=num_output)]
    )


@pytest.mark.parametrize("num_prompt", [512, 1024, 3000])
def test_one_request_on_an_empty_fleet_takes_what_can_be_worked_out(num_prompt: int) -> None:
    each = kind(host_step_s=0.0, link_bytes_per_s=1e12)
    served = one_alone(each, num_prompt, 20).requests[0]
    overheads = fleet().overheads.__class__()
    chunks = [(start, min(1024, num_prompt - start)) for start in range(0, num_prompt, 1024)]
    prefill_s = sum(PROFILE.prefill.forward_s(size, start) for start, size in chunks)
    ttft_s = overheads.edge_s + overheads.message_s + prefill_s
    assert served.ttft_s == pytest.approx(ttft_s, abs=1e-6)
    steps_s = [PROFILE.decode.forward_s(1, num_prompt + 1 + i) for i in range(19)]
    handed_off_s = overheads.message_s + overheads.transfer_s
    assert served.itls_s[0] == pytest.approx(handed_off_s + steps_s[0], abs=1e-4)
    assert served.itls_s[1:] == pytest.approx(steps_s[1:])


def test_a_slow_link_holds_up_the_second_token_and_not_the_first() -> None:
    fast = one_alone(kind(link_bytes_per_s=1e9), 2000, 4).requests[0]
    slow = one_alone(kind(link_bytes_per_s=1e6), 2000, 4).requests[0]
    assert slow.ttft_s == fast.ttft_s
    # 2,000 tokens of 1,000 bytes in whole pages at 1 MB/s, of which some went while others were computed.
    assert 1.5 < slow.itls_s[0] - fast.itls_s[0] < 2.0


def test_layers_are_pushed_while_others_are_computed() -> None:
    by_layer = one_alone(kind(link_bytes_per_s=2e7, num_layers=8), 1000, 4).requests[0]
    at_once = one_alone(kind(link_bytes_per_s=2e7, num_layers=1), 1000, 4).requests[0]
    # 50 ms on the wire and 103 ms of computing: an eighth of the bytes is left for the end.
    assert at_once.itls_s[0] - by_layer.itls_s[0] == pytest.approx(0.05 * 7 / 8, rel=0.05)


def test_twice_the_nodes_are_not_slower() -> None:
    requests = load(1, 250, 25.0)
    few, many = simulate(fleet(2, 2), requests), simulate(fleet(4, 4), requests)

    def mean_s(outcome: Outcome) -> tuple[float, float]:
        ttft_s = np.mean([each.ttft_s for each in outcome.requests])
        return float(ttft_s), float(
            np.concatenate([each.itls_s for each in outcome.requests]).mean()
        )

    assert mean_s(many)[0] < mean_s(few)[0]
    assert mean_s(many)[1] < mean_s(few)[1]


def test_prompts_that_begin_alike_are_found_in_the_cache() -> None:
    requests = [
        PlannedRequest(arrival_s=float(i), num_prompt=1200, num_output=5, blocks=(7, 8))
        for i in range(3)
    ]
    first, second, third = simulate(fleet(), requests).requests
    assert (first.num_cached, second.num_cached, third.num_cached) == (0, 1024, 1024)
    # What a pair has is taken again where it is: on decode it need not travel.
    assert second.num_kept == third.num_kept == 1024
    assert second.ttft_s < first.ttft_s / 2


def test_short_prompts_stay_on_decode() -> None:
    served = one_alone(kind(), 100, 5).requests[0]
    assert served.is_complete
    assert (served.prefill, served.decode) == (-1, 0)


def test_a_prompt_that_no_node_holds_is_refused() -> None:
    served = one_alone(kind(num_tokens=1600), 1600, 5).requests[0]
    assert "1600 tokens" in served.error
    assert not served.is_complete


def test_who_would_wait_too_long_in_line_is_refused() -> None:
    slow = fleet(1, 1, profile=Profile(prefill=PrefillTimes(base_ms=2000)))
    requests = [
        PlannedRequest(arrival_s=0.01 * i, num_prompt=1000, num_output=2) for i in range(120)
    ]
    outcome = simulate(slow, requests)
    served = [each for each in outcome.requests if each.is_complete]
    refused = [each for each in outcome.requests if each.error]
    assert len(served) + len(refused) == 120
    assert len(served) > 20 < len(refused)
    assert max(each.ttft_s for each in served) < 60 + 10 * 2


def test_what_is_not_done_by_the_end_is_told_as_far_as_it_came() -> None:
    requests = load(2, 60, 10.0)
    whole, part = simulate(fleet(), requests), simulate(fleet(), requests, until_s=3.0)
    assert part.end_s == 3.0
    for one, other in zip(part.requests, whole.requests, strict=True):
        until = other.token_s[other.token_s <= 3.0]
        np.testing.assert_allclose(one.token_s, until)
    assert any(each.is_complete for each in part.requests)
    assert not all(each.is_complete for each in part.requests)


def test_too_few_pages_retract_requests_and_lose_none() -> None:
    tight = fleet(1, 1, num_tokens=3_000, page_size=16)
    requests = [
        PlannedRequest(arrival_s=0.01 * i, num_prompt=200, num_output=400) for i in range(14)
    ]
    outcome, _ = run(tight, requests, leaps=True)
    assert outcome.num_retracted > 0
    assert all(each.is_complete for each in outcome.requests)


def test_large_pages_change_little() -> None:
    requests = load(4, 150, 15.0)
    exact, coarse = simulate(fleet(), requests), simulate(fleet(), requests, page_size=256)
    firsts = [np.mean([each.ttft_s for each in told.requests]) for told in (exact, coarse)]
    assert firsts[1] == pytest.approx(firsts[0], rel=0.05)
