"""What a router costs a request that does not stream: added latency, and CPU time.

Ours against sglang-router, vllm-router and nginx, each in front of backends that answer at once, on a core of
its own; clients and backends on the others. Three loads on each:

- *light*: four connections with pauses. What it adds is its quantile minus that of the same request
  sent straight to a backend (to our nodes' wire for ours), alone.
- *full*: sixteen connections without pauses, for CPU time a request, over all of the router's processes.
  A core's requests/s are one over that.
- *beside streams*: light, while 1,000 streams get a token every 100 ms each, all at once as from one batch. What it
  adds is counted from the same beside the same streams, straight.

`tandem lb` tokenizes what the others pass on, so its goal is the cheaper Rust router's CPU time plus that of
tokenizing the prompt, measured here. Run from the root:
`python -m benchmarks.router_latency --peers-python DIR/bin/python`, an environment with
`pip install sglang-router vllm-router`. Who is not installed is left out, with a line.
"""

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.http_load import Measured, Plan
from benchmarks.routers import (
    Cores,
    Missing,
    Router,
    cpu_s,
    nginx,
    pinned,
    sglang_router,
    tandem_lb,
    tandem_lb_simulated,
    vllm_router,
)
from benchmarks.verdict import result
from benchmarks.wire_load import WirePlan
from tandem.frontend.tokenizer import Tokenizer
from tandem.node.checkpoint import resolve_model
from tandem.node.command import default_cache_dir

