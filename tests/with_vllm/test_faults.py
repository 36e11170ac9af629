"""Killed, frozen and drained nodes: no token is lost or repeated, and every block is free at the end."""

import itertools
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import Cluster, alone, post

NUM_TOKENS = 100
FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--max-num-batched-tokens", "128")
FLAGS += ("--max-num-seqs", "64")


def asked(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(rng.randrange(1, 400))] for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """Plain vLLM's answers to `asked(40)`."""
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in asked(40)]
    return alone(model, questions, tmp_path_factory.mktemp("alone"), "--dtype", "float32", *FLAGS)


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    own = ("--dtype", "float32")
    with Cluster(directory, model, 2, 2, flags=own, vllm_flags=FLAGS) as running:
        yield running


@pytest.fixture(autouse=True)
def _restored(cluster):
    """Restore every node."""
    cluster.restore()


def answers(cluster, prompts, then) -> list:
    """Run the prompts concurrently; call `then` when some answers have begun and some have not. Return the answers."""
    counts, lock, begun = [0] * len(prompts), threading.Lock(), []

    def ask(number: int):
        tokens = []
        for tokens in cluster.stream(prompts[number], max_new_tokens=NUM_TOKENS):
            with lock:
                counts[number] = len(tokens)
                is_turn = sum(counts) >= 100 and not begun
                if is_turn:
                    begun.append(sum(count == NUM_TOKENS for count in counts))
            if is_turn:
                then()
        return tokens

    with ThreadPoolExecutor(16) as pool:
        tokens = list(pool.map(ask, range(len(prompts))))
    assert begun[0] < len(prompts) // 2  # some answers had begun, others had not
    return tokens


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.thorough), "decode"])
def test_killed_node_changes_no_answer(cluster, expected, role):
    node = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
    assert answers(cluster, asked(40), lambda: node.process.signal_tree(signal.SIGKILL)) == expected
    assert not node.process.is_running()
    cluster.nodes.remove(node)
    try:
        cluster.wait_free()
    finally:
        cluster.nodes.append(node)


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_of_a_frozen_node_finish_on_other_nodes(cluster, expected, role):
    node = (cluster.prefills if role == "prefill" else cluster.decodes)[1]
    try:
        received = answers(cluster, asked(40), lambda: node.process.signal_tree(signal.SIGSTOP))
    finally:
        node.process.signal_tree(signal.SIGCONT)
    assert received == expected
    cluster.wait_up()
    cluster.wait_free()


@pytest.mark.thorough
def test_aborting_a_third_of_200_requests_leaks_no_block(cluster, expected):
    rng = random.Random(5)
    prompts, answered = asked(40), {}

    def ask(number: int) -> None:
        # Abort before the first event, after it, or later in the answer.
        limit = rng.choice([0, 1, 20]) if number % 3 == 0 else NUM_TOKENS
        prompt_ids = prompts[number % len(prompts)]
        stream = cluster.stream(prompt_ids, max_new_tokens=NUM_TOKENS)
        for tokens in itertools.islice(stream, limit):
            answered[number] = tokens
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(200)))
    for number in range(200):
        if number % 3:
            assert answered[number] == expected[number % len(prompts)], number
    cluster.wait_free()


def test_drained_node_hands_over_its_requests(cluster, expected):
    node = cluster.decodes[0]
    try:
        drained = lambda: post(f"{node.url}/drain", {"timeout_s": 0})  # noqa: E731
        assert answers(cluster, asked(40), drained) == expected
    finally:
        assert post(f"{node.url}/drain", {"cancel": True})[0] == 200
    cluster.wait_free()


@pytest.mark.thorough
def test_prompts_that_fill_the_pool_to_its_last_block_do_not_block_each_other(model, tmp_path):
    rng, own = random.Random(4), ("--dtype", "float32")
    prompts = [[rng.randrange(3, 320) for _ in range(128)] for _ in range(12)]
    expected = alone(model, [(ids, {"max_tokens": 20}) for ids in prompts], tmp_path, *own, *FLAGS)
    # One block is vLLM's own; the others hold four prompts, and no token more.
    tight = ("--num-gpu-blocks-override", "17", "--max-model-len", "256")
    with Cluster(tmp_path, model, flags=own, vllm_flags=(*FLAGS, *tight)) as tight_cluster:
        assert tight_cluster.generate_all(prompts, max_new_tokens=20) == expected
        tight_cluster.wait_free()


def test_prompts_that_prefill_preempts_are_handed_off_all_the_same(model, tmp_path):
    prompts = [ids * 2 for ids in asked(30) if 100 < len(ids) < 200]
    tight = ("--num-gpu-blocks-override", "20", "--max-model-len", "512")
    own = ("--dtype", "float32")
    questions = [(ids, {"max_tokens": 20}) for ids in prompts]
    expected = alone(model, questions, tmp_path, *own, *FLAGS)
    with Cluster(tmp_path, model, flags=own, vllm_flags=(*FLAGS, *tight)) as cluster:
        assert cluster.generate_all(prompts, max_new_tokens=20) == expected
        assert not cluster.num_replays()
        cluster.wait_free()
