"""Clusters of real nodes whose engine is vLLM, and vLLM alone beside them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tandem.up import free_ports

HERE = Path(__file__).parent
START_S = 240
NUM_NEW = 10
"""Tokens of an answer, unless a test asks for more."""
NUM_AGAIN = 19
# One core for each node, as many threads in vLLM alone: so that both add in the same order.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Process:
    """A command, whose log is kept."""

    def __init__(self, log: Path, *command: str, environment: Mapping[str, str] = {}) -> None:
        self.log = log
        self._file = log.open("a")
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | environment,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process and all its children."""
        os.killpg(self._popen.pid, number)

    def children(self) -> list[psutil.Process]:
        """Return all processes below it."""
        return psutil.Process(self._popen.pid).children(recursive=True)

    def wait_end(self) -> None:
        """Wait until it ended by itself."""
        self._popen.wait(60)
        self._file.close()

    def end(self) -> int:
        """End it as an operator does; return its exit status."""
        if self.is_running:
            self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._popen.wait()
        self._file.close()


class Node:
    """A prefill or decode node."""

    def __init__(self, role: str, ports, directory: Path, model: Path, flags, vllm_flags) -> None:
        self.role, (self.port, self.bootstrap_port) = role, ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"{role}-{self.port}.log"
        own = ["--bootstrap-port", str(self.bootstrap_port)] if role == "prefill" else []
        self._command = [
            *("tandem", role, "--engine", "vllm", "--model", str(model), "--port", str(self.port)),
            *("--num-threads", "1", *own, *flags, "--", "--enforce-eager", *vllm_flags),
        ]
        self.process: Process | None = None

    def start(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process = Process(self.log, *self._command)

    def wait_up(self) -> None:
        deadline = time.monotonic() + START_S
        while get(f"{self.url}/health")[0] != 200:
            assert self.process is not None
            assert self.process.is_running, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    @property
    def load(self) -> dict:
        return get(f"{self.url}/server_info")[1]["load"]


class Cluster:
    """Nodes and a router. Everything ends with the block."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        prefills=1,
        decodes=1,
        flags=(),
        vllm_flags=(),
        router_flags=(),
    ) -> None:
        roles = ["prefill"] * prefills + ["decode"] * decodes
        # Minutes pass before they are bound: no connection of others may take one meanwhile.
        router_port, *ports = free_ports(1 + 2 * len(roles))
        pairs = zip(ports[::2], ports[1::2], strict=True)
        self.nodes = [
            Node(role, pair, directory, model, flags, vllm_flags)
            for role, pair in zip(roles, pairs, strict=True)
        ]
        self.prefills, self.decodes = self.nodes[:prefills], self.nodes[prefills:]
        self.url = f"http://127.0.0.1:{router_port}"
        words = ["tandem", "lb", "--port", str(router_port)]
        for node in self.prefills:
            words += ["--prefill", node.url, str(node.bootstrap_port)]
        for node in self.decodes:
            words += ["--decode", node.url]
        # Every prompt takes the whole path.
        self._router = [*words, "--local-prefill-threshold", "0", *router_flags]
        self._directory = directory
        self.router: Process | None = None

    def __enter__(self):
        for node in self.nodes:
            node.start()
        self.router = Process(self._directory / "router.log", *self._router)
        try:
            self.wait_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_raised: object) -> None:
        for process in [self.router, *(node.process for node in self.nodes)]:
            if process is not None:
                process.kill()

    def wait_up(self) -> None:
        """Wait until every node serves and the router knows it."""
        for node in self.nodes:
            node.wait_up()
        deadline = time.monotonic() + 60
        wanted = {"prefill": len(self.prefills), "decode": len(self.decodes)}
        while True:
            status, body = get(f"{self.url}/nodes")
            up = (
                [each["role"] for each in body["nodes"] if each["state"] == "up"]
                if status == 200
                else []
            )
            if {role: up.count(role) for role in wanted} == wanted:
                return
            assert time.monotonic() < deadline, body
            time.sleep(0.2)

    def generate(self, prompt_ids, adapter=None, **sampling):
        """Return the token ids of an answer."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_NEW} | sampling
        asked = {"input_ids": prompt_ids, "sampling_params": params, "lora_path": adapter}
        status, body = post(f"{self.url}/generate", asked)
        assert status == 200, body
        return body["output_ids"]

    def stream(self, prompt_ids, **sampling):
        """Yield the token ids of an answer so far, as they come."""
        params = {"temperature": 0.0, "ignore_eos": True} | sampling
        body = {"input_ids": prompt_ids, "sampling_params": params, "stream": True}
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/generate", data, kind)
        with urllib.request.urlopen(asked, timeout=240) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])["output_ids"]

    def generate_all(self, prompts, num_at_once=16, **sampling):
        with ThreadPoolExecutor(num_at_once) as pool:
            return list(pool.map(lambda ids: self.generate(ids, **sampling), prompts))

    def wait_free(self) -> None:
        """Wait until every block of every node is free; 2 s at most."""
        deadline = time.monotonic() + 2
        while any(node.load["pages_free"] < node.load["num_pages"] for node in self.nodes):
            assert time.monotonic() < deadline, [node.load for node in self.nodes]
            time.sleep(0.05)


def get(url: str):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            data = answer.read()
            return answer.status, json.loads(data) if data else None
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, None


def post(url: str, body, timeout_s: float = 240):
    data = json.dumps(body).encode()
    wanted = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(wanted, timeout=timeout_s) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def alone(model: Path, asked: list, directory: Path, *vllm_flags: str) -> list:
    """Return the answers of vLLM in one process to lists of token ids, asked one after the other.

    Args:
        asked: (prompt ids, sampling parameters in vLLM's words) of each; `adapter` is the path of one.
    """
    question, answer = directory / "asked.json", directory / "answered.json"
    question.write_text(json.dumps([(ids, {"max_tokens": NUM_NEW} | how) for ids, how in asked]))
    words = [str(HERE / "alone.py"), str(model), str(question), str(answer), *vllm_flags]
    done = subprocess.run(
        [sys.executable, *words],
        check=False,
        env=os.environ | ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(answer.read_text())


def again(asked: list) -> list:
    """Return the prompts that `check_answers` asks a second time, and at once."""
    return asked[:NUM_AGAIN]


def check_answers(cluster: Cluster, asked: list, expected: list, *, is_exact_at_once: bool) -> None:
    """Compare the answers one after the other, cold, some again, and these at once, with those of vLLM alone.

    Args:
        expected: To `[*asked, *again(asked)]`.
    """
    assert [cluster.generate(ids) for ids in asked] == expected[: len(asked)]
    repeated = again(asked)
    assert [cluster.generate(ids) for ids in repeated] == expected[len(asked) :]
    at_once = cluster.generate_all(repeated)
    if is_exact_at_once:
        assert at_once == expected[: len(repeated)]
    assert all(len(answer) == NUM_NEW for answer in at_once)
    cluster.wait_free()
    assert all(node.load["pushed_bytes"] for node in cluster.prefills)
    assert all(node.load["received_bytes"] for node in cluster.decodes)
