"""Pairs of unmodified `vllm serve` processes with a KV connector, and the requests that a proxy sends them."""

import contextlib
import json
import random
import threading
from pathlib import Path

from tandem.cli.up import free_ports
from tests.patience import eventually
from tests.with_vllm.nodes import START_S, get, post, start

FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--dtype", "float32")
NUM_TOKENS = 8


class Server:
    """A `vllm serve` process. `transfer`: its `--kv-transfer-config`."""

    def __init__(self, port: int, model: Path, log: Path, transfer: dict, flags=()) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log
        # Read by NixlConnector only.
        environment = {
            "UCX_TLS": "tcp",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
        }
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

    def ask(self, prompt_ids, params, max_tokens=NUM_TOKENS):
        """Return the HTTP status and body. `prompt_ids`: token ids of one prompt, or a list of those of several."""
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
        return post(f"{self.url}/v1/completions", body)

    def complete(self, prompt_ids, params, max_tokens=NUM_TOKENS):
        """Return the tokens of an answer; the status must be 200."""
        status, answer = self.ask(prompt_ids, params, max_tokens)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]


class Pair:
    """Prefill and decode with TandemConnector. A reference is a room."""

    connector = "TandemConnector"
    roles = ("kv_producer", "kv_consumer")

    def __init__(self, directory: Path, model: Path, wait_s: float, flags=()) -> None:
        self.port, *own = free_ports(3)
        transfer = {"kv_connector": self.connector, "kv_load_failure_policy": "recompute"}
        transfer |= self.settings(wait_s)
        self.prefill, self.decode = (
            Server(port, model, directory / f"{port}.log", transfer | {"kv_role": role}, flags)
            for role, port in zip(self.roles, own, strict=True)
        )

    def settings(self, wait_s: float) -> dict:
        extra = {
            "bootstrap_port": self.port,
            "grant_timeout_s": wait_s,
            "landed_timeout_s": wait_s,
        }
        return {"kv_connector_extra_config": extra}

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
        words = (prompt_ids, {"bootstrap_room": room}, 1)
        half = threading.Thread(target=self.prefill.ask, args=words)
        half.start()
        yield self.source(room)
        half.join()


class NixlPair(Pair):
    """Prefill and decode with NixlConnector. A reference names blocks of prefill."""

    connector = "NixlConnector"
    roles = ("kv_both", "kv_both")

    def settings(self, wait_s: float) -> dict:
        return {"kv_buffer_device": "cpu"}

    @contextlib.contextmanager
    def reference(self, prompt_ids):
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        status, answer = self.prefill.ask(prompt_ids, asked, 1)
        assert status == 200, answer
        yield answer["kv_transfer_params"]
