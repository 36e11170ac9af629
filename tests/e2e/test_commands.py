"""The commands as people type them, right and wrong.

Those with `is_fresh` start as a user starts them; the others are forked, as everywhere in these tests.
"""

import json
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tandem.cli.up import free_ports
from tests.e2e.clients import generate, is_told
from tests.e2e.cluster import START_TIMEOUT_S, Cluster, ask, running_cluster, wait_healthy
from tests.patience import eventually
from tests.processes import Process

PACKAGES = ("decode", "engine", "frontend", "kvtier", "kvtransfer", "node", "prefill", "router")
PACKAGES += ("tandem", "telemetry", "wire")
POOL = ("--max-total-tokens", "2048", "--num-threads", "1")
# For what the processes say and do whatever computes in them: it starts without torch.
SIMULATED = ("--engine", "simulated", "--sim-kv", "real", *POOL)


def refused(*argv: str, env=None, is_fresh: bool = False) -> str:
    """Run a command that is to fail; return what it says."""
    process = Process(*argv, env=env, is_fresh=is_fresh)
    status = process.wait(START_TIMEOUT_S)
    said = process.output()
    process.log.close()
    assert status == 2, said
    assert "Traceback" not in said, said
    return said


@pytest.mark.slow
@pytest.mark.smoke
def test_one_command_starts_a_cluster_that_answers_and_ctrl_c_ends_it(tiny_model):
    port = free_ports(1)[0]
    model = ("--model", str(tiny_model("llama")))
    up = Process("up", "--port", str(port), *model, "--load-format", "dummy", *POOL, is_fresh=True)
    wait_healthy(f"http://127.0.0.1:{port}", up)
    answer = generate(f"http://127.0.0.1:{port}", input_ids=[5, 6], max_new_tokens=3)
    assert len(answer["output_ids"]) == 3
    assert eventually(lambda: "Tandem serves at" in up.output())
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    said = up.output()
    up.log.close()
    assert "curl" in said
    assert "Stopping: requests in progress finish within 30 s" in said
    assert "Stopped after" in said
    assert "Traceback" not in said
    assert not {"node.unusable", "node.down", "kv_link.lost"} & set(said.split())


def test_a_cluster_starts_in_a_directory_with_files_named_like_our_packages(tiny_model, tmp_path):
    for package in PACKAGES:
        (tmp_path / f"{package}.py").write_text(f"raise SystemExit('{package}.py of the user ran')")
    port = free_ports(1)[0]
    flags = ("--port", str(port), "--model", str(tiny_model("llama")), *SIMULATED)
    up = Process("up", *flags, cwd=tmp_path, is_fresh=True)
    try:
        wait_healthy(f"http://127.0.0.1:{port}", up)
        answer = generate(f"http://127.0.0.1:{port}", input_ids=[5, 6], max_new_tokens=3)
        assert len(answer["output_ids"]) == 3
    finally:
        up.stop()


@pytest.mark.slow
def test_two_of_each_share_the_work_and_every_process_ends_with_0(tiny_model):
    flags = ("--model", str(tiny_model("llama")), "--log-level", "warning", *SIMULATED)
    cluster = Cluster(*flags, prefills=2, decodes=2, router_flags=("--workers", "2"))
    try:
        wait_healthy(cluster.url, *cluster.processes)
        # Each edge worker finds the nodes by itself, and they answer in turn.
        all_serve = "2 of 2 prefill nodes and 2 of 2 decode nodes serve"
        health = f"{cluster.url}/health"
        assert eventually(lambda: all(is_told(health, 200, all_serve) for _ in range(20)))
        prompts = [[5 + i, 6, 7] for i in range(24)]
        answers = generate(
            cluster.url,
            input_ids=prompts,
            sampling_params={"max_new_tokens": 4, "ignore_eos": True},
        )
        assert [len(answer["output_ids"]) for answer in answers] == [4] * 24
        # Nodes tell their load twice a second.
        assert eventually(lambda: all(load["generated_tokens"] for load in cluster.loads()))
    finally:
        assert cluster.stop() == [0] * 5


@pytest.mark.slow
def test_a_prefill_and_a_decode_of_different_models_are_refused_by_name(tiny_model):
    prefill_port, bootstrap_port, decode_port, router_port = free_ports(4)
    prefill = Process(
        *("prefill", "--model", str(tiny_model("llama")), "--port", str(prefill_port)),
        *("--bootstrap-port", str(bootstrap_port), *SIMULATED),
    )
    decode = Process(
        "decode", "--model", str(tiny_model("qwen2")), "--port", str(decode_port), *SIMULATED
    )
    nodes = [f"http://127.0.0.1:{port}" for port in (prefill_port, decode_port)]
    router = Process("lb", "--prefill", nodes[0], "--decode", nodes[1], "--port", str(router_port))
    try:
        for node in nodes:
            wait_healthy(node, prefill, decode)
        prints = [ask(f"{node}/server_info")[1]["model"]["fingerprint"] for node in nodes]
        # The halves, driven as SGLang's router would: the handshake refuses.
        body = {"input_ids": [5], "bootstrap_host": "127.0.0.1", "bootstrap_room": 7}
        said = str(generate(nodes[1], **body, bootstrap_port=bootstrap_port))
        assert all(fingerprint in said for fingerprint in prints), said
        # The router does not pair them, and says why.
        health_url = f"http://127.0.0.1:{router_port}/health"
        assert eventually(lambda: is_told(health_url, 503, *prints)), ask(health_url)
    finally:
        for process in (router, prefill, decode):
            process.stop()


