"""Nodes that die, freeze and are asked to stop: no token is lost or repeated, and every block is free at the end."""

import json
import random
import signal
import threading
import urllib.request

import pytest

from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import Cluster, alone, post

NUM_TOKENS = 60
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
    """Answers of vLLM alone to `asked(40)`."""
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in asked(40)]
    return alone(model, questions, tmp_path_factory.mktemp("alone"), "--dtype", "float32", *FLAGS)


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    own = ("--dtype", "float32")
    with Cluster(directory, model, 2, 2, flags=own, vllm_flags=FLAGS) as running:
        yield running


@pytest.fixture(autouse=True)
def _whole(cluster):
    """Start with every node, and with every block free."""
    for node in cluster.nodes:
        if not node.process.is_running:
            node.start()
    cluster.wait_up()


def answers(cluster, prompts) -> list:
    return cluster.generate_all(prompts, max_new_tokens=NUM_TOKENS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_whose_node_is_killed_are_answered_as_if_nothing_had_happened(
    cluster, expected, role
):
    node = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
    timer = threading.Timer(1.5, node.process.signal, [signal.SIGKILL])
    timer.start()
    assert answers(cluster, asked(40)) == expected
    timer.join()
    assert not node.process.is_running
    cluster.nodes.remove(node)
    try:
        cluster.wait_free()
    finally:
        cluster.nodes.append(node)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_whose_node_is_stopped_are_answered_by_others(cluster, expected, role):
    node = (cluster.prefills if role == "prefill" else cluster.decodes)[1]
    timer = threading.Timer(1.5, node.process.signal, [signal.SIGSTOP])
    timer.start()
    try:
        assert answers(cluster, asked(40)) == expected
    finally:
        timer.join()
        node.process.signal(signal.SIGCONT)
    cluster.wait_up()
    cluster.wait_free()


def test_two_hundred_requests_a_third_of_them_aborted_leave_no_block_behind(cluster, expected):
    rng = random.Random(5)
    prompts, answered = asked(40), {}

    def ask(number: int) -> None:
        place = number % len(prompts)
        body = {
            "input_ids": prompts[place],
            "sampling_params": {
                "temperature": 0.0,
                "ignore_eos": True,
                "max_new_tokens": NUM_TOKENS,
            },
            "stream": True,
        }
        wanted = urllib.request.Request(
            f"{cluster.url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        # Before the first event, after it, or somewhere in the answer.
        limit = rng.choice([0, 1, 20]) if number % 3 == 0 else None
        with urllib.request.urlopen(wanted, timeout=240) as answer:
            for count, line in enumerate(line for line in answer if line.startswith(b"data: {")):
                if limit is not None and count >= limit:
                    return
                answered[number] = json.loads(line[6:])["output_ids"]

    numbers = iter(range(200))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            ask(number)

    workers = [threading.Thread(target=work) for _ in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number in range(200):
        if number % 3:
            assert answered[number] == expected[number % len(prompts)], number
    cluster.wait_free()


def test_a_drained_node_hands_its_requests_over(cluster, expected):
    node = cluster.decodes[0]
    timer = threading.Timer(1.0, post, [f"{node.url}/drain", {"timeout_s": 0}])
    timer.start()
    try:
        assert answers(cluster, asked(40)) == expected
    finally:
        timer.join()
        assert post(f"{node.url}/drain", {"cancel": True})[0] == 200
    cluster.wait_free()
