"""Routers under measurement, each in front of backends that answer at once, on a core of its own.

| router | in front of |
|---|---|
| `tandem lb` | `benchmarks.stub_nodes`, or simulated nodes that take no time |
| sglang-router, vllm-router | two of `benchmarks.stub_http`, as prefill and decode |
| nginx | one of `benchmarks.stub_http` |
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.processes import Target, free_port, get, stop, wait_serving
from tandem.wire.node_info import NodeInfo

Bodies = dict[str, object]


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where: a router alone, everything else on the others. Empty: wherever."""

    router: str = ""
    others: str = ""

    @classmethod
    def of_this_machine(cls) -> "Cores":
        """Return the first core for routers, where there are two at least."""
        num_cores = os.cpu_count() or 1
        return cls("0", f"1-{num_cores - 1}") if num_cores > 1 else cls()


def pinned(core: str) -> list[str]:
    """Return what to put before a command."""
    return ["taskset", "-c", core] if core else []


@dataclass(frozen=True, slots=True)
class Router:
    """A router that serves.

    Attributes:
        path: Of its API's POSTs.
        direct_port: Of a backend that takes the same request without it; 0: none speaks HTTP.
        nodes: What our own nodes say of themselves: prefill's, decode's.
        is_paced: Whether the backends give streams a token each beat, instead of as fast as they go.
    """

    name: str
    port: int
    pid: int
    path: str = "/generate"
    direct_port: int = 0
    nodes: tuple[NodeInfo, ...] = ()
    is_paced: bool = True

    def body(self, text: str, new_tokens: int, *, is_stream: bool = False) -> str:
        """Return a request in its API's terms."""
        if self.path == "/generate":
            sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
            return json.dumps({"text": text, "sampling_params": sampling, "stream": is_stream})
        asked: Bodies = {"model": "stub", "prompt": text, "max_tokens": new_tokens}
        return json.dumps(asked | {"temperature": 0, "stream": is_stream})


class Missing(Exception):
    """A peer is not installed; the sentence says how to have it."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all it started that still run."""
    text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return own + sum(map(cpu_s, children))


