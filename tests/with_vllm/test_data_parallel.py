"""Nodes that are ranks of data-parallel groups, with the experts divided over the ranks."""

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.patience import eventually
from tests.with_vllm.models import prompts, tiny
from tests.with_vllm.nodes import Cluster, again, alone, check_answers, post
from tests.with_vllm.shapes import WIDE

NUM_TOKENS = 60
FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--max-num-batched-tokens", "128")
FLAGS += ("--max-num-seqs", "64", "--max-model-len", "512")


def as_group(nodes) -> None:
    """Make the nodes the ranks of one group."""
    port = nodes[0].bootstrap_port + 8  # free, because nodes here have a single worker
    group = (*WIDE, "--data-parallel-size", str(len(nodes)), "--data-parallel-rpc-port", str(port))
    for rank, node in enumerate(nodes):
        node.add_vllm_flags(*group, "--data-parallel-rank", str(rank))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    """Yield two groups of two ranks, and a decode node that is no rank."""
    directory, own = tmp_path_factory.mktemp("cluster"), ("--dtype", "float32")
    running = Cluster(directory, model, 2, 3, flags=own, vllm_flags=FLAGS)
    as_group(running.prefills)
    as_group(running.decodes[:2])
    with running:
        yield running


@pytest.fixture(autouse=True)
def _restored(cluster):
    """Restore every node."""
    cluster.restore()


@pytest.fixture(scope="module")
def asked():
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(rng.randrange(1, 300))] for _ in range(8)]


@pytest.fixture(scope="module")
def expected(model, asked, tmp_path_factory):
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in asked]
    return alone(model, questions, tmp_path_factory.mktemp("alone"), "--dtype", "float32", *FLAGS)


def answers(cluster, asked, then) -> list:
    """Stream the answers to all prompts at once; call `then` after the first token of each. Return the answers."""
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = [cluster.stream(ids, max_new_tokens=NUM_TOKENS) for ids in asked]
        firsts = list(pool.map(next, streams))
        assert all(len(first) < NUM_TOKENS for first in firsts)
        then()
        return list(pool.map(lambda stream: list(stream)[-1], streams))


def test_answers_match_one_process(cluster, model, tmp_path):
    asked = prompts(320, block=32, longest=400, count=40)
    questions = [(ids, {}) for ids in [*asked, *again(asked)]]
    expected = alone(model, questions, tmp_path, "--dtype", "float32", *FLAGS)
    check_answers(cluster, asked, expected, is_exact_at_once=True)


def test_killed_rank_ends_its_group_and_changes_no_answer(cluster, asked, expected):
    killed, other, _ = cluster.decodes
    kill = lambda: killed.process.signal_tree(signal.SIGKILL)  # noqa: E731
    assert answers(cluster, asked, kill) == expected
    assert other.process.wait(60) == 1
    assert "data-parallel rank has ended" in other.log.read_text()


@pytest.mark.thorough
def test_killed_rank_ends_an_idle_group(cluster):
    killed, other, _ = cluster.decodes
    killed.process.signal_tree(signal.SIGKILL)
    assert other.process.wait(60) == 1


@pytest.mark.thorough
def test_rank_that_stops_first_waits_for_the_streams_and_the_end_of_the_other(
    cluster, asked, expected
):
    first, second, _ = cluster.decodes
    num_replays = cluster.num_replays()
    drains = lambda: first.log.read_text().count('"node.drained"')  # noqa: E731
    num_drains = drains()
    assert answers(cluster, asked, lambda: first.process.signal(signal.SIGTERM)) == expected
    assert eventually(lambda: drains() > num_drains, within_s=30)
    second.process.signal(signal.SIGTERM)
    assert [first.process.wait(60), second.process.wait(60)] == [0, 0]
    assert cluster.num_replays() == num_replays


@pytest.mark.thorough
def test_drained_rank_steps_for_the_others(cluster, asked, expected):
    drained, *_ = cluster.decodes
    try:
        drain = lambda: post(f"{drained.url}/drain", {"timeout_s": 0})  # noqa: E731
        assert answers(cluster, asked, drain) == expected
        assert cluster.generate_all(asked, max_new_tokens=NUM_TOKENS) == expected
    finally:
        assert post(f"{drained.url}/drain", {"cancel": True})[0] == 200
    cluster.wait_free()
