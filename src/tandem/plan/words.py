"""A plan in words: fleets, and why none was found and what would help. Pure."""

import math
from collections.abc import Sequence

from tandem.plan.goals import Verdict
from tandem.plan.planning import Option, Plan, Trial
from tandem.plan.seam import NodeKind

# Prefills that are busy for less than this are not what first tokens wait for.
IDLE_SHARE = 0.7


def kind_name(kind: NodeKind) -> str:
    """Return a kind's name, marked where nobody measured it."""
    return f"~{kind.name}" if is_estimated(kind) else kind.name


def is_estimated(kind: NodeKind) -> bool:
    """Tell whether the profile was worked out, and not measured."""
    figures = kind.profile.node
    return figures is None or figures.is_estimated


def fleet_name(trial: Trial) -> str:
    """Return a fleet as people say it."""
    fleet = trial.fleet
    one, other = kind_name(fleet.prefill), kind_name(fleet.decode)
    if one == other:
        return f"{trial.ratio} {one}"
    return f"{fleet.num_prefill} {one} : {fleet.num_decode} {other}"


def milliseconds(seconds: float) -> str:
    """Return a time in three digits or more; a dash where there is none."""
    if math.isinf(seconds):
        return "-"
    return f"{1000 * seconds:,.1f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def misses(verdict: Verdict) -> str:
    """Return which goals are missed; `yes` where none is: an answer to whether they are met."""
    found = []
    if verdict.num_refused:
        found.append(f"{verdict.num_refused:,} refused")
    if verdict.is_full:
        found.append("line grows")
    elif verdict.misses_ttft and not verdict.num_refused:
        found.append("TTFT")
    if verdict.misses_itl:
        found.append("ITL")
    return ", ".join(found) or "yes"


def answer(plan: Plan) -> list[str]:
    """Return what there is to say first: the fleet, or that there is none."""
    if plan.best is None:
        return [
            f"No fleet of up to {plan.max_nodes} nodes was found that meets the goals.",
            *reasons(plan),
        ]
    fleet, verdict = plan.best.fleet, plan.best.verdict
    said = [
        f"{fleet.num_prefill} prefill x {kind_name(fleet.prefill)} and {fleet.num_decode} decode x "
        f"{kind_name(fleet.decode)}, cost {fleet.cost:g}: {verdict.goodput:.4g} of {plan.load.rate:.4g} requests/s "
        f"meet the goals ({verdict.share:.1%})"
    ]
    if not all(option.is_complete for option in plan.options):
        said.append(
            "The search ended before all cheaper fleets were looked at: give a larger --max-tries."
        )
    return said


def reasons(plan: Plan) -> list[str]:
    """Return for each pair of kinds why no fleet of it does, and what would help."""
    return [f"{_pair(option)}: {reason(option, plan)}" for option in plan.options]


def _pair(option: Option) -> str:
    one, other = kind_name(option.prefill), kind_name(option.decode)
    return one if one == other else f"{one} : {other}"


def reason(option: Option, plan: Plan) -> str:
    """Return why no fleet of two kinds does, and what would help."""
    for bound in (option.prefill_bound, option.decode_bound):
        if not bound.least:
            return (
                f"{bound.reason}; take a faster kind (a larger tp, another card), or ask for less"
            )
    prefill, decode = option.prefill_bound, option.decode_bound
    least = prefill.least + decode.least
    if least > plan.max_nodes:
        return (
            f"the load alone takes {prefill.least} prefills ({prefill.reason}) and {decode.least} decodes "
            f"({decode.reason}), {least} nodes: raise --max-nodes above {plan.max_nodes}, or take a faster kind"
        )
    within = [
        t for t in option.trials if t.fleet.num_prefill + t.fleet.num_decode <= plan.max_nodes
    ]
    if not within:
        return "nothing was tried: raise --max-tries"
    closest = max(within, key=lambda trial: (trial.verdict.share, -trial.fleet.cost))
    return f"the closest was {closest.ratio}, {_shortfall(closest, plan)}"


def _shortfall(trial: Trial, plan: Plan) -> str:
    verdict, goals, found = trial.verdict, plan.goals, list[str]()
    if verdict.num_refused:
        found.append(f"which refused {verdict.num_refused:,} requests")
    if verdict.is_full and goals.ttft_s is None:
        found.append(f"whose line grows: {_help_ttft(verdict)}")
    elif verdict.misses_ttft and goals.ttft_s is not None:
        found.append(
            f"whose TTFT is {milliseconds(verdict.ttft_s)} ms for {1000 * goals.ttft_s:g}: {_help_ttft(verdict)}"
        )
    if verdict.misses_itl and goals.itl_s is not None:
        found.append(
            f"whose ITL is {milliseconds(verdict.itl_s)} ms for {1000 * goals.itl_s:g}: more or faster decodes, or "
            "a smaller --max-running-requests on them"
        )
    return "; ".join(found)


def _help_ttft(verdict: Verdict) -> str:
    if verdict.is_full or verdict.busy_prefill > IDLE_SHARE:
        return (
            f"prefills are busy for {verdict.busy_prefill:.0%} of the time, so more or faster ones"
        )
    if verdict.num_retracted:
        return "decodes are short of pages, so more of them, or larger pools"
    return (
        f"prefills are busy for {verdict.busy_prefill:.0%} of the time, so not more but faster ones (a larger tp), "
        "a faster link, or decodes that take prompts sooner"
    )


def beside(plan: Plan, most: int = 4) -> list[Trial]:
    """Return fleets to be shown beside the best: what else does, and what is cheaper and does not."""
    if plan.best is None:
        within = [
            t for t in plan.trials if t.fleet.num_prefill + t.fleet.num_decode <= plan.max_nodes
        ]
        return sorted(within, key=lambda t: -t.verdict.share)[:most]
    best = plan.best
    met = [t for t in plan.trials if t.is_met and t is not best and _is_small(t, plan)]
    missed = [t for t in plan.trials if not t.is_met and t.fleet.cost <= best.fleet.cost]
    return [
        *sorted(met, key=lambda t: (t.fleet.cost, -t.verdict.goodput))[:most],
        *sorted(missed, key=lambda t: (-t.verdict.share, t.fleet.cost))[:most],
    ]


def _is_small(trial: Trial, plan: Plan) -> bool:
    return trial.fleet.num_prefill + trial.fleet.num_decode <= plan.max_nodes


def load_line(plan: Plan, num_too_long: int) -> str:
    """Return the load in a sentence."""
    load = plan.load
    cached = 1 - load.num_uncached / load.num_prompt
    left = f"; {num_too_long:,} longer than a node holds were left out" if num_too_long else ""
    return (
        f"{load.num_requests:,} requests in {load.lasts_s:,.0f} s ({load.rate:.4g}/s), prompts of "
        f"{load.num_prompt / load.num_requests:,.0f} tokens on average, {cached:.0%} of them said before, answers of "
        f"{load.num_output / load.num_requests:,.0f}{left}"
    )


def estimated_line(kinds: Sequence[NodeKind]) -> str:
    """Return what the mark of estimates means; empty where there is none."""
    if not any(is_estimated(kind) for kind in kinds):
        return ""
    return (
        "~ estimated from vendors' figures and measured nowhere: expect a third more or less, and "
        "measure with `tandem profile` before buying"
    )
