"""Nodes whose model vLLM shards over several workers."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.patience import eventually
from tests.with_vllm.models import prompts, tiny
from tests.with_vllm.nodes import Cluster, alone, check_answers, get

NUM_TOKENS = 60
FLAGS = ("--skip-tokenizer-init", "--max-num-seqs", "64", "--block-size", "32")
FLAGS += ("--max-num-batched-tokens", "128", "--max-model-len", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.mark.thorough
def test_nodes_that_need_equal_sizes_do_not_pair_and_their_names_show_why(tmp_path):
    model = tiny("state", tmp_path / "model")
    flags = ("--skip-tokenizer-init", "--max-num-batched-tokens", "128", "--max-num-seqs", "64")
    own = ("--dtype", "float32")
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags, sizes=(1, 2)) as cluster:
        status, body = get(f"{cluster.url}/health")
        assert status == 503, body
        for words in (b"-state-tp1", b"-state-tp2", b"with the same sizes where a name ends in"):
            assert words in body


@pytest.mark.thorough
def test_pipeline_stages_of_unequal_sizes_match_one_process(tmp_path, model):
    asked = prompts(320, block=32, longest=400)
    # The CPU build allocates the buffers between stages only when it compiles.
    pipeline = (*FLAGS, "--pipeline-parallel-size", "2", "--no-enforce-eager")
    questions = [(ids, {}) for ids in asked * 2]
    expected = alone(model, questions, tmp_path, "--dtype", "float32", *FLAGS)
    own = ("--dtype", "float32")
    with Cluster(tmp_path, model, flags=own, vllm_flags=pipeline, sizes=(1, 2)) as cluster:
        check_answers(cluster, asked, expected, is_exact_at_once=True)


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 2), marks=pytest.mark.thorough)])
def test_answers_match_one_process_even_when_a_worker_is_killed(tmp_path, model, sizes):
    asked = prompts(320, block=32, longest=200)[:8]
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in asked]
    expected = alone(model, questions, tmp_path, "--dtype", "float32", *FLAGS)
    own = ("--dtype", "float32")
    with Cluster(tmp_path, model, decodes=2, flags=own, vllm_flags=FLAGS, sizes=sizes) as cluster:
        assert [cluster.generate(ids, max_new_tokens=NUM_TOKENS) for ids in asked] == expected
        cluster.wait_free()
        node, idle = cluster.decodes
        workers = [workers_of(each) for each in (node, idle)]
        with ThreadPoolExecutor(len(asked)) as pool:
            streams = [cluster.stream(ids, max_new_tokens=NUM_TOKENS) for ids in asked]
            firsts = list(pool.map(next, streams))
            workers[0][-1].kill()
            answers = list(pool.map(lambda stream: list(stream)[-1], streams))
        assert all(len(first) < NUM_TOKENS for first in firsts)
        assert answers == expected
        end_after_a_death(cluster, node)
        cluster.wait_free()
        workers[1][-1].kill()  # no step runs that could report it
        end_after_a_death(cluster, idle)
    assert eventually(lambda: not any(map(runs, [*workers[0], *workers[1]])))


def end_after_a_death(cluster, node) -> None:
    node.process.wait(60)
    assert "died unexpectedly" in node.log.read_text()
    cluster.nodes.remove(node)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers_of(node) -> list[psutil.Process]:
    processes = map(psutil.Process, sorted(node.process.tree()))
    return [each for each in processes if "Worker" in each.name()]
