"""An edge worker that starts and ends requests of one key as fast as it can, until a rate limit of the key refuses one.

`python -m tests.router.key_user DIRECTORY INDEX`, started by `test_key_limits`. It begins when it reads a line. It prints
how many requests it started, and how often the other worker's request was in flight at the same time.
"""

import os
import sys
from pathlib import Path

from tandem.router.key_limits import KeyLimit, KeyUsage
from tandem.wire.errors import RateLimited

NUM_WORKERS, NOW_S = 2, 1000.0
PROMPT_TOKENS, OUTPUT_TOKENS = 10, 5
LIMIT = KeyLimit(requests_in_flight=1, requests_per_minute=10_000, tokens_per_minute=1_000_000)


def keys(directory: str, index: int) -> KeyUsage:
    return KeyUsage({"default": LIMIT}, directory, index, NUM_WORKERS)


def main(directory: str, index: int) -> None:
    usage, held = keys(directory, index).of("k"), Path(directory, "held")
    num_started = num_above = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    while True:
        try:
            usage.begin(PROMPT_TOKENS, NOW_S)
        except RateLimited as error:
            if "in flight" in error.message:
                os.sched_yield()
                continue
            break
        num_started += 1
        try:
            os.close(os.open(held, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            num_above += 1
        held.unlink(missing_ok=True)
        usage.finish()
        for _ in range(OUTPUT_TOKENS):  # while the other worker starts its request
            usage.count_output(1, NOW_S)
    sys.stdout.write(f"{num_started} {num_above}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
