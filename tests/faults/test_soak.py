"""The soak, short and dense. `make soak` is the one that tells something of growth."""

import asyncio
import json
import sys

import pytest

from tests.faults.soak import soak
from tests.faults.soak_report import Growth

SECONDS = 40.0
HURT_INTERVAL_S = 3.5
LEAST_REQUESTS = 120


@pytest.mark.slow
def test_every_request_ends_with_the_right_tokens_or_one_typed_error(capsys):
    _, report = asyncio.run(
        soak(SECONDS, seed=7, hurt_interval_s=HURT_INTERVAL_S, least_requests=LEAST_REQUESTS)
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(report['growth'])}\n{report['errors']}\n")
    # Growth is judged by the long forms: in so short a time caches are still filling.
    problems = [problem for problem in report["problems"] if " grew: " not in problem]
    assert problems == []
    assert report["requests"] >= LEAST_REQUESTS
    assert report["right"] > report["requests"] / 2


def test_a_leak_is_told_from_a_level():
    level, leak = Growth("level", 0), Growth("leak", 0)
    for i in range(100):
        for growth, memory in ((level, 50 + i % 3), (leak, 50 + i / 5)):
            growth.at_s.append(i)
            growth.memory_mib.append(memory)
            growth.descriptors.append(20)
    assert level.is_flat
    assert not leak.is_flat
