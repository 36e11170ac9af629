"""From the command line of `tandem plan` to its exit status."""

import signal
import sys
from collections.abc import Sequence
from itertools import count

from rich.console import Console

from tandem.long_work import counted
from tandem.plan import words
from tandem.plan.arguments import PlanConfig, parse
from tandem.plan.planning import Plan, Planner, Simulate, Trial
from tandem.plan.report import as_json, render
from tandem.plan.seam import Fleet, Outcome, PlannedRequest
from tandem.wire.errors import ConfigInvalid

STOPPED = 130  # what shells say of a command that Ctrl-C ended

# A simulation counts every page. Four times as large ones take two thirds of the time, and of so many
# tokens what is lost in half-filled pages changes nothing.
LARGE_POOL_TOKENS, LARGE_PAGE = 100_000, 64


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return run(argv, _simulate)


def run(argv: Sequence[str], simulate: Simulate) -> int:
    """Run the command over a simulation; return the exit status."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    try:
        config = parse(argv)
        plan = _plan(config, simulate)
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem plan: error: {error.for_operators}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("tandem plan: stopped\n")
        return STOPPED
    if config.is_json:
        sys.stdout.write(as_json(plan, config.num_too_long).decode())
    else:
        render(plan, config.num_too_long, Console(markup=False, highlight=False))
    return 0 if plan.best is not None else 1


def _plan(config: PlanConfig, simulate: Simulate) -> Plan:
    numbers = count()
    with counted("simulated fleets", None) as advance:

        def tell(fleet: Fleet, best: Trial | None) -> None:
            found = f"; best so far {words.fleet_name(best)}" if best is not None else ""
            advance(
                next(numbers),
                f"{fleet.num_prefill} {fleet.prefill.name} : {fleet.num_decode} {fleet.decode.name}{found}",
            )

        planner = Planner(
            config.requests, config.goals, config.policy, config.limits, simulate, tell
        )
        return planner.plan(config.prefills, config.decodes)


def _simulate(fleet: Fleet, requests: Sequence[PlannedRequest], until_s: float) -> Outcome:
    # The roles, the router and the engine behind it: nobody waits for them who only asks for --help.
    from tandem.plan.simulation import simulate

    is_large = min(fleet.prefill.num_tokens, fleet.decode.num_tokens) > LARGE_POOL_TOKENS
    return simulate(fleet, requests, until_s=until_s, page_size=LARGE_PAGE if is_large else 0)
