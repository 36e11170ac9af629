"""`python -m tests.simulation --seeds 10000`: run many seeds, and say of each that fails how to see it again."""

import argparse
import os
import sys
import time

from tests.simulation.scenarios import BLOWS, Blow, Failure, num_small_steps, run_blow, run_seed

ROLES = ("prefill", "decode")
SHOW_EVERY_S = 1.0


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
    parser.add_argument("--keep-going", action="store_true", help="do not end at a failure")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of names is chance, too
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if options.trace is not None:
        return trace(options.trace)
    runs = every_step() if options.every_step else seeds(options.first, options.seeds)
    return run_all(runs, keeps_going=options.keep_going)


def say(text: str = "", end: str = "\n") -> None:
    """Write to standard output at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def seeds(first, num):
    """Return a run for each seed, with what to do to see it."""
    return [
        (lambda seed=seed: run_seed(seed), f"python -m tests.simulation --trace {seed}")
        for seed in range(first, first + num)
    ]


def every_step():
    """Return a run for each fault at each step of the small scenario."""
    blows = [
        Blow(kind, target, step, is_local=is_local)
        for is_local, roles in ((False, ROLES), (True, ("decode",)))
        for step in range(1, num_small_steps(is_local=is_local) + 1)
        for kind in BLOWS
        for target in roles
    ]
    return [(lambda blow=blow: run_blow(blow), str(blow)) for blow in blows]


def run_all(runs, *, keeps_going: bool) -> int:
    """Run them, showing how far it is."""
    begin_s = shown_s = time.monotonic()
    num_failed = num_replays = num_errors = 0
    for i, (run, again) in enumerate(runs, 1):
        try:
            world = run()
        except Failure as failure:
            num_failed += 1
            say(f"\n{failure}\n  see it: {again}")
            if not keeps_going:
                break
        else:
            num_replays += world.replays
            num_errors += sum(client.error is not None for client in world.plan.clients)
        if time.monotonic() - shown_s > SHOW_EVERY_S or i == len(runs):
            shown_s = time.monotonic()
            say(
                f"\r{i} of {len(runs)} runs, {num_failed} failed; {num_replays} replays, "
                f"{num_errors} typed errors; {i / (shown_s - begin_s):.0f} runs/s",
                end="",
            )
    say()
    return 1 if num_failed else 0


def trace(seed: int) -> int:
    """Run one seed and print what happened in it."""
    try:
        world = run_seed(seed, is_traced=True)
    except Failure as failure:
        say("\n".join(failure.world.trace))
        say(str(failure))
        return 1
    say("\n".join(world.trace))
    say(f"seed {seed} keeps every promise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
