"""Nodes of two ranks: the tokens of one process, and an end that leaves nothing behind."""

import asyncio
import os
import signal

import pytest

from tests.e2e.clients import stream_all, unaccounted
from tests.e2e.cluster import START_TIMEOUT_S, running_cluster, running_serve
from tests.e2e.test_parity import generate_all, sampling
from tests.one_engine import tokens_of_one_engine
from tests.patience import eventually
from tests.processes import Process, children, is_alive

FLAGS = (
    *("--dtype", "float32", "--page-size", "8", "--chunked-prefill-size", "32"),
    *("--max-total-tokens", "4096", "--num-threads", "1", "--log-level", "warning"),
    *("--attention-backend", "torch"),
)
PROMPTS = [[3 + (i * 7 + n) % 300 for i in range(n)] for n in (1, 7, 8, 31, 33, 65, 100)]


def tokens(url: str) -> list[list[list[int]]]:
    """Return greedy and seeded tokens of all prompts."""
    return [
        asyncio.run(generate_all(url, PROMPTS, 8, sampled=sampled)) for sampled in (False, True)
    ]


@pytest.fixture(scope="module")
def expected(tiny_model):
    settings = {"page_size": 8, "chunked_prefill_size": 32, "attention_backend": "torch"}
    return [
        tokens_of_one_engine(tiny_model("qwen3"), PROMPTS, sampling(PROMPTS, is_seeded), **settings)
        for is_seeded in (False, True)
    ]


@pytest.mark.slow
def test_one_engine_of_two_ranks_gives_the_tokens_of_one_process(expected, tiny_model):
    with running_serve("--model", str(tiny_model("qwen3")), *FLAGS, "--tp", "2") as url:
        assert tokens(url) == expected


@pytest.mark.slow
def test_a_cluster_of_two_ranks_a_node_gives_the_tokens_of_one_process(expected, tiny_model):
    # Through shared memory it does too: `test_a_rank_that_is_killed_...`.
    model = ("--model", str(tiny_model("qwen3")), "--transfer-backend", "tcp")
    with running_cluster(*model, *FLAGS, "--tp", "2") as cluster:
        assert tokens(cluster.url) == expected
        assert eventually(
            lambda: not any(unaccounted(u) for u in cluster.prefill_urls + cluster.decode_urls)
        )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_nodes_of_different_sizes_give_the_tokens_of_one_process(expected, tiny_model, sizes):
    prefill_tp, decode_tp = (("--tp", str(size)) for size in sizes)
    model = ("--model", str(tiny_model("qwen3")), *FLAGS)
    with running_cluster(*model, prefill_flags=prefill_tp, decode_flags=decode_tp) as cluster:
        assert tokens(cluster.url) == expected
        assert eventually(
            lambda: not any(unaccounted(u) for u in cluster.prefill_urls + cluster.decode_urls)
        )


def kill_rank_of(node: Process) -> None:
    (engine,) = children(node.pid)
    (rank,) = children(engine)
    os.kill(rank, signal.SIGKILL)


def has_ended_for_it(node: Process) -> bool:
    return (
        eventually(lambda: not node.is_running()) and "rank 1 ended with status -9" in node.output()
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_its_node_and_costs_no_token(expected, tiny_model):
    model = ("--model", str(tiny_model("qwen3")), "--transfer-backend", "shm")
    with running_cluster(*model, *FLAGS, "--tp", "2", decodes=2) as cluster:
        assert tokens(cluster.url) == expected
        assert eventually(
            lambda: not any(unaccounted(u) for u in cluster.prefill_urls + cluster.decode_urls)
        )
        undisturbed = asyncio.run(stream_all(cluster.url))
        prefill, decode = cluster.processes[:2]
        assert asyncio.run(stream_all(cluster.url, lambda: kill_rank_of(decode))) == undisturbed
        assert has_ended_for_it(decode)
        prefill_url, survivor = cluster.prefill_urls[0], cluster.decode_urls[1]
        assert eventually(lambda: not unaccounted(prefill_url) and not unaccounted(survivor))
        kill_rank_of(prefill)
        assert has_ended_for_it(prefill)
        assert eventually(lambda: not unaccounted(survivor))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "engine"])
def test_no_rank_outlives_its_node(tiny_model, victim):
    model = ("--model", str(tiny_model("llama")), *FLAGS, "--tp", "2")
    serve = Process("serve", "--port", "0", *model)
    assert eventually(lambda: children(serve.pid) != [], within_s=START_TIMEOUT_S)
    (engine,) = children(serve.pid)
    assert eventually(lambda: children(engine) != [], within_s=START_TIMEOUT_S)
    (rank,) = children(engine)
    if victim == "launcher":
        serve.signal(signal.SIGKILL)
    else:
        os.kill(engine, signal.SIGKILL)
    serve.wait()
    serve.log.close()
    assert eventually(lambda: not is_alive(engine) and not is_alive(rank))


@pytest.mark.slow
def test_heads_that_three_ranks_cannot_share_are_a_sentence_and_status_2(tiny_model):
    serve = Process(
        "serve", "--port", "0", "--model", str(tiny_model("llama")), *FLAGS, "--tp", "3"
    )
    assert serve.wait(START_TIMEOUT_S) == 2
    assert "--tp 3 cannot split 4 attention heads and 2 KV heads" in serve.output()
    serve.log.close()
