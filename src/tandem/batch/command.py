"""From the command line of `tandem batch` to its exit status."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from tandem.batch.client import BatchSettings
from tandem.batch.config import BatchConfig
from tandem.batch.flags import build_parser
from tandem.batch.job import Interrupted, run_job
from tandem.batch.servers import BatchStopped
from tandem.wire.errors import ConfigInvalid

SOME_FAILED, COULD_NOT_RUN = 1, 2
STOPPED = 130  # what shells say of a command that Ctrl-C ended
DEFAULT_URL = "http://127.0.0.1:8000"
# The first that is set; the second is what OpenAI's own programs read.
KEY_VARIABLES = ("TANDEM_API_KEY", "OPENAI_API_KEY")


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    try:
        config = parse(argv, os.environ)
    except ConfigInvalid as error:
        return _say(error.for_operators, COULD_NOT_RUN)
    try:
        return asyncio.run(carry_out(config))
    except KeyboardInterrupt:
        return _stopped(config, "")


async def carry_out(config: BatchConfig) -> int:
    """Do what it says, tell how it went, and return the exit status."""
    try:
        totals = await run_job(config)
    except ConfigInvalid as error:
        return _say(error.for_operators, COULD_NOT_RUN)
    except BatchStopped as error:
        return _say(f"{error}\n{_how_on(config)}", COULD_NOT_RUN)
    except OSError as error:
        what = f"{error.filename or config.journal}: {error.strerror or error}"
        return _say(
            f"{what}: what was written before is kept; mend it, and {_how_on(config)}",
            COULD_NOT_RUN,
        )
    except Interrupted as error:
        return _stopped(config, f": {error}")
    return SOME_FAILED if totals.num_failed else 0


def _stopped(config: BatchConfig, how_far: str) -> int:
    sys.stderr.write(f"tandem batch: stopped{how_far}; {_how_on(config)}\n")
    return STOPPED


def _say(sentence: str, status: int) -> int:
    sys.stderr.write(f"tandem batch: error: {sentence}\n")
    return status


def _how_on(config: BatchConfig) -> str:
    return f"give the same command again to go on ({config.journal} has what is done)"


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> BatchConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser().parse_args(argv)
    for name in ("max_line_bytes", "grace_s"):
        if not getattr(args, name) >= 0:
            raise ConfigInvalid(
                f"--{name.replace('_', '-')} is {getattr(args, name)}: give 0 or more"
            )
    keys = [args.api_key, *(environment.get(name, "") for name in KEY_VARIABLES)]
    config = BatchConfig(
        input=args.input,
        output=args.output,
        error_file=args.error_file,
        urls=tuple(args.urls or [DEFAULT_URL]),
        settings=_settings(args, next(filter(None, keys), "")),
        is_restarted=args.is_restarted,
        skips_invalid=args.skips_invalid,
        max_line_bytes=args.max_line_bytes,
        grace_s=args.grace_s,
    )
    _check_paths(config)
    return config


def _settings(args: argparse.Namespace, api_key: str) -> BatchSettings:
    try:
        extra = msgspec.json.decode(args.extra_body, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigInvalid(f"--extra-request-body: {error}; give a JSON object") from error
    names = ("max_concurrency", "min_concurrency", "max_attempts", "timeout_s", "patience_s")
    given = {name: getattr(args, name) for name in names}
    try:
        return BatchSettings(api_key=api_key, extra_body=extra, **given)
    except ConfigInvalid as error:
        name, _, rest = error.message.partition(" ")
        raise ConfigInvalid(f"--{name.replace('_', '-')} {rest}") from error


def _check_paths(config: BatchConfig) -> None:
    """Refuse files that would be written over each other.

    Raises:
        ConfigInvalid: Two are the same.
    """
    written = {"-o": config.output, "its journal": config.journal}
    if config.error_file is not None:
        written["--error-file"] = config.error_file
    seen = {config.input.resolve(): "the input"}
    for name, path in written.items():
        if other := seen.get(path.resolve()):
            raise ConfigInvalid(f"{path} is {other} and {name}: give another file")
        seen[path.resolve()] = name
