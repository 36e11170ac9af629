"""Nodes whose ranks run on two hosts: 127.0.0.1 and 127.0.0.2."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.with_vllm.models import prompts, tiny
from tests.with_vllm.nodes import Cluster, again, alone, check_answers, get

NUM_TOKENS = 60
FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--max-num-batched-tokens", "128")
FLAGS += ("--max-num-seqs", "64", "--max-model-len", "512")
EXACT = ("--dtype", "float32")
# The CPU build allocates the buffers between stages only when it compiles.
STAGES = ("--pipeline-parallel-size", "2", "--no-enforce-eager")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


def on_two_hosts(directory, model, flags=(), sizes=(2, 2), decodes=1):
    """Return a cluster whose nodes have ranks on two hosts each."""
    flags = (*FLAGS, *flags)
    cluster = Cluster(directory, model, 1, decodes, EXACT, flags, sizes=sizes)
    for node in cluster.nodes:
        node.add_host()
    return cluster


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "sizes"), [((), (2, 2)), (STAGES, (1, 1))], ids=["ranks", "stages"]
)
def test_answers_match_one_process(tmp_path, model, flags, sizes):
    asked = prompts(320, block=32, longest=400, count=40)
    questions = [(ids, {}) for ids in [*asked, *again(asked)]]
    expected = alone(model, questions, tmp_path, *EXACT, *FLAGS)
    with on_two_hosts(tmp_path, model, flags, sizes) as cluster:
        check_answers(cluster, asked, expected, is_exact_at_once=True)
        for node in cluster.nodes:
            status, body = get(f"{node.joined_url}/health")
            assert (status, "first host" in str(body)) == (503, True)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["process", "joined"])
def test_streams_continue_when_a_host_dies(tmp_path, model, victim):
    asked = prompts(320, block=32, longest=200)[:8]
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in asked]
    expected = alone(model, questions, tmp_path, *EXACT, *FLAGS)
    with on_two_hosts(tmp_path, model, decodes=2) as cluster:
        node, idle = cluster.decodes
        with ThreadPoolExecutor(len(asked)) as pool:
            streams = [cluster.stream(ids, max_new_tokens=NUM_TOKENS) for ids in asked]
            firsts = list(pool.map(next, streams))
            getattr(node, victim).kill()
            answers = list(pool.map(lambda stream: list(stream)[-1], streams))
        assert all(len(first) < NUM_TOKENS for first in firsts)
        assert answers == expected
        for process in (node.process, node.joined):
            process.wait(60)
        getattr(idle, victim).kill()  # no step runs that could notice it
        for process in (idle.process, idle.joined):
            process.wait(60)


@pytest.mark.thorough
def test_node_drains_while_all_its_hosts_stop(tmp_path, model):
    asked = prompts(320, block=32, longest=200)[:4]
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in asked]
    expected = alone(model, questions, tmp_path, *EXACT, *FLAGS)
    with on_two_hosts(tmp_path, model, decodes=2) as cluster:
        node = cluster.decodes[0]
        with ThreadPoolExecutor(len(asked)) as pool:
            streams = [cluster.stream(ids, max_new_tokens=NUM_TOKENS) for ids in asked]
            list(pool.map(next, streams))
            for process in (node.joined, node.process):
                process.signal(signal.SIGTERM)
            assert [list(stream)[-1] for stream in streams] == expected
        assert [process.wait(60) for process in (node.process, node.joined)] == [0, 0]
        assert cluster.num_replays() == 0
