"""`tandem profile`: measures the forwards of one node, and writes the fitted profile."""

import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from tandem.engine.core import Engine
from tandem.engine.profile import NodeFigures, Profile
from tandem.node.checkpoint import model_name, resolve_model
from tandem.node.config import NodeConfig, check
from tandem.node.engine_process import MALLOC_SETTINGS
from tandem.node.machine import DEFAULTS, fitted, with_dtype
from tandem.profile.measuring import Bench, Grid, Point, fit_decode, fit_prefill, rounded
from tandem.telemetry import log as logs
from tandem.telemetry.version import package_version
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.options import Flag, add_flags, read_flags

EXAMPLES = """\
examples:
  tandem profile -o smollm2.json                           the embedded model on this machine's CPU
  tandem profile --quick                                   half a minute, and only the measurements
  tandem profile --model /models/llama-8b --device cuda --chunked-prefill-size 8192 -o h100.json
  tandem profile --model /models/llama-70b --device cuda --tp 4 --chunked-prefill-size 8192 -o tp4.json

Use the profile:
  tandem plan --node h100.json --link-gbit 200 --prompt 4000 --output 300 --rate 50 --ttft-ms 1000
  tandem up --engine simulated --sim-profile h100.json

exit status: 0 done; 1 the model could not be measured; 2 wrong usage; 130 stopped by Ctrl-C.

More: tandem docs plan; tandem docs simulation
"""
# Attention of one chunk over 4,096 tokens of the embedded model takes one or two seconds on two cores; all
# points take three minutes.
CPU_CONTEXT, QUICK_CPU_CONTEXT, GPU_CONTEXT = 4096, 1024, 32768
QUICK_POINT_S, POINT_S = 0.3, 2.0
# A fit with a larger mean error causes a warning.
MOST_ERROR = 0.20
# A byte that forms a normal number in every type, because denormals are slow. Untouched zeros would share one
# physical page and be read from the CPU's cache.
_FILL = 0x3C


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem profile`. `node.engine.model_dir` is still the user's value, unresolved."""

    output: Annotated[
        Path | None,
        Flag(*("--output", "-o"), group="measuring", help="write the profile as JSON", parse=Path),
    ] = None
    is_quick: Annotated[
        bool, Flag("--quick", help="measure fewer points, each for a shorter time")
    ] = False
    node: NodeConfig


COMMON = (
    "--output",
    "--quick",
    "--model",
    "--device",
    "--dtype",
    "--kv-cache-dtype",
    "--context-length",
    "--page-size",
    "--max-total-tokens",
    "--mem-fraction-static",
    "--max-running-requests",
    "--chunked-prefill-size",
    "--attention-backend",
    "--tensor-parallel-size",
    "--num-threads",
)
_OWN = ("output", "is_quick")
_OF_NODE = ("model", "cache_dir", "served_model_name", "engine")


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem profile",
        common=COMMON,
        description="Measure the forwards of one node, in this process and without a cluster, and write the "
        "profile that describes them: input for `tandem plan` and simulated engines.",
        epilog=EXAMPLES,
    )
    add_flags(parser, ProfileConfig, only=_OWN)
    add_flags(parser, NodeConfig, only=_OF_NODE, defaults=DEFAULTS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    logs.configure("error")
    config = parse(argv)
    # The C library reads these variables only at its start; they save a tenth of a step on a CPU.
    if not MALLOC_SETTINGS.keys() <= os.environ.keys():
        command = [sys.executable, "-P", "-m", "tandem", "profile", *argv]
        os.execve(sys.executable, command, MALLOC_SETTINGS | os.environ)  # noqa: S606 - this program
    with _engine_of(config.node) as engine:
        profile = _measured(config, engine)
    write(profile, config.output)
    return 0


def parse(argv: Sequence[str]) -> ProfileConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value is invalid, or the output file cannot be written.
        SystemExit: argparse rejects a flag (2) or prints --help (0).
    """
    args = build_parser().parse_args(argv)
    node = read_flags(NodeConfig, args, role="colocated")
    if not node.engine.is_prefix_cache_enabled:
        raise ConfigInvalid(
            "--disable-prefix-cache: leave it out; the cost of a context is measured through the prefix cache"
        )
    engine = fitted(msgspec.structs.replace(node.engine, model_dir=node.model or ""))
    name = node.served_model_name or model_name(node.model)
    node = check(msgspec.structs.replace(node, engine=engine, served_model_name=name))
    config = read_flags(ProfileConfig, args, node=node)
    try:
        if config.output is not None:
            config.output.open("ab").close()
    except OSError as error:
        raise ConfigInvalid(f"--output {config.output}: {error.strerror}") from error
    return config


@contextmanager
def _engine_of(config: NodeConfig) -> Iterator[Engine]:
    """Load a model and allocate its pool, as a node does; the other ranks stop with the block.

    Raises:
        ConfigInvalid: The model cannot be loaded, or no page fits.
    """
    # These modules import torch, so they are imported only after the flags are valid.
    from tandem.kvtransfer.region import MemoryRegion
    from tandem.node.command import default_cache_dir
    from tandem.node.model_engine import build_model
    from tandem.node.pool import PoolPlan
    from tandem.node.ranks import Ranks
    from tandem.wire.channel import Waker

    settings, replace = config.engine, msgspec.structs.replace
    folder = Path(config.cache_dir or default_cache_dir()) / "models"
    model = resolve_model(settings.model_dir or None, folder, settings)
    settings = with_dtype(replace(settings, model_dir=str(model)), folder)
    config = replace(config, engine=settings)

    def filled(plan: PoolPlan) -> MemoryRegion | None:
        if settings.device != "cpu":
            return None  # device memory is physical as soon as it is allocated
        region = MemoryRegion.private(plan.memory_bytes)
        region.array()[:] = _FILL
        return region

    sys.stderr.write(f"loading {config.served_model_name} …\n")
    waker = Waker()
    ranks = Ranks(config, waker.wake, _rank_ended) if settings.tp_size > 1 else None
    try:
        yield build_model(config, filled, waker, ranks)
    finally:
        if ranks is not None:
            ranks.close()


def _rank_ended(error: TandemError) -> None:
    # This runs on a thread; the main thread waits for the dead rank and would wait forever.
    sys.stderr.write(f"tandem profile: error: {error}\n")
    sys.stderr.flush()
    os._exit(1)


def _measured(asked: ProfileConfig, engine: Engine) -> Profile:
    """Measure all points, print the times, and return the fitted profile."""
    config, shape = asked.node, engine.shape
    settings, is_cpu = config.engine, config.engine.device == "cpu"
    cpu_context = QUICK_CPU_CONTEXT if asked.is_quick else CPU_CONTEXT
    grid = Grid(
        num_tokens=engine.cache.num_pages * engine.cache.page_size,
        context_length=shape.context_length,
        page_size=settings.page_size,
        chunk=settings.chunked_prefill_size,
        max_running=settings.max_running_requests,
        longest_context=cpu_context if is_cpu else GPU_CONTEXT,
        is_quick=asked.is_quick,
    )
    bench = Bench(engine, QUICK_POINT_S if asked.is_quick else POINT_S)
    prefill, prefill_error = fit_prefill(
        _timed("tokens of a prompt", grid.prefills(), bench.prefill_s)
    )
    decode, decode_error = fit_decode(_timed("answers", grid.decodes(), bench.decode_s))
    figures = NodeFigures(
        model=config.served_model_name,
        device=f"{platform.machine()} CPU" if is_cpu else settings.device,
        num_devices=settings.tp_size,
        num_tokens=grid.num_tokens,
        page_size=grid.page_size,
        kv_bytes_per_token=shape.kv_bytes_per_token * settings.tp_size,
        num_layers=shape.num_layers,
        context_length=grid.context_length,
        max_running_requests=grid.max_running,
        chunked_prefill_size=grid.chunk,
        host_step_ms=rounded(1000 * statistics.median(bench.host_s)),
        is_overlapped=not is_cpu,
        prefill_error=prefill_error,
        decode_error=decode_error,
    )
    origin = (
        f"Measured by tandem profile {package_version()} on {datetime.now(UTC).date()}: {figures.model}, "
        f"{shape.dtype}, on {figures.num_devices} x {figures.device}; off by {prefill_error:.1%} (prefill) and "
        f"{decode_error:.1%} (decode) on average."
    )
    sys.stdout.write(f"{origin}\n")
    return Profile(origin=origin, prefill=prefill, decode=decode, node=figures)


def _timed(what: str, points: list[Point], measure: Callable[[Point], float]) -> dict[Point, float]:
    """Return the measured seconds of all points, and print each as it is measured."""
    found_s = {}
    for point in points:
        found_s[point] = measure(point)
        time = f"{1000 * found_s[point]:10,.2f} ms"
        sys.stdout.write(f"{time}  {point.size:,} {what}, after {point.num_context:,} tokens\n")
        sys.stdout.flush()
    return found_s


def write(profile: Profile, path: Path | None) -> None:
    """Write the profile; print a warning if it fits the measurements badly."""
    assert profile.node is not None
    parts = {"prefill": profile.node.prefill_error, "decode": profile.node.decode_error}
    for name, error in parts.items():
        if error > MOST_ERROR:
            sys.stderr.write(
                f"tandem profile: warning: the profile is {error:.0%} off on average over the points of {name}: "
                "measure while nothing else runs here, or for longer, without --quick\n"
            )
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
