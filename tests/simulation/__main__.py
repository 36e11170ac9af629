"""`python -m tests.simulation --seeds 10000`: run many seeds, and say of each that fails how to see it again."""

import argparse
import os
import sys

from tests.simulation.scenarios import BLOWS, Blow, Failure, num_small_steps, run_blow, run_seed

SHOW_EVERY = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--trace", type=int, metavar="SEED", help="run one, and print all it does")
    parser.add_argument(
        "--every-step",
        action="store_true",
        help="instead of seeds: one request, and every fault at every step of it",
    )
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of names is chance, too
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if options.trace is not None:
        return run_all([options.trace], lambda seed: run_seed(seed, is_traced=True))
    if options.every_step:
        return run_all(every_blow(), run_blow)
    return run_all(range(options.first, options.first + options.seeds), run_seed)


def every_blow() -> list[Blow]:
    """Return each fault at each step of the small scenario."""
    return [
        Blow(kind, target, step, is_local=is_local)
        for is_local, roles in ((False, ("prefill", "decode")), (True, ("decode",)))
        for step in range(1, num_small_steps(is_local=is_local) + 1)
        for kind in BLOWS
        for target in roles
    ]


def run_all(runs, run) -> int:
    """Run each, and show all failures and how far it is."""
    num_failed = 0
    for number, each in enumerate(runs, 1):
        try:
            trace = run(each).trace
        except Failure as failure:
            num_failed += 1
            trace = [*failure.world.trace, f"{failure}; see it: --trace SEED"]
        if trace:
            sys.stdout.write("\n".join(trace) + "\n")
        if number % SHOW_EVERY == 0 or number == len(runs):
            sys.stdout.write(f"{number} of {len(runs)} runs, {num_failed} failed\n")
            sys.stdout.flush()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
