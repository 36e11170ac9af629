"""A cluster that only takes time: the tokens that arithmetic says, through every real process."""

import asyncio
import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tandem.frontend.text.tokenizer import Tokenizer
from tandem.node.life.ending import FIRST_FORWARDS
from tests.e2e.clients import (
    NUM_NEW,
    PROMPTS,
    QUIET,
    SIMULATED,
    are_up,
    expected,
    generate,
    is_told,
    load_of,
    nodes_of,
    stream_all,
    unaccounted,
)
from tests.e2e.cluster import ask, load_now, running, running_cluster, running_serve
from tests.patience import eventually
from tests.processes import Process


def test_a_step_that_hangs_ends_the_node(tiny_model, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text('{"prefill": {"per_pair_ms": 10}}')  # 30 ms for 2 tokens, 13 minutes for 400
    flags = ("--sim-profile", str(profile), "--step-timeout-s", "1", *SIMULATED)
    with running("serve", "--model", str(tiny_model("llama")), *flags) as (url, node):
        assert len(generate(url, input_ids=[5, 6], max_new_tokens=40)["output_ids"]) == 40
        with ThreadPoolExecutor(1) as pool, contextlib.suppress(OSError):
            asked = pool.submit(generate, url, input_ids=[5, 6] * 200)
            assert node.wait() == 1
            asked.result()
        said = node.output()
    assert "Timeout" in said  # where every thread stood
    assert "engine.died" in said


def test_a_prompt_that_ends_engines_leaves_the_third_one_to_others(tiny_model, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text('{"prefill": {"per_pair_ms": 10}}')  # as above
    model = ("--model", str(tiny_model("llama")))
    flags = ("--sim-profile", str(profile), "--step-timeout-s", "1", *SIMULATED)
    with running_cluster(*model, *flags, prefills=3) as cluster:
        *prefills, _decode, _router = cluster.processes
        for i in range(5 * FIRST_FORWARDS):  # no step is limited before so many
            generate(cluster.url, input_ids=[5, 6 + i], max_new_tokens=1)
        for _ in range(2):  # the second one is refused at once
            refused = generate(cluster.url, input_ids=[5, 6] * 200)
            assert refused["error"]["code"] == "request_ended_engine"
        assert eventually(lambda: sum(prefill.is_running() for prefill in prefills) == 1)
        assert len(generate(cluster.url, input_ids=[5, 6], max_new_tokens=4)["output_ids"]) == 4
        assert sum(prefill.is_running() for prefill in prefills) == 1


def check_answers(url: str, model) -> None:
    """Ask in text and in ids, greedy and sampled, for what can be had and what cannot."""
    tokenizer = Tokenizer.load(model)
    text = "Ceci n'est pas une pipe"
    told = generate(url, text=text, max_new_tokens=40, temperature=0)
    assert told["output_ids"] == expected(model, tokenizer.encode(text), 40)
    assert told["text"] == tokenizer.decode(told["output_ids"])
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    seeded = generate(url, input_ids=[5, 6], max_new_tokens=9, temperature=1, sampling_seed=7)
    assert seeded["output_ids"] == expected(model, [5, 6], 9, seed=7)
    refused = generate(url, text=text, repetition_penalty=1.5)
    assert "does not support repetition_penalty" in refused["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("kv", [pytest.param("real", marks=pytest.mark.smoke), "none"])
def test_a_simulated_cluster_loses_a_decode_node_and_no_token(described_model, profile, kv):
    flags = ("--model", str(described_model), *SIMULATED, *QUIET, "--verify-kv", "always")
    simulated = ("--sim-kv", kv, *profile(0.01, 4))
    with running_cluster(*flags, *simulated, decodes=2) as cluster:
        assert eventually(lambda: are_up(cluster.url)), "a router serves with its first pair"
        kill = partial(os.kill, cluster.processes[1].pid, signal.SIGKILL)
        streams = asyncio.run(stream_all(cluster.url, kill))
        assert streams == [expected(described_model, prompt, NUM_NEW) for prompt in PROMPTS]
        others = [*cluster.prefill_urls, cluster.decode_urls[1]]
        assert eventually(lambda: not any(map(unaccounted, others)))
        decode = load_now(cluster.decode_urls[1])
        assert decode["generated_tokens"] < len(PROMPTS) * NUM_NEW, "some were the lost node's"
        assert decode["received_bytes"] >= len(PROMPTS) // 2 * 80 * (23040 if kv == "real" else 2)
        assert decode["num_corrupted"] == 0
        check_answers(cluster.url, described_model)


@pytest.mark.slow
def test_both_roles_in_one_simulated_engine_say_the_same(described_model, tmp_path):
    with running_serve("--model", str(described_model), *SIMULATED, *QUIET) as url:
        check_answers(url, described_model)
        check_batch(url, described_model, tmp_path)


def check_batch(url: str, model, directory) -> None:
    """Run a file of requests; what a kill leaves of it is tried in `tests/tools/batch`."""
    tokenizer = Tokenizer.load(model)
    prompts = {f"r{n}": f"Tell {n} of the rivers." for n in range(20)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": 9, "temperature": 0},
        }
        for name, prompt in prompts.items()
    ]
    (directory / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = Process("batch", str(directory / "in"), "-o", str(directory / "out"), "--url", url)
    assert process.wait() == 0, process.output()
    process.stop()
    results = map(json.loads, (directory / "out").read_text().splitlines())
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results}
    answers = {n: expected(model, tokenizer.encode(prompt), 9) for n, prompt in prompts.items()}
    assert texts == {name: tokenizer.decode(ids) for name, ids in answers.items()}


def timed(url: str, body: dict, path: str = "/generate") -> dict:
    told = ask(url + path, body, headers={"X-Tandem-Timings": "1"})[1]
    if not body.get("stream"):
        return told["timings"]
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    (timings,) = [event["timings"] for event in events if "timings" in event]
    return timings


IN_ORDER = ["tokenize", "queue", "pair", "reserve", "prefill_queue", "prefill", "link"]


def test_who_asks_is_told_where_the_time_to_first_token_went(described_model, profile):
    flags = (*SIMULATED, "--chunked-prefill-size", "64", *profile(0.2, 2), *QUIET)
    prompt = {"input_ids": list(range(5, 205)), "max_new_tokens": 8, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "Tell me of rivers. " * 30}], "max_tokens": 5}
    with running_cluster("--model", str(described_model), *flags) as cluster:
        calls = [
            timed(cluster.url, prompt),
            timed(cluster.url, prompt | {"stream": True, "input_ids": list(range(300, 500))}),
            timed(cluster.url, chat, "/v1/chat/completions"),
            timed(cluster.url, chat | {"stream": True}, "/v1/chat/completions"),
        ]
        nodes = [node["url"] for node in nodes_of(cluster.url)]
    for timings in calls:
        names = [phase["name"] for phase in timings["phases"]]
        assert names == [*IN_ORDER, "detokenize", "stream"]
        total = sum(phase["duration_s"] for phase in timings["phases"][:-1])
        assert abs(total - timings["ttft_s"]) < 1e-4
        beside = [phase["name"] for phase in timings["beside"]]
        assert {"prefill_chunk", "landed", "first_step"} <= set(beside)
        assert beside.count("first_step") == 1
        assert [timings["prefill"], timings["decode"]] == nodes
    # 200 tokens in chunks of 64, at 0.2 ms a token; the first may be launched, and be done, while nobody looks.
    first = {phase["name"]: phase["duration_s"] for phase in calls[0]["phases"]}
    assert first["prefill"] >= (200 - 64) * 0.2e-3
    chunks = [each for each in calls[0]["beside"] if each["name"] == "prefill_chunk"]
    assert len(chunks) == 4
    assert sum(each["duration_s"] for each in chunks) <= first["prefill"] + 1e-4


