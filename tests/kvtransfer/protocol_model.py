"""Checks the hand-off's protocol at length: `python -m tests.kvtransfer.protocol_model --help`.

Runs random schedules, or with `--pages` and `--faults` every schedule of one room. A schedule that
breaks a promise is printed with its seed, as short as it can be made; the exit status is 1 then.
"""

import argparse
import sys
import time
from collections import Counter

from tests.kvtransfer.model.explore import Failure, explore_all, run_random, shrink
from tests.kvtransfer.model.rules import Plan, Rules

REPORT_EVERY_S = 5.0


def random_schedules(first_seed: int, num_schedules: int) -> None:
    ends, told_s = Counter(), time.monotonic()
    for number in range(num_schedules):
        try:
            world = run_random(Rules(), first_seed + number)
        except Failure as failure:
            sys.exit(f"seed {first_seed + number}: {shrink(failure, Rules())}")
        for room in range(world.plan.num_rooms):
            pair = world.ends_of_prefill.get(room), world.ends_of_decode.get(room)
            ends["/".join(end.name if end else "killed" for end in pair)] += 1
        if time.monotonic() - told_s > REPORT_EVERY_S:
            told_s = time.monotonic()
            say(f"{number + 1} of {num_schedules} schedules hold")
    say(f"{num_schedules} schedules hold; rooms ended at prefill/decode as")
    for pair, times in ends.most_common():
        say(f"{times:10}  {pair}")


def all_schedules(num_pages: int, num_faults: int) -> None:
    for is_one_sided in (True, False):
        plan = Plan(
            num_pages=num_pages, pool_pages=num_pages, faults=num_faults, is_one_sided=is_one_sided
        )
        try:
            num_states = explore_all(plan, Rules())
        except Failure as failure:
            sys.exit(str(failure))
        say(f"{num_states} states hold, which are all of {plan}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--pages", type=int, help="every schedule of one prompt of this many pages")
    parser.add_argument(
        "--faults", type=int, default=2, help="with --pages: how many in a schedule"
    )
    args = parser.parse_args()
    if args.pages:
        all_schedules(args.pages, args.faults)
    else:
        random_schedules(args.seed, args.schedules)


if __name__ == "__main__":
    main()
