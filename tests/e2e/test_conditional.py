"""Prompts that decode computes by itself: the answers of one engine, and service without a prefill node."""

import asyncio
import os
import signal
from functools import partial

import pytest

from tests.e2e.clients import (
    NUM_NEW,
    PROMPTS,
    QUIET,
    SIMULATED,
    are_up,
    ask_all,
    assert_same,
    expected,
    generate,
    is_told,
    load_of,
    nodes_of,
    stream_all,
    unaccounted,
)
from tests.e2e.cluster import ask, eventually, running_cluster, running_router
from tests.e2e.test_features import CALLS

# What a prompt that is computed elsewhere could get wrong.
CHOSEN = (
    "plain",
    "a stop string",
    "several of several",
    "penalties",
    "those of a prompt of many chunks",
    "an echo alone",
    "a seeded schema",
    "a grammar",
)


@pytest.mark.slow
def test_decode_alone_answers_as_one_engine_does(serve, cluster):
    calls = {name: CALLS[name] for name in CHOSEN}
    expected_answers = ask_all(serve, calls)
    with running_router(cluster, "--local-prefill-threshold", "1000000", *QUIET) as url:
        assert eventually(lambda: are_up(url))
        # What other tests left in the cache would be no work. A page that is still read outlives a flush.
        assert eventually(
            lambda: ask(f"{url}/flush_cache", b"") and not any(map(cached, cluster.loads()))
        )
        prefill_before, decode_before = cluster.loads()
        found = ask_all(url, calls)
        computed = sum(answer["meta_info"]["prompt_tokens"] for answer in natively_told(found))
        assert eventually(
            lambda: cluster.loads()[1]["prompt_tokens"] >= decode_before["prompt_tokens"] + computed
        )
        prefill, decode = cluster.loads()
    for name, (status, answer) in found.items():
        assert status == 200, (name, answer)
        assert_same(answer, expected_answers[name][1])
    assert prefill["prompt_tokens"] == prefill_before["prompt_tokens"]
    assert decode["received_bytes"] == decode_before["received_bytes"]


def cached(load: dict) -> int:
    return load["pages_cached"]


def natively_told(found) -> list[dict]:
    """Return the answers of /generate, of which one call may have several."""
    answers = [answer if isinstance(answer, list) else [answer] for _, answer in found.values()]
    return [answer for several in answers for answer in several if "meta_info" in answer]


@pytest.mark.slow
def test_short_prompts_stay_long_ones_go_and_a_lost_prefill_costs_no_token(
    described_model, profile
):
    flags = ("--model", str(described_model), *SIMULATED, *QUIET, *profile(0.01, 4))
    threshold = ("--local-prefill-threshold", "60")
    with running_cluster(*flags, decodes=2, router_flags=threshold) as cluster:
        assert eventually(lambda: are_up(cluster.url))
        short, long = list(range(100, 160)), list(range(200, 261))
        for prompt in (short, long):
            told = generate(cluster.url, input_ids=prompt, max_new_tokens=9, temperature=0)
            assert told["output_ids"] == expected(described_model, prompt, 9)
        prefill = cluster.prefill_urls[0]
        assert eventually(lambda: load_of(prefill)["prompt_tokens"] == len(long))
        kill = partial(os.kill, cluster.processes[0].pid, signal.SIGKILL)
        streams = asyncio.run(stream_all(cluster.url, kill))
        assert streams == [expected(described_model, prompt, NUM_NEW) for prompt in PROMPTS]
        # Nobody is left who could compute it for decode.
        assert eventually(lambda: not nodes_of(cluster.url)[0]["is_up"])
        told = generate(cluster.url, input_ids=[*long, 7], max_new_tokens=9, temperature=0)
        assert told["output_ids"] == expected(described_model, [*long, 7], 9)
        left = "0 of 1 prefill nodes and 2 of 2 decode nodes serve"
        assert eventually(lambda: is_told(f"{cluster.url}/health", 200, left))
        assert eventually(lambda: not any(map(unaccounted, cluster.decode_urls)))
