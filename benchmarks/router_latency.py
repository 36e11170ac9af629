"""The cost of a router for a request that does not stream: added latency and CPU time.

The benchmark compares `tandem lb` with sglang-router, smg, vllm-router and nginx. Each runs on a dedicated core, in front of
backends that answer at once; clients and backends run on the other cores. Each router gets three loads:

- *light*: four connections with pauses. The added latency is the router's quantile minus the quantile of the same
  request sent directly to an HTTP backend.
- *full*: sixteen connections without pauses. This measures CPU time per request over all the router's processes.
- *with streams*: the light load, while each of 1,000 streams gets a token every 100 ms, all at once as from one batch.
  The baseline is the same load, with the same streams, sent directly.

`tandem lb` tokenizes prompts and the other routers do not. Its goal is therefore the CPU time of the cheapest Rust
router plus the measured time to tokenize the prompt. A second row sends it token ids. `--peers-python DIR/bin/python`
names an environment with `pip install sglang-router smg vllm-router`; the first two are in the environment of `make
test`. Routers that are not installed are skipped, with a message.
"""

import argparse
import contextlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.edge import edge
from benchmarks.http_load import Measured, Plan, drive
from benchmarks.rig import (
    OTHER_CORES,
    OWN_CORE,
    Target,
    family,
    free_port,
    parse,
    parser_of,
    result,
    running,
)
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.node.command import default_cache_dir
from tandem.node.models.checkpoint import resolve_model

GOAL_ADDED_P99_MS = 1.0
BEAT_S, NEW_TOKENS = 0.1, 4
# Each stream outlasts the load: the start of all streams at once is a load of its own.
STREAM_TOKENS = 4000
PAUSE_S = 0.01
OURS, RUST = "tandem lb", ("sglang-router", "smg", "vllm-router")
IDS = "tandem lb, ids"
# Too few for a p99 otherwise.
MIN_ANSWERS = 100
MAX_LONGER = 16
# The second means the same route, with token ids in the body.
GENERATE, GENERATE_IDS, NUM_IDS = "/generate", "/generate#ids", 55
# A few hundred characters of prose, like a short question in a chat.
PROMPT = (
    "A lighthouse keeper on a small island writes down the weather every morning. One day the "
    "barometer falls faster than it ever has, and a ship that nobody expects comes into sight. What "
    "should the keeper do first, what next, and what would you advise the captain to do meanwhile?"
)


class Missing(Exception):
    """A router is not installed. The message names the package to install."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of latencies, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, measured: Measured) -> "Quantiles":
        """Return the quantiles of at least two responses."""
        if len(measured.latencies_ms) < 2:
            raise SystemExit(f"too few responses: {measured.errors}")
        cuts = statistics.quantiles(measured.latencies_ms, n=100, method="inclusive")
        return cls(cuts[49], cuts[98])

    def minus(self, other: "Quantiles") -> "Quantiles":
        """Return the difference to `other`."""
        return Quantiles(self.p50 - other.p50, self.p99 - other.p99)


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one router."""

    light: Quantiles
    with_streams: Quantiles
    cpu_us: float


def body(path: str, new_tokens: int, *, is_stream: bool = False) -> str:
    """Return the request body for the API of a path."""
    if path in (GENERATE, GENERATE_IDS):
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        prompt: dict[str, object] = {"text": PROMPT}
        if path == GENERATE_IDS:
            prompt = {"input_ids": list(range(20, 20 + NUM_IDS))}
        fields = prompt | {"sampling_params": sampling, "stream": is_stream}
        return json.dumps(fields | {"model": "stub"})
    fields = {"model": "stub", "prompt": PROMPT, "max_tokens": new_tokens, "temperature": 0}
    return json.dumps(fields | {"stream": is_stream})