@pytest.mark.slow
def test_a_router_without_nodes_keeps_trying_and_says_so(tiny_model):
    flags = ("--model", str(tiny_model("llama")), "--log-level", "warning", *SIMULATED)
    prefill_port, bootstrap_port, decode_port, port = free_ports(4)
    router = Process(
        *("lb", "--prefill", f"http://127.0.0.1:{prefill_port}", str(bootstrap_port)),
        *("--decode", f"http://127.0.0.1:{decode_port}", "--port", str(port)),
    )
    nodes: list[Process] = []
    url = f"http://127.0.0.1:{port}"
    try:
        assert eventually(lambda: is_told(f"{url}/health", 503, str(prefill_port)))
        assert ask(f"{url}/generate", {"input_ids": [5]})[0] == 503
        nodes.append(
            Process(
                *("prefill", "--port", str(prefill_port)),
                *("--bootstrap-port", str(bootstrap_port), *flags),
            )
        )
        nodes.append(Process("decode", "--port", str(decode_port), *flags))
        wait_healthy(url, router, *nodes)
        assert generate(url, input_ids=[5], max_new_tokens=1)["output_ids"]
    finally:
        for process in (router, *nodes):
            process.stop()


@pytest.mark.slow
def test_a_decode_node_under_sglangs_protocol_answers_with_every_token(cluster):
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = generate(cluster.url, input_ids=[9, 8, 7], sampling_params=sampling)
    bootstrap_port = cluster.processes[0].argv[4]
    body = {
        "input_ids": [9, 8, 7],
        "sampling_params": sampling,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": int(bootstrap_port),
        "bootstrap_room": 12345,
    }
    with ThreadPoolExecutor() as pool:
        urls = (cluster.prefill_urls[0], cluster.decode_urls[0])
        halves = list(pool.map(lambda url: generate(url, **body), urls))
    assert halves[1]["output_ids"] == whole["output_ids"]
    assert halves[0]["output_ids"] == whole["output_ids"][:1]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["prefill", "decode", "serve"])
def test_a_model_that_is_not_there_is_refused_with_what_to_give(command):
    said = refused(command, "--model", "/no/such/model", is_fresh=command == "serve")
    assert "a name on the Hugging Face Hub" in said


def broken(path: Path, fault: str) -> str:
    """Break a model; return what is to be said of it."""
    weights = path / "model.safetensors"
    match fault:
        case "weights that are none":
            weights.write_bytes(b"not safetensors")
            return "is not a safetensors file"
        case "a tensor that is missing":
            tensors = load_file(weights)
            del tensors["model.norm.weight"]
            save_file(tensors, weights, {"format": "pt"})
            return "model.norm.weight"
        case "a wrong type":
            config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": "3"}
            (path / "config.json").write_text(json.dumps(config))
            return "num_hidden_layers"
        case "a broken tokenizer":
            (path / "tokenizer.json").write_text("{}")
            return "tokenizer.json is broken: "
    raise AssertionError(fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("prefill", "a broken tokenizer"),
        ("decode", "weights that are none"),
        ("serve", "a wrong type"),
        ("serve", "a broken tokenizer"),
        ("up", "a tensor that is missing"),
    ],
)
def test_a_broken_model_is_refused_in_one_sentence(tiny_model, tmp_path, command, fault):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    sentence = broken(path, fault)
    ports = [str(port) for port in free_ports(2)]
    places = {"prefill": ["--port", ports[0], "--bootstrap-port", ports[1]]}
    said = refused(command, "--model", str(path), *places.get(command, ["--port", ports[0]]))
    lines = [line for line in said.splitlines() if line.startswith(f"tandem {command}: error: ")]
    assert len(lines) == 1, said
    assert sentence in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--port", "--bootstrap-port"])
def test_a_port_in_use_is_refused_with_what_to_do(tiny_model, flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        others = {"--port": "--bootstrap-port", "--bootstrap-port": "--port"}
        other_port = str(free_ports(1)[0])
        argv = (
            flag,
            port,
            others[flag],
            other_port,
            "--model",
            str(tiny_model("llama")),
            *SIMULATED,
        )
        said = refused("prefill", *argv)
        assert port in said
        assert "use a different" in said


@pytest.mark.slow
def test_a_router_port_in_use_is_refused_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        nodes = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
        assert port in refused("lb", *nodes, "--port", port)


@pytest.mark.slow
def test_listening_to_the_world_without_a_secret_is_refused(tiny_model):
    said = refused(
        *("decode", "--host", "0.0.0.0", "--model", str(tiny_model("llama"))),
        env={"TANDEM_CLUSTER_KEY": ""},
    )
    assert "TANDEM_CLUSTER_KEY" in said


def test_an_unknown_command_is_answered_with_the_known_ones():
    assert "prefill" in refused("prefil", is_fresh=True)


def test_a_mistyped_flag_is_refused():
    assert "--modle" in refused("prefill", "--modle", "x", is_fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_cluster_on_ipv6_keeps_to_those_with_its_key_and_its_secret(tiny_model, transport):
    key = ("--api-key", "a-key")
    flags = ("--model", str(tiny_model("llama")), "--log-level", "warning", *SIMULATED, *key)
    settings = {
        "host": "::1",
        "env": {"TANDEM_CLUSTER_KEY": "one secret for all"},
        "router_flags": key,
    }
    with running_cluster(*flags, "--transfer-backend", transport, **settings) as cluster:
        body = {"input_ids": [5], "max_new_tokens": 3}
        assert ask(f"{cluster.url}/generate", body)[0] == 401
        status, answer = ask(
            f"{cluster.url}/generate", body, headers={"Authorization": "Bearer a-key"}
        )
        assert (status, len(answer["output_ids"])) == (200, 3)