GOAL_ADDED_P99_MS = 1.0
RUST = ("sglang-router", "vllm-router")
NEW_TOKENS, STREAM_TOKENS = 4, 50
PAUSE_S = 0.01
LEAST_ANSWERS = 500
# Some hundred characters of prose: a short question, as chats have them.
PROMPT = (
    "A lighthouse keeper on a small island writes down the weather every morning. One day the "
    "barometer falls faster than it ever has, and a ship that nobody expects comes into sight. What "
    "should the keeper do first, what next, and what would you advise the captain to do meanwhile?"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_latency",
        description="Measure what routers add to a request that does not stream.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--peers-python", type=Path, help="of an environment with sglang-router and vllm-router")
    add("--seconds", type=float, default=5, help="of each load")
    add("--streams", type=int, default=1000, help="beside the requests of the third load")
    add("--only", nargs="+", metavar="NAME", help="routers to measure, such as: lb sglang nginx")
    return parser


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of latencies, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, latencies_ms: Sequence[float]) -> "Quantiles":
        """Return those of at least two."""
        cuts = statistics.quantiles(latencies_ms, n=100, method="inclusive")
        return cls(cuts[49], cuts[98])

    def minus(self, other: "Quantiles") -> "Quantiles":
        """Return what is more than in `other`."""
        return Quantiles(self.p50 - other.p50, self.p99 - other.p99)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one router; `added_beside` is None where no streams ran."""

    name: str
    direct: Quantiles
    light: Quantiles
    added_beside: Quantiles | None
    rate: float
    cpu_us: float
    num_failed: int

    def line(self) -> str:
        """Return a line of the table."""
        light, beside = self.light.minus(self.direct), f"{'-':>9}{'-':>8}"
        if (added := self.added_beside) is not None:
            beside = f"{added.p50:>9.2f}{added.p99:>8.2f}"
        return (
            f"{self.name:<17}{self.direct.p50:>7.2f}{self.direct.p99:>7.2f}"
            f"{light.p50:>9.2f}{light.p99:>7.2f}{beside}"
            f"{self.rate:>9.0f}{self.cpu_us:>9.0f}{1e6 / self.cpu_us:>11.0f}{self.num_failed:>7}"
        )


class Bench:
    """Loads routers, one after the other."""

    def __init__(
        self, seconds: float, num_streams: int, cores: Cores, prompt_ids: list[int]
    ) -> None:
        self._seconds, self._num_streams = seconds, num_streams
        self._cores, self._prompt_ids = cores, prompt_ids

    def measure(self, router: Router) -> Row:
        """Return what a router costs, under all loads."""
        direct = self._direct(router)
        light, _ = self._load(router, 4, PAUSE_S)
        full, cpu = self._load(router, 16, 0.0)
        loads = [light, full]
        if self._num_streams and router.is_paced:
            loads.append(self._load(router, 4, PAUSE_S, self._num_streams)[0])
            if not loads[-1].stream_bytes:
                raise SystemExit(f"{router.name}: no stream flowed beside the requests")
        failed = [each for each in loads if each.num_failed]
        for each in failed:
            print(f"{router.name}: {each.num_failed} failed, such as {each.errors[0]!r}")
        return Row(
            name=router.name,
            direct=direct,
            light=Quantiles.of(light.latencies_ms),
            added_beside=(
                Quantiles.of(loads[2].latencies_ms).minus(self._direct(router, self._num_streams))
                if len(loads) > 2
                else None
            ),
            rate=len(full.latencies_ms) / full.elapsed_s,
            cpu_us=cpu / len(full.latencies_ms) * 1e6,
            num_failed=sum(each.num_failed for each in failed),
        )

    def _direct(self, router: Router, num_streams: int = 0) -> Quantiles:
        """Time the same request without the router."""
        if router.direct_port:
            plan = self._plan(router, 4, PAUSE_S, num_streams)
            plan = msgspec.structs.replace(plan, port=router.direct_port)
            return Quantiles.of(_http(plan, self._cores.others)[0].latencies_ms)
        prefill, decode = router.nodes
        wire = WirePlan(
            ports=(prefill.engine_port, decode.engine_port),
            bootstrap_port=prefill.bootstrap_port or 0,
            prompt_ids=self._prompt_ids,
            new_tokens=NEW_TOKENS,
            duration_s=self._seconds,
            pause_s=PAUSE_S,
            num_streams=num_streams,
            stream_tokens=STREAM_TOKENS,
        )
        command = [*pinned(self._cores.others), sys.executable, "-m", "benchmarks.wire_load"]
        done = subprocess.run(
            command, input=msgspec.json.encode(wire), check=True, capture_output=True
        )
        return Quantiles.of(msgspec.json.decode(done.stdout, type=list[float]))

    def _load(
        self, router: Router, connections: int, pause_s: float, num_streams: int = 0
    ) -> tuple[Measured, float]:
        plan = self._plan(router, connections, pause_s, num_streams)
        return _http(plan, self._cores.others, router.pid)

    def _plan(self, router: Router, connections: int, pause_s: float, num_streams: int = 0) -> Plan:
        return Plan(
            port=router.port,
            path=router.path,
            body=router.body(PROMPT, NEW_TOKENS),
            connections=connections,
            duration_s=self._seconds,
            pause_s=pause_s,
            # Streams begin together: until they are all under way, that is what is measured.
            warm_up_s=5.0 if num_streams else 1.0,
            num_streams=num_streams,
            stream_body=router.body(PROMPT, STREAM_TOKENS, is_stream=True),
        )


def _http(plan: Plan, core: str, watched: int | None = None) -> tuple[Measured, float]:
    """Run a client; return what it measured, and the CPU seconds of `watched` meanwhile."""
    command = [*pinned(core), sys.executable, "-m", "benchmarks.http_load"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stderr is not None
        client.stdin.write(msgspec.json.encode(plan))
        client.stdin.close()
        if client.stderr.readline() != b"warm\n":
            raise SystemExit(f"the client failed:\n{client.stderr.read().decode()}")
        before = cpu_s(watched) if watched is not None else 0.0
        measured = msgspec.json.decode(client.stdout.read(), type=Measured)
        after = cpu_s(watched) if watched is not None else 0.0
    num_answers = len(measured.latencies_ms)
    if num_answers < 2:
        raise SystemExit(
            f"port {plan.port} gave {num_answers} answers beside {plan.num_streams} streams in "
            f"{plan.duration_s:g} s: give fewer --streams or more --seconds; errors: {measured.errors}"
        )
    if num_answers < LEAST_ANSWERS:
        print(
            f"of {num_answers} answers only, the 99th percentile says little: give more --seconds"
        )
    return measured, after - before


def tokenize_us(tokenizer: Tokenizer, times: int = 500) -> float:
    """Return the CPU microseconds of tokenizing the prompt; the least of a few rounds."""
    rounds = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(times):
            tokenizer.encode(PROMPT)
        rounds.append((time.process_time() - begin) / times * 1e6)
    return min(rounds)


def verdicts(rows: Sequence[Row], tokenizing_us: float) -> list[str]:
    """Return what is said of the goals, as far as the rows that it takes are there."""
    by_name = {row.name: row for row in rows}
    ours = by_name.get("tandem lb")
    if ours is None:
        return []
    said, added = list[str](), ours.added_beside
    if added is not None:
        said.append(_less("router_added_p99", added.p99, GOAL_ADDED_P99_MS, "ms"))
    rust = [by_name[name] for name in RUST if name in by_name]
    if rust:
        allowed = min(row.cpu_us for row in rust) + tokenizing_us
        said.append(_less("router_cpu_vs_rust_and_tokenizing", ours.cpu_us / allowed, 1.0))
    theirs = [row.added_beside.p99 for row in rust if row.added_beside is not None]
    if added is not None and theirs:
        said.append(_less("router_added_p99_vs_rust", added.p99 / min(theirs), 1.0))
    return said


def _less(name: str, value: float, goal: float, unit: str = "ratio") -> str:
    return result(name, value, goal, unit, is_lower_better=True)


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    cores = Cores.of_this_machine()
    tokenizer = Tokenizer.load(resolve_model(None, default_cache_dir() / "models"))
    prompt_ids = tokenizer.encode(PROMPT)
    tokenizing_us = tokenize_us(tokenizer)
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    print(
        f"prompt of {len(PROMPT)} characters, {len(prompt_ids)} tokens: {tokenizing_us:.0f} us to tokenize"
    )
    starts: dict[str, Callable[[], contextlib.AbstractContextManager[Router]]] = {
        "lb": lambda: tandem_lb(cores),
        "nodes": lambda: tandem_lb_simulated(cores),
        "sglang": lambda: sglang_router(cores, args.peers_python),
        "vllm": lambda: vllm_router(cores, args.peers_python),
        "nginx": lambda: nginx(cores),
    }
    bench = Bench(args.seconds, args.streams, cores, prompt_ids)
    print(
        f"\n{'':<17}{'direct, ms':>14}{'light: added':>16}{'beside streams':>17}{'full load':>28}\n"
        f"{'':<17}{'p50':>7}{'p99':>7}{'p50':>9}{'p99':>7}{'p50':>9}{'p99':>8}"
        f"{'req/s':>9}{'CPU us':>9}{'req/s/core':>11}{'failed':>7}"
    )
    rows = []
    for name, start in starts.items():
        if args.only and name not in args.only:
            continue
        try:
            with start() as router:
                rows.append(bench.measure(router))
                print(rows[-1].line(), flush=True)
        except Missing as missing:
            print(f"left out: {missing}")
    print("\n".join(["", *verdicts(rows, tokenizing_us)]))


if __name__ == "__main__":
    main()