def load(
    args: argparse.Namespace,
    target: Target,
    path: str,
    connections: int,
    *,
    pause_s: float,
    num_streams: int = 0,
) -> Measured:
    """Run a load against a server, for longer if it gives too few responses; print its failures."""
    plan = Plan(
        port=target.port,
        path=path.partition("#")[0],
        body=body(path, NEW_TOKENS),
        connections=connections,
        duration_s=args.seconds,
        pause_s=pause_s,
        # All streams start together; the warm-up excludes their start from the measurement.
        warm_up_s=5.0 if num_streams else 1.0,
        num_streams=num_streams,
        stream_body=body(path, STREAM_TOKENS, is_stream=True),
        pids=family(target.pid),
    )
    measured, longest_s = drive(plan), MAX_LONGER * args.seconds
    while len(measured.latencies_ms) < MIN_ANSWERS and plan.duration_s < longest_s:
        plan = msgspec.structs.replace(plan, duration_s=2 * plan.duration_s)
        measured = drive(plan)
    if measured.num_failed:
        print(f"{target.name}: {measured.num_failed} failed, such as {measured.errors[0]!r}")
    return measured


def measure(
    args: argparse.Namespace, name: str, target: Target, straight: Target, path: str
) -> Row:
    """Measure a router under all loads; print and return the result."""
    direct = Quantiles.of(load(args, straight, path, 4, pause_s=PAUSE_S))
    light = Quantiles.of(load(args, target, path, 4, pause_s=PAUSE_S)).minus(direct)
    full = load(args, target, path, 16, pause_s=0.0)
    cpu_us = full.cpu_s / max(1, len(full.latencies_ms)) * 1e6
    direct = Quantiles.of(load(args, straight, path, 4, pause_s=PAUSE_S, num_streams=args.streams))
    with_streams = Quantiles.of(
        load(args, target, path, 4, pause_s=PAUSE_S, num_streams=args.streams)
    ).minus(direct)
    print(
        f"{name:<15}{light.p50:>8.2f}{light.p99:>8.2f}{with_streams.p50:>9.2f}{with_streams.p99:>8.2f}"
        f"{cpu_us:>9.0f}{1e6 / cpu_us:>12.0f}",
        flush=True,
    )
    return Row(light, with_streams, cpu_us)


@contextlib.contextmanager
def backend() -> Iterator[Target]:
    """Run an HTTP stub."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.stubs", "http", "--port", str(port)]
    with running("stub", command, port, OTHER_CORES) as target:
        yield target


@contextlib.contextmanager
def rust(name: str, program: Sequence[str], flags: Sequence[str]) -> Iterator[Target]:
    """Run a Rust router with separate prefill and decode backends."""
    port, metrics = free_port(), free_port()
    with backend() as prefill, backend() as decode:
        bootstrap = [] if name == "vllm-router" else ["1"]
        command = [
            *(*program, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
            *(*flags, "--prefill", prefill.url, *bootstrap, "--decode", decode.url),
            *("--log-level", "error", "--prometheus-port", str(metrics)),
            *("--prometheus-host", "127.0.0.1"),
        ]
        with running(name, command, port, OWN_CORE) as target:
            yield target


@contextlib.contextmanager
def nginx() -> Iterator[Target]:
    """Run nginx in front of one backend, as a proxy that does not inspect requests."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise Missing("nginx: apt-get install nginx-light")
    port = free_port()
    with backend() as stub, tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes 1; pid {directory}/pid; error_log stderr error;\n"
            "events { worker_connections 8192; }\n"
            "http { access_log off; keepalive_requests 1000000000;\n"
            f"  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;\n"
            f"  upstream stub {{ server 127.0.0.1:{stub.port}; keepalive 2048; "
            "keepalive_requests 1000000000; }\n"
            f"  server {{ listen 127.0.0.1:{port} backlog=2048;\n"
            "    location / { proxy_pass http://stub; proxy_http_version 1.1; proxy_buffering off;\n"
            '      proxy_set_header Connection ""; } } }\n'
        )
        with running("nginx", [program, "-c", str(config)], port, OWN_CORE) as target:
            yield target


