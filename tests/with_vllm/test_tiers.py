"""Tiers below vLLM's prefix cache: evicted prompts come back, and answers equal plain vLLM's."""

import random

import pytest

from tests.patience import eventually
from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import Cluster, alone

NUM_PROMPTS, PROMPT_TOKENS, BLOCK = 8, 200, 32
FLAGS = ("--skip-tokenizer-init", "--max-model-len", "512", "--block-size", str(BLOCK))
# The blocks of three prompts.
SMALL = (*FLAGS, "--num-gpu-blocks-override", "24")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked():
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(model, asked, tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone")
    return alone(model, [(ids, {}) for ids in asked], directory, "--dtype", "float32", *FLAGS)


def cluster_of(directory, model, spec):
    flags = ("--dtype", "float32", "--kv-tier", spec, "--kv-tier-min-tokens", str(BLOCK))
    flags += ("--kv-tier-timeout-ms", "20000")  # on busy cores
    return Cluster(directory, model, flags=flags, vllm_flags=SMALL)


def tier_of(node):
    return node.load["tiers"][0]


def wait_stored(cluster, num_pages):
    [prefill] = cluster.prefills
    assert eventually(lambda: tier_of(prefill)["num_pages"] >= num_pages), prefill.load


def test_evicted_prompts_come_from_host_memory(tmp_path, model, asked, expected):
    num_blocks = PROMPT_TOKENS // BLOCK
    with cluster_of(tmp_path, model, "host:64MiB") as cluster:
        assert [cluster.generate(ids) for ids in asked] == expected
        wait_stored(cluster, NUM_PROMPTS * num_blocks)
        assert [cluster.generate(ids) for ids in asked] == expected
        # The last prompts may still be in vLLM's cache.
        least = (NUM_PROMPTS - 3) * num_blocks * BLOCK
        assert eventually(lambda: tier_of(cluster.prefills[0])["hit_tokens"] >= least)
        assert cluster.generate_all(asked) == expected
        cluster.wait_free()


@pytest.mark.thorough
def test_restarted_prefill_reads_what_is_not_damaged(tmp_path, model, asked, expected):
    directory = tmp_path / "tier"
    with cluster_of(tmp_path, model, f"disk:{directory}:64MiB") as cluster:
        assert [cluster.generate(ids) for ids in asked] == expected
        wait_stored(cluster, NUM_PROMPTS * (PROMPT_TOKENS // BLOCK))
        [prefill] = cluster.prefills
        prefill.process.kill()
        files = sorted(each for each in directory.rglob("*") if each.is_file())
        for file in files[::7]:
            data = bytearray(file.read_bytes())
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
            file.write_bytes(data)
        prefill.start()
        cluster.wait_up()
        assert [cluster.generate(ids) for ids in asked] == expected
        assert eventually(lambda: tier_of(prefill)["hit_tokens"]), prefill.load
        assert tier_of(prefill)["num_corrupted"]
        cluster.wait_free()


@pytest.mark.thorough
def test_next_turn_finds_the_answer_that_decode_has_saved(tmp_path, model, asked):
    with cluster_of(tmp_path, model, f"disk:{tmp_path / 'tier'}:64MiB") as cluster:
        answer = cluster.generate(asked[0], max_new_tokens=2 * BLOCK)
        [decode] = cluster.decodes
        assert eventually(lambda: tier_of(decode)["put_bytes"]), decode.load
        *_, last = cluster.events([*asked[0], *answer], max_new_tokens=1)
        assert last["meta_info"]["cached_tokens"] > PROMPT_TOKENS
