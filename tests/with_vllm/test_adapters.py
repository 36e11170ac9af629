"""Requests with a LoRA adapter: same answers as plain vLLM, also while adapters are loaded and unloaded."""

import itertools
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.patience import eventually
from tests.with_vllm.models import adapter, embedded
from tests.with_vllm.nodes import NUM_NEW, START_S, Cluster, alone, get, post, post_text

LIMITS = ("--max-model-len", "1024", "--max-num-batched-tokens", "512")
FLAGS = (*LIMITS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
NUM_STREAMS = 8


@pytest.mark.thorough
def test_adapters_match_plain_vllm_and_share_no_prefix(tmp_path, cache):
    model, rng = embedded(cache), random.Random(5)
    paths = {
        name: adapter(model, tmp_path / name, seed) for seed, name in enumerate(["sql", "law"])
    }
    names = [None, "sql", "law"]
    asked = [[rng.randrange(3, 40_000) for _ in range(length)] for length in (1, 130, 400)]
    # Each prompt with each adapter, one after the other, then all again with a warm cache.
    turns = [(ids, name) for _ in range(2) for ids in asked for name in names]
    own = {name: {"adapter": str(path)} for name, path in paths.items()}
    questions = [(ids, own.get(name, {})) for ids, name in turns]
    expected = alone(model, questions, tmp_path, "--dtype", "float32", *FLAGS)
    assert len({tuple(answer) for answer in expected[3:6]}) == 3
    modules = ("--lora-modules", *(f"{name}={path}" for name, path in paths.items()))
    with Cluster(
        tmp_path, model, flags=("--dtype", "float32"), vllm_flags=(*FLAGS, *modules)
    ) as cluster:
        assert [cluster.generate(ids, adapter=name) for ids, name in turns] == expected
        models = get(f"{cluster.url}/v1/models")[1]["data"]
        assert [each["id"] for each in models][1:] == ["sql", "law"]
        status, answer = complete(cluster, "law", asked[1])
        assert (status, answer["model"]) == (200, "law")
        assert answer["choices"][0]["token_ids"] == expected[turns.index((asked[1], "law"))]
        status, answer = complete(cluster, "poems", asked[1])
        assert status == 404
        assert "'sql', 'law'" in answer["error"]["message"]
        cluster.wait_free()


def complete(cluster, name, ids):
    body = {"model": name, "prompt": ids, "max_tokens": NUM_NEW, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return post(f"{cluster.url}/v1/completions", body)


def change(cluster, verb, name, path=None, *, in_place=False):
    body = {"lora_name": name, "lora_path": path and str(path), "load_inplace": in_place}
    return post_text(f"{cluster.url}/v1/{verb}_lora_adapter", body)


class Load:
    """Streams that ask for adapters by turns until the end of the `with` block, and record the answers."""

    def __init__(self, cluster, names, prompts) -> None:
        self._cluster, self._names, self._prompts = cluster, names, prompts
        self._pool, self._is_ending = ThreadPoolExecutor(NUM_STREAMS), threading.Event()
        self.phase, self.answers = 0, []

    def __enter__(self):
        self._streams = [self._pool.submit(self._ask, first) for first in range(NUM_STREAMS)]
        return self

    def _ask(self, first) -> None:
        for turn in itertools.count(first):
            if self._is_ending.is_set():
                return
            name, place = self._names[turn % len(self._names)], turn % len(self._prompts)
            first = self.phase
            status, answer = complete(self._cluster, name, self._prompts[place])
            self.answers.append((range(first, self.phase + 1), name, place, status, answer))

    def run(self, phase) -> None:
        """Begin a phase, and wait for some answers."""
        self.phase, num = phase, len(self.answers) + 2 * NUM_STREAMS
        assert eventually(lambda: len(self.answers) >= num, within_s=START_S)

    def __exit__(self, *_raised) -> None:
        self._is_ending.set()
        self._pool.shutdown()
        for stream in self._streams:
            stream.result()


# Phases of the test below: the name `sql` is loaded again in 3, `law` is unloaded in 5 and loaded in 7.
def sql_answers(phases, old, new):
    return [new] if phases[0] > 3 else [old] if phases[-1] < 3 else [old, new]


def law_statuses(phases):
    if set(phases) == {6}:
        return {404}
    return {200} if phases[-1] < 5 or phases[0] > 7 else {200, 404}


@pytest.mark.thorough
def test_adapters_are_loaded_and_unloaded_under_load(tmp_path, cache):
    model, rng = embedded(cache), random.Random(6)
    contents = [adapter(model, tmp_path / f"content-{seed}", seed) for seed in range(3)]
    prompts = [[rng.randrange(3, 40_000) for _ in range(length)] for length in (40, 130, 300)]
    questions = [(ids, {"adapter": str(path)}) for path in contents for ids in prompts]
    flat = alone(model, questions, tmp_path, "--dtype", "float32", *FLAGS)
    law, old, new = (flat[at : at + len(prompts)] for at in range(0, len(flat), len(prompts)))
    assert len({tuple(answers[1]) for answers in (law, old, new)}) == 3
    sql = shutil.copytree(contents[1], tmp_path / "sql")

    flags, interval_ms = (
        ("--dtype", "float32"),
        10_000,
    )  # no node is lost, however busy the machine is
    with Cluster(
        tmp_path, model, flags=flags, vllm_flags=FLAGS, interval_ms=interval_ms
    ) as cluster:
        status, text = change(cluster, "load", "sql", tmp_path / "nowhere")
        assert status == 404
        assert f"prefill {cluster.prefills[0].url}: Loading lora sql failed" in text
        assert complete(cluster, "sql", prompts[0])[0] == 404
        assert change(cluster, "load", "law", contents[0])[0] == 200
        assert change(cluster, "load", "sql", sql)[0] == 200
        assert change(cluster, "load", "sql", sql)[0] == 400

        # The base's answers depend on the batch in vLLM for CPUs, so they are not compared.
        base = get(f"{cluster.url}/v1/models")[1]["data"][0]["id"]
        with Load(cluster, ["sql", "law", "sql", base, "law"], prompts) as load:
            load.run(1)
            shutil.copytree(contents[2], sql, dirs_exist_ok=True)
            load.run(2)
            load.phase = 3
            assert change(cluster, "load", "sql", sql, in_place=True)[0] == 200
            load.run(4)
            load.phase = 5
            assert change(cluster, "unload", "law")[0] == 200
            load.run(6)
            load.phase = 7
            assert change(cluster, "load", "law", contents[0])[0] == 200
            load.run(8)

        for phases, name, place, status, answer in load.answers:
            if status == 503:
                assert answer["error"]["code"] == "adapter_gone", answer
                assert not {3, 5}.isdisjoint(phases)
                continue
            assert status in (law_statuses(phases) if name == "law" else {200}), answer
            if status == 200 and name != base:
                allowed = [law] if name == "law" else sql_answers(phases, old, new)
                found = answer["choices"][0]["token_ids"]
                assert found in [answers[place] for answers in allowed], (phases, name, place)
        seen = {(phases[0], name, status) for phases, name, _, status, _ in load.answers}
        assert {(2, "sql", 200), (4, "sql", 200), (6, "law", 404), (8, "law", 200)} <= seen

        # The old contents leave the nodes' memory, and a restarted node gets what the other one has.
        for log in (node.log for node in cluster.nodes):
            assert eventually(lambda log=log: log.read_text().count('"adapter.removed"') == 2)
        cluster.decodes[0].start()
        cluster.wait_up()
        for name, answers in (("sql", new), ("law", law)):
            found = [complete(cluster, name, ids)[1]["choices"][0]["token_ids"] for ids in prompts]
            assert found == answers
        assert change(cluster, "unload", "sql")[0] == 200
        assert change(cluster, "unload", "sql")[0] == 404
        assert complete(cluster, "sql", prompts[0])[0] == 404
        cluster.wait_free()
