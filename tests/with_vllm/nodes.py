"""Clusters of real nodes that run vLLM, and plain vLLM to compare with."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.cli.up import free_ports
from tests.patience import eventually, until
from tests.processes import ROOT, Process

HERE = Path(__file__).parent
START_S = 480
# On two busy cores a live process can be silent for seconds.
INTERVAL_MS = 2000
NUM_NEW = 10
"""Default number of generated tokens."""
NUM_AGAIN = 19
# One thread per node and in plain vLLM, so that both sum in the same order.
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}/src:{ROOT}",  # vLLM's workers import an extension from the tests
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def start(log: Path, module: str, *argv: str, env: Mapping[str, str] = {}, python=sys.executable):
    """Start a module whose log is appended to a file; return the process."""
    return Process(
        *argv, module=module, log=log, env={**ENVIRONMENT, **env}, is_fresh=True, python=python
    )


class Node:
    """A prefill or decode node."""

    def __init__(self, role: str, ports, directory: Path, model: Path, flags, vllm_flags, python):
        self.python = python
        self.role, (self.port, self.bootstrap_port) = role, ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"{role}-{self.port}.log"
        own = ["--bootstrap-port", str(self.bootstrap_port)] if role == "prefill" else []
        self._command = [
            *("tandem", role, "--engine", "vllm", "--model", str(model), "--port", str(self.port)),
            *("--num-threads", "1", *own, *flags, "--", "--enforce-eager", *vllm_flags),
        ]
        self.process: Process | None = None
        self.joined: Process | None = None
        self.joined_url = f"http://127.0.0.2:{self.port}"
        self._has_second_host = False

    def add_host(self) -> None:
        """Divide the ranks over two hosts: 127.0.0.1, and 127.0.0.2 with the process `joined`."""
        port = self.bootstrap_port + 8  # free, because nodes here have fewer workers
        self.add_vllm_flags("--nnodes", "2", "--master-port", str(port))
        self._has_second_host = True

    def add_flags(self, *flags: str) -> None:
        end = self._command.index("--")
        self._command[end:end] = flags

    def add_vllm_flags(self, *flags: str) -> None:
        self._command += flags

    def start(self) -> None:
        self.kill()
        self.process = start(self.log, *self._command, python=self.python)
        if self._has_second_host:
            log = self.log.with_suffix(".joined.log")
            command, at = list(self._command), self._command.index("--")
            command[at:at] = ["--host", "127.0.0.2"]
            self.joined = start(log, *command, "--node-rank", "1", python=self.python)

    def kill(self) -> None:
        for process in (self.process, self.joined):
            if process is not None:
                process.kill()

    def wait_up(self) -> None:
        def is_up() -> bool:
            assert self.process is not None
            assert self.process.is_running(), self.log.read_text()[-3000:]
            return get(f"{self.url}/health")[0] == 200

        assert eventually(is_up, within_s=START_S), self.log.read_text()[-3000:]

    @property
    def load(self) -> dict:
        return get(f"{self.url}/server_info")[1]["load"]

    def num_steps(self) -> int:
        """Return how many steps the node has run, by its metrics."""
        num_before = self._metric("refused_requests_total")
        # Metrics are late. Those that count this refusal include all steps before it.
        refused = {"input_ids": [5], "sampling_params": {"temperature": 3.0}}
        refused |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
        assert post(f"{self.url}/generate", refused)[0] == 400
        until(lambda: self._metric("refused_requests_total") > num_before)
        return self._metric("step_device_seconds_count")

    def _metric(self, name: str) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            values = re.findall(
                rf"^tandem_{name}{{.*}} (.*)$", answer.read().decode(), re.MULTILINE
            )
        return sum(int(float(value)) for value in values)


class Cluster:
    """Nodes and a router. All processes are killed at the end of the `with` block.

    Args:
        python: Interpreter of the nodes, which may have another version of vLLM.
        sizes: Tensor-parallel sizes of prefill and decode nodes.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        prefills=1,
        decodes=1,
        flags=(),
        vllm_flags=(),
        router_flags=(),
        interval_ms=INTERVAL_MS,
        python=sys.executable,
        sizes=(1, 1),
    ) -> None:
        heartbeat = ("--heartbeat-interval-ms", str(interval_ms))
        roles = ["prefill"] * prefills + ["decode"] * decodes
        # Nodes bind these ports minutes later; until then no outgoing connection may take one.
        router_port, *ports = free_ports(1 + 2 * len(roles))
        pairs = zip(ports[::2], ports[1::2], strict=True)
        of_role = {
            role: ("--tp", str(size), *heartbeat, *flags)
            for role, size in zip(("prefill", "decode"), sizes, strict=True)
        }
        self.nodes = [
            Node(role, pair, directory, model, of_role[role], vllm_flags, python)
            for role, pair in zip(roles, pairs, strict=True)
        ]
        self.prefills, self.decodes = self.nodes[:prefills], self.nodes[prefills:]
        self.url = f"http://127.0.0.1:{router_port}"
        words = ["tandem", "lb", "--port", str(router_port), *heartbeat]
        for node in self.prefills:
            words += ["--prefill", node.url, str(node.bootstrap_port)]
        for node in self.decodes:
            words += ["--decode", node.url]
        # Hand off every prompt, however short.
        self._router = [*words, "--local-prefill-threshold", "0", *router_flags]
        self._directory = directory
        self.router: Process | None = None

    def __enter__(self):
        for node in self.nodes:
            node.start()
        self.router = start(self._directory / "router.log", *self._router)
        try:
            self.wait_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_raised: object) -> None:
        if self.router is not None:
            self.router.kill()
        for node in self.nodes:
            node.kill()

    def restore(self) -> None:
        """Start the nodes that have ended, and wait until all are up."""
        for node in self.nodes:
            if node.process is None or not node.process.is_running():
                node.start()
        self.wait_up()

    def wait_up(self) -> None:
        """Wait until every node serves and is up at the router."""
        for node in self.nodes:
            node.wait_up()
        expected = {"prefill": len(self.prefills), "decode": len(self.decodes)}

        def are_up() -> bool:
            status, body = get(f"{self.url}/nodes")
            nodes = body["nodes"] if status == 200 else []
            up = [each["role"] for each in nodes if each["state"] == "up"]
            return {role: up.count(role) for role in expected} == expected

        assert eventually(are_up, within_s=START_S), get(f"{self.url}/nodes")

    def generate(self, prompt_ids, adapter=None, **sampling):
        """Return the generated token ids."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NUM_NEW} | sampling
        asked = {"input_ids": prompt_ids, "sampling_params": params, "lora_path": adapter}
        status, body = post(f"{self.url}/generate", asked)
        assert status == 200, body
        return body["output_ids"]

    def stream(self, prompt_ids, **sampling):
        """Yield the token ids generated so far, for each event."""
        for event in self.events(prompt_ids, **sampling):
            yield event["output_ids"]

    def events(self, prompt_ids, adapter=None, return_logprob=False, **sampling):
        """Yield the events of an answer."""
        params = {"temperature": 0.0, "ignore_eos": True} | sampling
        body = {"input_ids": prompt_ids, "sampling_params": params, "stream": True}
        body |= {"lora_path": adapter, "return_logprob": return_logprob}
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/generate", data, kind)
        with urllib.request.urlopen(asked, timeout=240) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def generate_all(self, prompts, num_at_once=16, **sampling):
        with ThreadPoolExecutor(num_at_once) as pool:
            return list(pool.map(lambda ids: self.generate(ids, **sampling), prompts))

    def num_replays(self) -> int:
        """Return how many attempts the router has repeated, by its log."""
        return (self._directory / "router.log").read_text().count('"request.replay"')

    def flush(self) -> None:
        """Empty the prefix caches of all nodes."""
        self.wait_free()
        for node in self.nodes:
            status, body = post(f"{node.url}/flush_cache", {})
            assert status == 200, body

    def wait_free(self) -> None:
        """Wait until every block of every node is free."""

        def is_free() -> bool:
            return all(node.load["pages_free"] >= node.load["num_pages"] for node in self.nodes)

        assert eventually(is_free, within_s=30), [node.load for node in self.nodes]


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
    status, text = post_text(url, body, timeout_s)
    return status, json.loads(text)


def post_text(url: str, body, timeout_s: float = 240):
    data = json.dumps(body).encode()
    wanted = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(wanted, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def alone(model: Path, asked: list, directory: Path, *vllm_flags: str) -> list:
    """Return the answers of vLLM in one process, which runs the requests one after the other.

    An answer is its token ids; with `logprobs`, these and the log-probability of each.

    Args:
        asked: Prompt ids and sampling parameters of vLLM for each request; `adapter` is an adapter's path.
    """
    return alone_with_steps(model, asked, directory, vllm_flags)[0]


def alone_with_steps(model: Path, asked: list, directory: Path, flags) -> tuple[list, int]:
    """Return the answers of `alone`, and the number of steps that generated tokens.

    A list of prompts, in place of one, runs at once; its answer is the list of answers.
    """
    question, answer = directory / "asked.json", directory / "answered.json"
    question.write_text(json.dumps([(ids, {"max_tokens": NUM_NEW} | how) for ids, how in asked]))
    words = [str(HERE / "alone.py"), str(model), str(question), str(answer), *flags]
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
    """Return the prompts that `check_answers` repeats, also concurrently."""
    return asked[:NUM_AGAIN]


def check_answers(cluster: Cluster, asked: list, expected: list, *, is_exact_at_once: bool) -> None:
    """Compare answers with those of plain vLLM: one by one, some repeated with a warm cache, and those concurrently.

    Args:
        expected: Answers to `[*asked, *again(asked)]`.
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
