"""Code shared by the benchmarks: the command line, servers under measurement, their CPU time, and the result line."""

import argparse
import contextlib
import datetime as dt
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tandem.node.machine import cpu_flags

# The first start converts the model and may compile, which takes minutes on two cores.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
# Instruction sets that kernels for matrix products use.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
# Environment variables that limit torch, oneDNN, MKL and numba to AVX2. They read them at their start.
AVX2_ALONE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.2",
}
# With two cores or more, the server under measurement gets core 0; everything else gets the others.
NUM_CORES = os.cpu_count() or 1
OWN_CORE, OTHER_CORES = ("0", f"1-{NUM_CORES - 1}") if NUM_CORES > 1 else ("", "")


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows defaults."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def parse(
    parser: argparse.ArgumentParser,
    quick: Mapping[str, object],
    argv: Sequence[str] | None = None,
    *,
    child_options: Sequence[str] = (),
) -> argparse.Namespace:
    """Add `--quick` and `--avx2` to the parser, parse the command line, and print the machine line.

    `--avx2` restarts the process with `AVX2_ALONE` in its environment.

    Args:
        quick: Values that `--quick` sets, by destination.
        child_options: Destinations of options with which the benchmark starts child processes. These print no machine line.
    """
    parser.add_argument(
        "--quick", action="store_true", help="smoke test; the figures are meaningless"
    )
    parser.add_argument("--avx2", action="store_true", help="limit this CPU to AVX2")
    args = parser.parse_args(argv)
    is_limited = os.environ.items() >= AVX2_ALONE.items()
    if args.avx2 and not is_limited:
        os.execve(sys.executable, sys.orig_argv, os.environ | AVX2_ALONE)
    if args.quick:
        vars(args).update(quick)
    if not any(getattr(args, name) for name in child_options):
        flags = {"avx2"} if is_limited else cpu_flags()
        print(machine(flags), flush=True)
    return args


def machine(flags: Set[str]) -> str:
    """Return the machine line, `machine: CORES x CPU, INSTRUCTIONS; VERSIONS; DATE`, on which all figures depend.

    Args:
        flags: Flags of the CPU, named as in /proc/cpuinfo.
    """
    names = re.findall(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kinds = [flag for flag in INSTRUCTIONS if flag in flags]
    cpu = ", ".join([names[0] if names else platform.machine(), *kinds])
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    today = dt.datetime.now(dt.UTC).date()
    return f"machine: {NUM_CORES} x {cpu}; {versions}; {today}"


def result(
    name: str, value: float, goal: float, unit: str = "ratio", *, is_lower_better: bool = False
) -> str:
    """Return `result: NAME VALUE UNIT (goal GOAL) reached|short`."""
    is_reached = value <= goal if is_lower_better else value >= goal
    verdict = "reached" if is_reached else "short"
    return f"result: {name} {value:.3g} {unit} (goal {goal:g}) {verdict}"


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load.

    Attributes:
        pid: Pid of the server's first process.
    """

    name: str
    url: str
    pid: int = 0

    @property
    def port(self) -> int:
        """The port of `url`."""
        return int(self.url.rpartition(":")[2])


def free_port() -> int:
    """Return a loopback port that is currently free."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def get(url: str) -> bytes:
    """Return the body of a GET.

    Raises:
        OSError: The request failed, or its status is an error.
    """
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def pinned(cores: str) -> list[str]:
    """Return the command prefix that pins a process to these cores."""
    return ["taskset", "-c", cores] if cores else []


@contextlib.contextmanager
def tandem(name: str, argv: Sequence[str], cores: str = "") -> Iterator[Target]:
    """Run `tandem` on a free port; yield it once it serves, and stop it at the end."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "tandem", *argv, "--port", str(port)]
    with running(name, command, port, cores) as target:
        yield target


@contextlib.contextmanager
def tandem_pair(
    flags: Sequence[str], prefill_cores: str = "", decode_cores: str = ""
) -> Iterator[Target]:
    """Run a prefill node, a decode node and their router; yield the router."""
    bootstrap = str(free_port())
    argv = ["prefill", *flags, "--bootstrap-port", bootstrap]
    with (
        tandem("prefill", argv, prefill_cores) as prefill,
        tandem("decode", ["decode", *flags], decode_cores) as decode,
        tandem("apart", ["lb", "--prefill", prefill.url, bootstrap, "--decode", decode.url]) as lb,
    ):
        yield lb


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    port: int,
    cores: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    """Run a server; yield it once it serves, and stop it at the end."""
    with tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log") as log:
        process = subprocess.Popen(
            [*pinned(cores), *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            target = Target(name, f"http://127.0.0.1:{port}", process.pid)
            _wait_serving(target, process, log.name)
            yield target
        finally:
            _stop(process)


def _wait_serving(target: Target, process: subprocess.Popen[bytes], log_path: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            get(f"{target.url}/health")
            return
        time.sleep(0.2)
    with open(log_path, encoding="utf-8") as log:
        raise SystemExit(f"{target.name} did not become ready:\n{log.read()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT; send SIGKILL if the process does not end in time."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def family(pid: int) -> list[int]:
    """Return the pids of a process and all its descendants."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in family(child))]


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds that running processes have used, over all their threads."""
    threads = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9
