"""Pairs of unmodified `vllm serve` processes with a KV connector, and the requests that a proxy sends them."""

import contextlib
import http.client
import json
import random
import re
import threading
import urllib.request
import uuid
from pathlib import Path

from tandem.cli.up import free_ports
from tests.patience import eventually
from tests.with_vllm.nodes import START_S, get, post, start

FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--dtype", "float32")
NUM_TOKENS = 8


class Server:
    """A `vllm serve` process. `transfer`: its `--kv-transfer-config`."""

    def __init__(
        self, port: int, model: Path, log: Path, transfer: dict, environment: dict, flags=()
    ) -> None:
        self.url, self._port, self._log = f"http://127.0.0.1:{port}", port, log
        self.process = start(
            log,
            *("vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *FLAGS, *flags),
            *("--kv-transfer-config", json.dumps(transfer)),
            env=environment,
        )

    def is_up(self) -> bool:
        assert self.process.is_running(), self._log.read_text()[-3000:]
        return get(f"{self.url}/health")[0] == 200

    def num_received(self) -> int:
        """Return how many prompt tokens came from prefill."""
        return num_received(self.url)

    def ask(self, prompt_ids, params, max_tokens=NUM_TOKENS):
        """Return the HTTP status and body. `prompt_ids`: token ids of one prompt, or a list of those of several."""
        return post(f"{self.url}/v1/completions", body_of(prompt_ids, params, max_tokens))

    @contextlib.contextmanager
    def asking(self, prompt_ids, params):
        """Send a request; go away at the end of the `with` block, whether or not it has been answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        body = json.dumps(body_of(prompt_ids, params, NUM_TOKENS))
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            yield

    def complete(self, prompt_ids, params, max_tokens=NUM_TOKENS):
        """Return the tokens of an answer; the status must be 200."""
        status, answer = self.ask(prompt_ids, params, max_tokens)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]


def num_received(url: str) -> int:
    """Return how many prompt tokens decode's engine got from prefill."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r"^vllm:external_prefix_cache_hits_total{.*} (.*)$", text, re.MULTILINE)
    return sum(int(float(value)) for value in found)


def body_of(prompt_ids, params, max_tokens: int) -> dict:
    return {
        "model": "m",
        "prompt": prompt_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
        "kv_transfer_params": params,
    }


class Pair:
    """Prefill and decode with TandemConnector. A reference is a room.

    Args:
        limit_s: How long prefill keeps a prompt that decode does not ask for.
    """

    connector = "TandemConnector"
    roles = ("kv_producer", "kv_consumer")
    # Whether a reference names blocks.
    names_blocks = False

    def __init__(self, directory: Path, model: Path, limit_s: float, flags=()) -> None:
        self.port, self.query_port, *own = free_ports(4)
        self.limit_s, self._directory = limit_s, directory
        transfer = {"kv_connector": self.connector, "kv_load_failure_policy": "recompute"}
        transfer |= self.settings()
        self.prefill, self.decode = (
            Server(
                *(port, model, directory / f"{port}.log", transfer | {"kv_role": role}),
                *(self.environment(), flags),
            )
            for role, port in zip(self.roles, own, strict=True)
        )

    def settings(self) -> dict:
        extra = {
            "bootstrap_port": self.port,
            "query_port": self.query_port,
            "grant_timeout_s": self.limit_s,
            "landed_timeout_s": self.limit_s,
        }
        return {"kv_connector_extra_config": extra}

    def environment(self) -> dict:
        return {}

    def __enter__(self):
        try:
            are_up = eventually(
                lambda: all([self.prefill.is_up(), self.decode.is_up()]), within_s=START_S
            )
            assert are_up, f"{self.connector} did not start in time"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_raised: object) -> None:
        for server in (self.prefill, self.decode):
            server.process.kill()

    def source(self, room: int) -> dict:
        """Return the `kv_transfer_params` that refer to a room on decode."""
        return {
            "bootstrap_room": room,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
        }

    @contextlib.contextmanager
    def reference(self, prompt_ids):
        """Send prefill's half of a prompt; yield the `kv_transfer_params` for decode."""
        room = random.getrandbits(62)
        with self._half(prompt_ids, {"bootstrap_room": room}):
            yield self.source(room)

    @contextlib.contextmanager
    def _half(self, prompt_ids, params):
        half = threading.Thread(target=self.prefill.ask, args=(prompt_ids, params, 1))
        half.start()
        yield half
        half.join()

    @contextlib.contextmanager
    def transfer(self, prompt_ids, *, is_serial=False):
        """Like `reference`, as proxies for MooncakeConnector send the halves: at once, or one after the other."""
        name = f"xfer-{uuid.uuid4()}"
        half = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        with self._half(prompt_ids, half) as thread:
            if is_serial:
                thread.join()
            address = f"http://127.0.0.1:{self.query_port}"
            engine = get(f"{address}/query")[1]["0"]["engine_id"]
            yield {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": name,
                "remote_bootstrap_addr": address,
                "remote_engine_id": engine,
            }

    def unknown(self, params: dict) -> dict:
        """Return a reference to a request that prefill never had, else like this one."""
        return params | {"bootstrap_room": random.getrandbits(62)}

    def out_of_range(self, params: dict) -> dict:
        """Return a reference to blocks that prefill does not have. Only if `names_blocks`."""
        raise NotImplementedError


class NixlPair(Pair):
    """Prefill and decode with NixlConnector. A reference names blocks of prefill."""

    connector = "NixlConnector"
    roles = ("kv_both", "kv_both")
    names_blocks = True

    def settings(self) -> dict:
        extra = {"kv_lease_duration": int(self.limit_s)}
        return {"kv_buffer_device": "cpu", "kv_connector_extra_config": extra}

    def environment(self) -> dict:
        return {
            "UCX_TLS": "tcp",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
        }

    @contextlib.contextmanager
    def reference(self, prompt_ids):
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        status, answer = self.prefill.ask(prompt_ids, asked, 1)
        assert status == 200, answer
        yield answer["kv_transfer_params"]

    def unknown(self, params: dict) -> dict:
        return params | {"remote_request_id": f"cmpl-{uuid.uuid4()}"}

    def out_of_range(self, params: dict) -> dict:
        groups = [[1_000_000 + block for block in group] for group in params["remote_block_ids"]]
        return params | {"remote_block_ids": groups}


class MooncakePair(Pair):
    """Prefill and decode with MooncakeConnector over TCP. A reference is a transfer id.

    The connector asks torch for the number of its accelerator, which fails on a CPU; here torch answers 0.
    """

    connector = "MooncakeConnector"

    def settings(self) -> dict:
        return {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}

    def environment(self) -> dict:
        patch = "import torch\n\ntorch.accelerator.current_device_index = lambda: 0\n"
        (self._directory / "sitecustomize.py").write_text(patch)
        limit_s = str(int(self.limit_s))
        return {
            "PYTHONPATH": str(self._directory),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.query_port),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": limit_s,
            "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": limit_s,
        }

    def reference(self, prompt_ids):
        return self.transfer(prompt_ids)

    def unknown(self, params: dict) -> dict:
        return params | {"transfer_id": f"xfer-{uuid.uuid4()}"}
