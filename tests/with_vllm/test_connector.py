"""The connector under an unmodified `vllm serve`, which a proxy of its user's own drives."""

import json
import random
import threading

import pytest

from tandem.up import free_ports
from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import Process, alone, get, post

FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--dtype", "float32")
WAIT_S = 3


class Server:
    def __init__(self, role, port, model, directory, bootstrap_port):
        self.port = port
        config = {
            "kv_connector": "TandemConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "bootstrap_port": bootstrap_port,
                "grant_timeout_s": WAIT_S,
                "landed_timeout_s": WAIT_S,
            },
        }
        self.log = directory / f"{role}.log"
        self.process = Process(
            self.log,
            *("vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", *FLAGS),
            *("--kv-transfer-config", json.dumps(config)),
        )

    def is_up(self) -> bool:
        assert self.process.is_running, self.log.read_text()[-3000:]
        return get(f"http://127.0.0.1:{self.port}/health")[0] == 200

    def complete(self, prompt_ids, params, max_tokens):
        body = {
            "model": "m",
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            "kv_transfer_params": params,
        }
        status, answer = post(f"http://127.0.0.1:{self.port}/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    directory, (port, *own) = tmp_path_factory.mktemp("servers"), free_ports(3)
    roles = zip(("kv_producer", "kv_consumer"), own, strict=True)
    servers = [Server(role, each, model, directory, port) for role, each in roles]
    try:
        waiting = threading.Event()
        while not all(server.is_up() for server in servers):
            waiting.wait(0.3)
        yield *servers, port
    finally:
        for server in servers:
            server.process.kill()


def apart(pair, prompt_ids, room):
    """Send both halves at once; return decode's answer."""
    prefill, decode, port = pair
    half = threading.Thread(target=prefill.complete, args=(prompt_ids, {"bootstrap_room": room}, 1))
    half.start()
    answer = decode.complete(prompt_ids, source(room, port), 16)
    half.join()
    return answer


def source(room, port):
    return {"bootstrap_room": room, "bootstrap_host": "127.0.0.1", "bootstrap_port": port}


def test_both_halves_answer_as_one_vllm_does(pair, model, tmp_path):
    rng = random.Random(1)
    asked = [[rng.randrange(3, 320) for _ in range(length)] for length in (1, 31, 32, 33, 200)]
    flags = ("--max-num-seqs", "64", *FLAGS)
    expected = alone(model, [(ids, {"max_tokens": 16}) for ids in asked], tmp_path, *flags)
    assert [apart(pair, ids, rng.getrandbits(62)) for ids in asked] == expected
    # A room that was used names no blocks: its answer is computed anew, and is never that of another prompt.
    room = rng.getrandbits(62)
    assert apart(pair, asked[3], room) == expected[3]
    assert apart(pair, asked[2], rng.getrandbits(62)) == expected[2]
    assert pair[1].complete(asked[4], source(room, pair[2]), 16) == expected[4]
