"""Prompts that decode computes by itself: the answers of one engine, and service without a prefill node."""

import asyncio
import os
import signal
from functools import partial

import pytest

from tests.e2e.cluster import eventually, get_json, running_cluster
from tests.e2e.conftest import FLAGS
from tests.e2e.test_deaths import NUM_NEW, PROMPTS, stream_all, unaccounted
from tests.e2e.test_features import CALLS, ask_all, assert_same
from tests.e2e.test_simulated import FLAGS as SIMULATED
from tests.e2e.test_simulated import QUIET, described_model, expected, generate, load_of, profile

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

__all__ = ["described_model", "profile"]  # fixtures


@pytest.mark.slow
def test_decode_alone_answers_as_one_engine_does(serve, embedded_model):
    threshold = ("--local-prefill-threshold", "1000000")
    flags = ("--model", str(embedded_model), *FLAGS)
    small = ("--local-prefill-tokens", "24")  # less than a chunk: prompts take many steps
    with running_cluster(*flags, router_flags=threshold, decode_flags=small) as cluster:
        assert eventually(lambda: all(n["is_up"] for n in nodes(cluster.url)))
        calls = {name: CALLS[name] for name in CHOSEN}
        found = ask_all(cluster.url, calls)
        prefill, decode = cluster.loads()
    expected_answers = ask_all(serve, calls)
    for name, (status, answer) in found.items():
        assert status == 200, (name, answer)
        assert_same(answer, expected_answers[name][1])
    assert prefill["prompt_tokens"] == decode["received_bytes"] == 0
    assert decode["prompt_tokens"] > 0


def nodes(url: str) -> list[dict]:
    return get_json(f"{url}/server_info")[1]["nodes"]


@pytest.mark.slow
def test_short_prompts_stay_long_ones_go_and_a_lost_prefill_costs_no_token(
    described_model, profile
):
    flags = ("--model", str(described_model), *SIMULATED, *QUIET, "--sim-profile", str(profile))
    threshold = ("--local-prefill-threshold", "60")
    with running_cluster(*flags, decodes=2, router_flags=threshold) as cluster:
        assert eventually(lambda: all(n["is_up"] for n in nodes(cluster.url)))
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
        assert eventually(lambda: not nodes(cluster.url)[0]["is_up"])
        told = generate(cluster.url, input_ids=[*long, 7], max_new_tokens=9, temperature=0)
        assert told["output_ids"] == expected(described_model, [*long, 7], 9)
        status, health = get_json(f"{cluster.url}/health")
        assert status == 200
        assert "0 of 1 prefill nodes and 2 of 2 decode nodes serve" in str(health)
        assert eventually(lambda: not any(map(unaccounted, cluster.decode_urls)))
