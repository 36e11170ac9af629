"""From the command line of `tandem profile` to its exit status."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tandem.engine.profile import DecodeTimes, PrefillTimes
from tandem.long_work import counted
from tandem.node.checkpoint import resolve_model
from tandem.node.engine_process import MALLOC_SETTINGS
from tandem.profile.fitting import Fit, fit_decode, fit_prefill
from tandem.profile.flags import ProfileConfig, parse
from tandem.profile.grid import Room, decode_points, prefill_points
from tandem.profile.measuring import QUICK, THOROUGH, Bench
from tandem.profile.report import Measured, profile_of, render
from tandem.telemetry import log as logs
from tandem.wire.errors import ConfigInvalid, TandemError

STOPPED = 130  # what shells say of a command that Ctrl-C ended


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    logs.configure("error")
    try:
        config = parse(argv)
        _check_writable(config.output)
        _with_settings_of_nodes(argv)
        measured = _measure(config)
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem profile: error: {error.for_operators}\n")
        return 2
    except TandemError as error:
        sys.stderr.write(f"tandem profile: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("tandem profile: stopped\n")
        return STOPPED
    render(measured, Console(markup=False, highlight=False))
    return write(config, measured)


def _with_settings_of_nodes(argv: Sequence[str]) -> None:
    """Begin anew with what nodes set for their engine process, unless it is set.

    The C library reads it once at its start, and it makes a tenth of a step on a CPU.
    """
    if not MALLOC_SETTINGS.keys() <= os.environ.keys():
        command = [sys.executable, "-P", "-m", "tandem", "profile", *argv]
        os.execve(sys.executable, command, MALLOC_SETTINGS | os.environ)  # noqa: S606 - this program


def _measure(config: ProfileConfig) -> Measured:
    # Both load torch: what is wrong with the flags was said before.
    from tandem.node.command import default_cache_dir
    from tandem.profile.node import engine_of, link_bytes_per_s

    model = resolve_model(
        config.node.engine.model_dir or None,
        (config.cache_dir or default_cache_dir()) / "models",
        config.node.engine,
    )
    node = msgspec.structs.replace(
        config.node, engine=msgspec.structs.replace(config.node.engine, model_dir=str(model))
    )
    sys.stderr.write(f"loading {node.served_model_name} …\n")
    with engine_of(node) as engine:
        shape = engine.shape
        settings = node.engine
        num_tokens = engine.cache.num_pages * engine.cache.page_size
        room = Room(
            num_tokens=num_tokens,
            context_length=shape.context_length,
            page_size=settings.page_size,
            chunk=settings.chunked_prefill_size,
            max_running=settings.max_running_requests,
            longest_context=config.longest_context,
        )
        bench = Bench(engine)
        prefill, decode = _fits(bench, room, is_quick=config.is_quick)
    is_cpu = settings.device == "cpu"
    return Measured(
        node=node,
        shape=shape,
        num_tokens=num_tokens,
        prefill=prefill,
        decode=decode,
        host_s=bench.host_s,
        link_bytes_per_s=link_bytes_per_s() if is_cpu else 0.0,
    )


def _fits(
    bench: Bench, room: Room, *, is_quick: bool
) -> tuple[Fit[PrefillTimes], Fit[DecodeTimes]]:
    """Measure all points and return what describes them."""
    prefills = prefill_points(room, is_quick=is_quick)
    decodes = decode_points(room, is_quick=is_quick)
    effort = QUICK if is_quick else THOROUGH
    chunks_s, steps_s = {}, {}
    with counted("forwards", len(prefills) + len(decodes)) as advance:
        for number, chunk in enumerate(prefills):
            advance(number, f"{chunk.num_new:,} prompt tokens after {chunk.num_context:,}")
            chunks_s[chunk] = bench.prefill_s(chunk, effort)
        for number, step in enumerate(decodes, len(prefills)):
            advance(number, f"{step.batch:,} answers of {step.num_context:,} tokens each")
            steps_s[step] = bench.decode_s(step, effort)
    return fit_prefill(chunks_s), fit_decode(steps_s)


def _check_writable(path: Path | None) -> None:
    """Refuse, before minutes of work, a file that could not be written."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise ConfigInvalid(f"--output {path}: {error.strerror}") from error


def write(config: ProfileConfig, measured: Measured) -> int:
    """Write the profile if it describes what was measured; return the exit status."""
    parts = {"prefill": measured.prefill.mean_error, "decode": measured.decode.mean_error}
    for name, error in parts.items():
        if error > config.max_error:
            sys.stderr.write(
                f"tandem profile: error: the profile is {error:.0%} off on average over the points of {name}, "
                f"above {config.max_error:.0%} (--max-error): nothing was written. Measure while nothing else "
                "runs here, or for longer, without --quick\n"
            )
            return 1
    if config.output is not None:
        made = msgspec.json.encode(profile_of(measured))
        config.output.write_bytes(msgspec.json.format(made) + b"\n")
    return 0