def peer(python: Path, name: str) -> Path:
    """Return the program folder of a Python environment in which a package is installed.

    Raises:
        Missing: The package is not installed there.
    """
    package = name.replace("-", "_")
    code = f"import importlib.util as u; raise SystemExit(not u.find_spec({package!r}))"
    if subprocess.run([str(python), "-c", code], check=False).returncode:
        raise Missing(f"{name}: set --peers-python to the Python of an environment with {name}")
    return python.parent


def smg(python: Path) -> contextlib.AbstractContextManager[Target]:
    """Run SMG, the successor of SGLang's router."""
    program = [str(peer(python, RUST[1]) / "python"), "-m", "smg", "launch"]
    return rust(RUST[1], program, ["--pd-disaggregation"])


def sglang_router(python: Path) -> contextlib.AbstractContextManager[Target]:
    """Run SGLang's router."""
    program = [str(peer(python, RUST[0]) / "python"), "-m", "sglang_router.launch_router"]
    return rust(RUST[0], program, ["--pd-disaggregation"])


def vllm_router(python: Path) -> contextlib.AbstractContextManager[Target]:
    """Run vLLM's router."""
    program = [str(peer(python, RUST[2]) / "vllm-router")]
    return rust(RUST[2], program, ["--vllm-pd-disaggregation"])


def tokenize_us(times: int = 500) -> float:
    """Return the CPU microseconds of tokenizing the prompt, the minimum of five rounds."""
    tokenizer = Tokenizer.load(resolve_model(None, default_cache_dir() / "models"))
    rounds = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(times):
            tokenizer.encode(PROMPT)
        rounds.append((time.process_time() - begin) / times * 1e6)
    return min(rounds)


def verdicts(rows: dict[str, Row], tokenizing_us: float) -> list[str]:
    """Return the result lines for the routers that were measured."""
    ours, theirs = rows[OURS], [rows[name] for name in RUST if name in rows]
    added = ours.with_streams.p99
    results = []
    if theirs:
        allowed = min(row.cpu_us for row in theirs) + tokenizing_us
        ratio = ours.cpu_us / allowed
        results.append(result("router_cpu_vs_rust_and_tokenizing", ratio, 1, is_lower_better=True))
        ratio = added / min(row.with_streams.p99 for row in theirs)
        results.append(result("router_added_p99_vs_rust", ratio, 1, is_lower_better=True))
    results.append(result("router_added_p99", added, GOAL_ADDED_P99_MS, "ms", is_lower_better=True))
    return results


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(
        "router_latency", "Measure the latency and CPU time that routers add to a request."
    )
    add = parser.add_argument
    add(
        "--peers-python",
        type=Path,
        default=Path(sys.executable),
        help="Python of an environment with sglang-router, smg and vllm-router (default: this one)",
    )
    add("--seconds", type=float, default=5, help="duration of each load")
    add("--streams", type=int, default=1000, help="number of streams in the third load")
    args = parse(parser, {"seconds": 1.0, "streams": 20})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    starts: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Target]]]] = {
        OURS: (GENERATE, lambda: edge(BEAT_S)),
        IDS: (GENERATE_IDS, lambda: edge(BEAT_S)),
        RUST[0]: (GENERATE, lambda: sglang_router(args.peers_python)),
        RUST[1]: (GENERATE, lambda: smg(args.peers_python)),
        RUST[2]: ("/v1/completions", lambda: vllm_router(args.peers_python)),
        "nginx": (GENERATE, nginx),
    }
    tokenizing_us = tokenize_us()
    print(f"tokenizing the prompt takes {tokenizing_us:.0f} us of CPU time")
    print(
        f"{'added, ms':15}{'p50':>8}{'p99':>8}{'streams':>9}{'p99':>8}{'CPU us':>9}{'req/s/core':>12}"
    )
    rows = {}
    with backend() as straight:
        for name, (path, start) in starts.items():
            try:
                with start() as target:
                    rows[name] = measure(args, name, target, straight, path)
            except Missing as missing:
                print(f"skipped {missing}")
    print("\n".join(verdicts(rows, tokenizing_us)))


if __name__ == "__main__":
    main()
