"""From a load and kinds of nodes to a plan: every pair of kinds searched, the best ratio looked around. No I/O."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from tandem.plan.bounds import Bound, decode_bound, prefill_bound
from tandem.plan.goals import Goals, Verdict, judge
from tandem.plan.seam import Fleet, NodeKind, Outcome, PlannedRequest
from tandem.plan.search import Search, Size, Space
from tandem.plan.workload import LoadFacts, facts_of

Simulate = Callable[[Fleet, Sequence[PlannedRequest], float], Outcome]
"""Serves a load with a fleet until a time."""

# Up to so many nodes the exact optimum is looked for; beyond, one that is as good to a few percent.
EXACT_NODES, ROUGH = 48, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fleet that was simulated, and what came of it."""

    fleet: Fleet
    verdict: Verdict

    @property
    def is_met(self) -> bool:
        """See `Tried`."""
        return self.verdict.is_met

    @property
    def misses_ttft(self) -> bool:
        """See `Tried`."""
        return self.verdict.misses_ttft

    @property
    def misses_itl(self) -> bool:
        """See `Tried`."""
        return self.verdict.misses_itl

    @property
    def ratio(self) -> str:
        """Return prefills : decodes."""
        return f"{self.fleet.num_prefill}:{self.fleet.num_decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One pair of kinds, and what the search of it found.

    Attributes:
        best: None: none within the limits meets the goals, or none that is cheaper than another option's.
        is_complete: Nothing cheaper was left to be tried.
    """

    prefill: NodeKind
    decode: NodeKind
    prefill_bound: Bound
    decode_bound: Bound
    best: Trial | None = None
    trials: Sequence[Trial] = ()
    is_complete: bool = True

    @property
    def is_possible(self) -> bool:
        """Whether some number of these nodes may do, for all that arithmetic says."""
        return bool(self.prefill_bound.least and self.decode_bound.least)

    @property
    def least_cost(self) -> float:
        """Return below what no fleet of these kinds can do; infinite where none can."""
        if not self.is_possible:
            return math.inf
        return (
            self.prefill_bound.least * self.prefill.cost
            + self.decode_bound.least * self.decode.cost
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a fleet is to be, and what was looked at.

    Attributes:
        best: None: nothing that was tried meets the goals.
        ratios: As many nodes of the same kinds as the best, in other ratios, by rising prefills.
    """

    load: LoadFacts
    goals: Goals
    max_nodes: int
    options: Sequence[Option]
    best: Trial | None
    ratios: Sequence[Trial] = ()

    @property
    def trials(self) -> list[Trial]:
        """Return all that was tried in the search."""
        return [trial for option in self.options for trial in option.trials]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a plan looks.

    Attributes:
        tolerance: See `Space`; None: by the size of the fleet.
        num_ratios: How many are looked at around the best.
    """

    max_nodes: int = 64
    max_tries: int = 150
    tolerance: float | None = None
    num_ratios: int = 9


@dataclass(slots=True)
class Planner:
    """Plans for one load.

    Args:
        simulate: Serves a load.
        told: Called before each simulation with the fleet, and the best so far.
    """

    requests: Sequence[PlannedRequest]
    goals: Goals
    policy: str
    limits: Limits
    simulate: Simulate
    told: Callable[[Fleet, Trial | None], None] = lambda _fleet, _best: None
    _best: Trial | None = field(default=None, init=False)
    _num_tried: int = field(default=0, init=False)

    def plan(self, prefills: Sequence[NodeKind], decodes: Sequence[NodeKind]) -> Plan:
        """Search all pairs of kinds, those first that arithmetic takes for cheap."""
        load = facts_of(self.requests)
        first = sorted(
            (self._bounded(p, d, load) for p, d in product(prefills, decodes)),
            key=lambda option: option.least_cost,
        )
        options = [self._searched(option) for option in first]
        found = [option for option in options if option.best is not None]
        cheapest = min(found, key=_cost_of, default=None)
        return Plan(
            load=load,
            goals=self.goals,
            max_nodes=self.limits.max_nodes,
            options=options,
            best=None if cheapest is None else cheapest.best,
            ratios=[] if cheapest is None else self._around(cheapest),
        )

    def _around(self, option: Option) -> list[Trial]:
        """Return the best fleet of an option in other ratios."""
        assert option.best is not None
        known = {trial.ratio: trial for trial in option.trials}
        fleet = option.best.fleet
        total = fleet.num_prefill + fleet.num_decode
        return [
            known.get(f"{p}:{d}") or self._try(option.prefill, option.decode, Size(p, d))
            for p, d in self._ratios(option, total, fleet.num_prefill)
        ]

    def _bounded(self, prefill: NodeKind, decode: NodeKind, load: LoadFacts) -> Option:
        goals, lasts_s = self.goals, load.lasts_s
        return Option(
            prefill=prefill,
            decode=decode,
            prefill_bound=prefill_bound(prefill, self.requests, goals, lasts_s),
            decode_bound=decode_bound(decode, self.requests, goals, lasts_s),
        )

    def _searched(self, option: Option) -> Option:
        least = Size(option.prefill_bound.least, option.decode_bound.least)
        if not option.is_possible or least.total > self.limits.max_nodes:
            return option
        tolerance = self.limits.tolerance
        if tolerance is None:
            tolerance = 0.0 if least.total <= EXACT_NODES else ROUGH
        space = Space(
            least=least,
            most_nodes=self.limits.max_nodes,
            prefill_cost=option.prefill.cost,
            decode_cost=option.decode.cost,
            tolerance=tolerance,
        )
        trials: dict[Size, Trial] = {}

        def attempt(size: Size) -> Trial:
            trial = trials[size] = self._try(option.prefill, option.decode, size)
            if (
                trial.is_met
                and size.total <= self.limits.max_nodes
                and trial.fleet.cost < self._cost
            ):
                self._best = trial
            return trial

        search = Search(
            space, attempt, most_tries=self.limits.max_tries - self._num_tried, below=self._cost
        )
        search.run()
        return replace(
            option,
            best=None if search.best is None else trials[search.best],
            trials=list(trials.values()),
            is_complete=search.is_complete,
        )

    @property
    def _cost(self) -> float:
        return math.inf if self._best is None else self._best.fleet.cost

    def _try(self, prefill: NodeKind, decode: NodeKind, size: Size) -> Trial:
        fleet = Fleet(
            prefill=prefill,
            num_prefill=size.num_prefill,
            decode=decode,
            num_decode=size.num_decode,
            policy=self.policy,
        )
        self.told(fleet, self._best)
        self._num_tried += 1
        until_s = self.requests[-1].arrival_s + self.goals.patience_s()
        outcome = self.simulate(fleet, self.requests, until_s)
        return Trial(fleet=fleet, verdict=judge(outcome, self.goals, size.num_prefill))

    def _ratios(self, option: Option, total: int, own: int) -> list[tuple[int, int]]:
        """Return ratios of so many nodes, spread evenly, `own` prefills among them.

        They go a node beyond what arithmetic says must be: further out nothing comes of a load.
        """
        low = max(option.prefill_bound.least - 1, 1)
        high = min(total - option.decode_bound.least + 1, total - 1)
        wanted = min(self.limits.num_ratios, high - low + 1)
        if not wanted:
            return []
        step = (high - low) / max(wanted - 1, 1)
        counts = {low + round(index * step) for index in range(wanted)} | {own}
        return [(count, total - count) for count in sorted(counts)]


def _cost_of(option: Option) -> float:
    return math.inf if option.best is None else option.best.fleet.cost
