"""Plans over a made-up cluster whose every answer is known."""

import numpy as np
import pytest

from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile
from tandem.plan import words
from tandem.plan.bounds import decode_bound, prefill_bound
from tandem.plan.goals import Goals, judge
from tandem.plan.planning import Limits, Planner
from tandem.plan.seam import Fleet, Outcome, PlannedRequest, Served
from tests.tandem.plan.standin import kind, simulate

GOALS = Goals(ttft_s=1.0, itl_s=0.02)


def load(rate=20.0, count=600, num_prompt=2000, num_output=200):
    return [
        PlannedRequest(arrival_s=i / rate, num_prompt=num_prompt, num_output=num_output)
        for i in range(count)
    ]


def planned(prefills, decodes=None, *, requests=None, goals=GOALS, **limits):
    tried = []

    def attempt(fleet, requests, until_s):
        tried.append((fleet.prefill.name, fleet.num_prefill, fleet.decode.name, fleet.num_decode))
        return simulate(fleet, requests, until_s)

    planner = Planner(requests or load(), goals, "round_robin", Limits(**limits), attempt)
    plan = planner.plan(prefills, decodes or prefills)
    assert len(tried) == len(set(tried)), "a fleet was simulated twice"
    if plan.best is not None:
        fleet = plan.best.fleet
        name = (fleet.prefill.name, fleet.num_prefill, fleet.decode.name, fleet.num_decode)
        assert name in tried
        assert plan.best.is_met
    return plan


def cheapest_by_trying_all(kinds, requests, goals, most):
    costs = []
    for prefill in kinds:
        for decode in kinds:
            for p in range(1, most):
                for d in range(1, most - p + 1):
                    fleet = Fleet(prefill=prefill, num_prefill=p, decode=decode, num_decode=d)
                    until_s = requests[-1].arrival_s + goals.patience_s()
                    if judge(simulate(fleet, requests, until_s), goals, p).is_met:
                        costs.append(fleet.cost)
    return min(costs)


def test_the_plan_is_the_cheapest_of_all_fleets_of_all_kinds():
    fast = Profile(
        prefill=PrefillTimes(base_ms=3, per_token_ms=0.04),
        decode=DecodeTimes(base_ms=6, per_request_ms=0.08),
    )
    kinds = [kind(), kind("fast", fast, cost=2.2)]
    requests = load(count=100)
    plan = planned(kinds, requests=requests)
    assert plan.best.fleet.cost == pytest.approx(cheapest_by_trying_all(kinds, requests, GOALS, 9))
    assert len(plan.options) == 4


def test_a_load_beyond_the_nodes_says_what_it_takes():
    plan = planned([kind()], requests=load(rate=400.0, count=2000), max_nodes=16)
    assert plan.best is None
    (reason,) = words.reasons(plan)
    assert "77 prefills (computing prompts)" in reason
    assert "raise --max-nodes above 16" in reason


def test_a_goal_that_no_number_of_nodes_reaches_says_which():
    (reason,) = words.reasons(planned([kind()], goals=Goals(ttft_s=0.1, itl_s=0.02)))
    assert "computes the prompt of percentile 99 in 0.205 s" in reason
    (reason,) = words.reasons(planned([kind()], goals=Goals(ttft_s=1.0, itl_s=0.009)))
    assert "a step of plain for a single answer takes 10.1 ms, and 9 ms between tokens" in reason


def test_the_closest_fleet_is_named_where_none_within_the_limit_does():
    plan = planned([kind()], max_nodes=5)
    assert plan.best is None
    (reason,) = words.reasons(plan)
    assert reason.startswith("plain: the closest was")
    assert "more or faster ones" in reason


def test_other_ratios_of_the_best_fleet_are_looked_at_and_it_is_among_them():
    plan = planned([kind()], num_ratios=5)
    fleet = plan.best.fleet
    total = fleet.num_prefill + fleet.num_decode
    assert {t.fleet.num_prefill + t.fleet.num_decode for t in plan.ratios} == {total}
    assert plan.best.ratio in [trial.ratio for trial in plan.ratios]
    counts = [trial.fleet.num_prefill for trial in plan.ratios]
    assert counts == sorted(set(counts))