def test_a_node_that_serves_alone_tells_where_the_time_went(described_model):
    with running_serve("--model", str(described_model), *SIMULATED, *QUIET) as url:
        timings = timed(url, {"input_ids": list(range(5, 105)), "max_new_tokens": 4})
        assert "timings" not in generate(url, input_ids=[5, 6], max_new_tokens=2)
    names = [phase["name"] for phase in timings["phases"]]
    assert names == ["tokenize", "prefill_queue", "prefill", "link", "detokenize", "stream"]


@pytest.mark.slow
def test_the_router_and_each_node_show_that_they_can_generate(described_model):
    flags = ("--model", str(described_model), *SIMULATED, *QUIET)
    with running_cluster(*flags) as cluster:
        before = {url: load_now(url)["prompt_tokens"] for url in cluster.prefill_urls}
        for url in (cluster.url, *cluster.prefill_urls, *cluster.decode_urls):
            assert ask(f"{url}/health_generate") == (
                200,
                {"status": "ok", "detail": "tokens are generated"},
            )
        for url, num_tokens in before.items():
            assert eventually(lambda: load_now(url)["prompt_tokens"] > num_tokens)  # noqa: B023


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


def test_a_prompt_goes_back_to_the_nodes_that_have_it():
    prompt, others = [5 + i % 90 for i in range(600)], [[7 + i] * 300 for i in range(2)]
    router_flags = ("--policy", "cache_aware", *QUIET)
    with running_cluster(
        *SIMULATED, *QUIET, "--zone", "here", prefills=2, decodes=2, router_flags=router_flags
    ) as up:

        def num_blocks() -> list[int]:
            return sorted(node["prefixes"]["num_blocks"] for node in nodes_of(up.url))

        assert eventually(lambda: {node["zone"] for node in nodes_of(up.url)} == {"here"})

        body = {"max_new_tokens": 4, "temperature": 0}
        first = generate(up.url, input_ids=prompt, **body)
        assert first["meta_info"]["cached_tokens"] == 0
        assert eventually(lambda: num_blocks() == [0, 0, 4, 4])
        for other in others:
            generate(up.url, input_ids=other, **body)
            again = generate(up.url, input_ids=prompt, **body)
            assert again["output_ids"] == first["output_ids"]
            assert again["meta_info"]["cached_tokens"] >= 512
