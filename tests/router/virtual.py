"""Tests in virtual time: the loop's clock jumps to whatever is due next, and nothing waits."""

import functools

from tests.simulation.virtual_time import run_in_virtual_time


def in_virtual_time(test):
    """Return a test that runs a coroutine function in virtual time."""

    @functools.wraps(test)
    def run(*args, **fields):
        run_in_virtual_time(lambda _loop: test(*args, **fields))

    return run