def test_bounds_never_ask_for_more_than_the_cheapest_fleet_has():
    for rate in (1.0, 7.0, 30.0):
        requests = load(rate=rate, count=300)
        plan = planned([kind()], requests=requests)
        lasts_s = requests[-1].arrival_s
        fleet = plan.best.fleet
        assert prefill_bound(kind(), requests, GOALS, lasts_s).least <= fleet.num_prefill
        assert decode_bound(kind(), requests, GOALS, lasts_s).least <= fleet.num_decode


def test_a_slow_link_asks_for_more_prefills():
    slow = kind("slow-link", link_bytes_per_s=1e7)
    bound = prefill_bound(slow, load(), GOALS, 30.0)
    assert (bound.least, bound.reason) == (4, "sending KV")


def served(ttft_s, gaps_s=(0.01,) * 9, arrival_s=0.0, **more):
    token_s = arrival_s + ttft_s + np.concatenate([[0.0], np.cumsum(gaps_s)])
    return Served(arrival_s=arrival_s, num_prompt=100, num_output=10, token_s=token_s, **more)


def verdict(requests, busy_s=(0.1, 0.1), goals=GOALS):
    outcome = Outcome(requests=requests, busy_s=busy_s, num_retracted=0, end_s=99.0)
    return judge(outcome, goals, 1)


def test_a_percentile_is_of_requests_for_first_tokens_and_of_gaps_for_the_others():
    requests = [served(0.1 + i / 1000, arrival_s=i / 10) for i in range(100)]
    found = verdict(requests)
    assert found.is_met
    assert found.ttft_s == pytest.approx(0.199)
    assert found.itl_s == pytest.approx(0.01)
    assert found.goodput == pytest.approx(100 / 9.9)
    late = verdict([*requests[:-2], served(3.0, arrival_s=9.8), served(3.0, arrival_s=9.9)])
    assert (late.misses_ttft, late.misses_itl, late.share) == (True, False, 0.98)
    slow = verdict([served(0.1, [0.01] * 8 + [0.5], arrival_s=i / 10) for i in range(100)])
    assert (slow.misses_ttft, slow.misses_itl, slow.share) == (False, True, 0.0)


def test_a_request_that_was_refused_or_never_answered_is_late():
    requests = [served(0.1, arrival_s=i / 10) for i in range(100)]
    silent = Served(arrival_s=9.0, num_prompt=1, num_output=1, token_s=np.empty(0))
    assert not verdict([*requests[:10], *[silent] * 5]).is_met
    refused = served(0.1, error="no room")
    assert (verdict([refused, *requests]).num_refused, verdict([refused, *requests]).is_met) == (
        1,
        False,
    )


def test_a_line_that_still_grows_at_the_end_does_not_meet_the_goals():
    growing = [served(0.01 * i, arrival_s=i / 10) for i in range(95)]
    assert verdict(growing).ttft_s < 1.0
    assert verdict(growing).is_full
    assert not verdict(growing).is_met
    busy = verdict([served(0.1, arrival_s=i / 10) for i in range(100)], busy_s=(9.8, 0.1))
    assert (busy.is_full, busy.is_met) == (True, False)


@pytest.mark.parametrize(
    ("ttfts_s", "is_full"),
    [
        (np.linspace(0.1, 20.0, 40), True),
        ([*np.linspace(0.1, 5.0, 20), *[np.inf] * 20], True),
        ([np.inf] * 40, True),
        ([8.0] * 40, False),
        ([8.0] * 30 + [np.inf] * 10, False),
    ],
    ids=["longer and longer", "then none", "none", "always long", "long, and then cut off"],
)
def test_a_line_that_grows_is_seen_where_no_ttft_is_asked_for(ttfts_s, is_full):
    requests = [
        Served(
            arrival_s=float(at_s),
            num_prompt=1,
            num_output=1,
            token_s=np.array([at_s + ttft_s] if np.isfinite(ttft_s) else []),
        )
        for at_s, ttft_s in enumerate(ttfts_s)
    ]
    outcome = Outcome(requests=requests, busy_s=[1.0, 1.0], num_retracted=0, end_s=40.0)
    verdict = judge(outcome, Goals(ttft_s=None, itl_s=0.05), 1)
    assert (verdict.is_full, verdict.is_met) == (is_full, not is_full)


def test_what_is_not_asked_for_is_not_judged():
    slow = [served(50.0, [9.0] * 9, arrival_s=i / 10) for i in range(100)]
    assert verdict(slow, goals=Goals(ttft_s=None, itl_s=10.0)).is_met
    assert verdict(slow, goals=Goals(ttft_s=60.0, itl_s=None)).is_met