@contextlib.contextmanager
def started(name: str, command: Sequence[str], port: int, core: str) -> Iterator[int]:
    """Run a server on `core`; yield its process id when it answers /health; stop it."""
    with tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log") as log:
        process = subprocess.Popen([*pinned(core), *command], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_serving(Target(name, f"http://127.0.0.1:{port}"), process, log.name)
            yield process.pid
        finally:
            stop(process)


@contextlib.contextmanager
def _http_stubs(cores: Cores, num: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(num)]
        for port in ports:
            command = [sys.executable, "-m", "benchmarks.stub_http", "--port", str(port)]
            stack.enter_context(started("stub", command, port, cores.others))
        yield ports


@contextlib.contextmanager
def _lb(name: str, cores: Cores, ports: Sequence[int], bootstrap_port: int) -> Iterator[Router]:
    port = free_port()
    prefill, decode = (f"http://127.0.0.1:{each}" for each in ports)
    nodes = ["--prefill", prefill, str(bootstrap_port), "--decode", decode]
    command = [sys.executable, "-P", "-m", "tandem", "lb", *nodes, "--port", str(port)]
    with started(name, command, port, cores.router) as pid:
        infos = [
            msgspec.json.decode(get(f"{url}/server_info"), type=NodeInfo)
            for url in (prefill, decode)
        ]
        yield Router(name, port, pid, nodes=tuple(infos))


@contextlib.contextmanager
def tandem_lb(cores: Cores) -> Iterator[Router]:
    """Ours, in front of nodes that answer at once."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "benchmarks.stub_nodes", "--ports", *map(str, ports)]
    with (
        started("stub-nodes", command, ports[0], cores.others),
        _lb("tandem lb", cores, ports, 1) as router,
    ):
        yield router


@contextlib.contextmanager
def tandem_lb_simulated(cores: Cores) -> Iterator[Router]:
    """Ours, in front of real nodes whose forwards take no time."""
    flags = ["--engine", "simulated", "--sim-kv", "none", "--log-level", "warning"]
    bootstrap = free_port()
    with contextlib.ExitStack() as stack:
        ports = []
        for role, more in (("prefill", ["--bootstrap-port", str(bootstrap)]), ("decode", [])):
            ports.append(port := free_port())
            command = [
                sys.executable,
                "-P",
                "-m",
                "tandem",
                role,
                *flags,
                *more,
                "--port",
                str(port),
            ]
            stack.enter_context(started(role, command, port, cores.others))
        router = stack.enter_context(_lb("tandem lb, nodes", cores, ports, bootstrap))
        yield replace(router, is_paced=False)


@contextlib.contextmanager
def sglang_router(cores: Cores, python: Path | None) -> Iterator[Router]:
    """SGLang's in Rust, prefill and decode apart."""
    program = program_of(python, "python", "sglang_router")
    port, metrics = free_port(), free_port()
    with _http_stubs(cores, 2) as (prefill, decode):
        command = [
            *(program, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
            *("--port", str(port), "--pd-disaggregation", "--policy", "round_robin"),
            *("--prefill", f"http://127.0.0.1:{prefill}", "1"),
            *("--decode", f"http://127.0.0.1:{decode}", "--log-level", "error"),
            *("--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1"),
        ]
        with started("sglang-router", command, port, cores.router) as pid:
            yield Router("sglang-router", port, pid, direct_port=decode)


@contextlib.contextmanager
def vllm_router(cores: Cores, python: Path | None) -> Iterator[Router]:
    """VLLM's in Rust, prefill and decode apart, one leg after the other."""
    program = program_of(python, "vllm-router", "vllm_router")
    port, metrics = free_port(), free_port()
    with _http_stubs(cores, 2) as (prefill, decode):
        command = [
            *(program, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"),
            *("--prefill", f"http://127.0.0.1:{prefill}", "--policy", "round_robin"),
            *("--decode", f"http://127.0.0.1:{decode}", "--log-level", "error"),
            *("--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1"),
        ]
        with started("vllm-router", command, port, cores.router) as pid:
            yield Router("vllm-router", port, pid, path="/v1/completions", direct_port=decode)


@contextlib.contextmanager
def nginx(cores: Cores) -> Iterator[Router]:
    """Nginx in front of one backend: a proxy that looks into nothing."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise Missing("nginx is not here: apt-get install nginx-light")
    port = free_port()
    with _http_stubs(cores, 1) as (backend,), tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes 1; pid {directory}/pid; error_log stderr error;\n"
            "events { worker_connections 8192; }\n"
            "http { access_log off; keepalive_requests 1000000000;\n"
            f"  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;\n"
            f"  upstream stub {{ server 127.0.0.1:{backend}; keepalive 2048; "
            "keepalive_requests 1000000000; }\n"
            f"  server {{ listen 127.0.0.1:{port} backlog=2048;\n"
            "    location / { proxy_pass http://stub; proxy_http_version 1.1; proxy_buffering off;\n"
            '      proxy_set_header Connection ""; } } }\n'
        )
        with started("nginx", [program, "-c", str(config)], port, cores.router) as pid:
            yield Router("nginx", port, pid, direct_port=backend)


def program_of(python: Path | None, name: str, package: str) -> str:
    if python is None:
        raise Missing(f"{package}: give --peers-python of an environment that has it")
    found = python.parent / (python.name if name == "python" else name)
    asked = ["-c", f"import importlib.util as u; raise SystemExit(not u.find_spec({package!r}))"]
    if not found.exists() or subprocess.run([str(python), *asked], check=False).returncode:
        raise Missing(f"{package} is not in {python.parent.parent}: pip install it there")
    return str(found)
