"""From the command line of `tandem batch` to its exit status."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from tandem.batch.client import BatchSettings, BatchStopped
from tandem.batch.flags import build_parser
from tandem.batch.job import BatchConfig, Interrupted, run_job
from tandem.wire.errors import ConfigInvalid

SOME_FAILED, COULD_NOT_RUN = 1, 2
STOPPED = 130  # what shells say of a command that Ctrl-C ended
DEFAULT_URL = "http://127.0.0.1:8000"
# The first that is set; the second is what OpenAI's own programs read.
KEY_VARIABLES = ("TANDEM_API_KEY", "OPENAI_API_KEY")
RESUME = "give the same command again to go on"


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    try:
        return asyncio.run(carry_out(parse(argv, os.environ)))
    except ConfigInvalid as error:
        return _fail(error.for_operators)
    except KeyboardInterrupt:
        sys.stderr.write("tandem batch: stopped\n")
        return STOPPED


async def carry_out(config: BatchConfig) -> int:
    """Run the job and return the exit status."""
    try:
        num_failed = await run_job(config)
    except ConfigInvalid as error:
        return _fail(error.for_operators)
    except BatchStopped as error:
        return _fail(f"{error}\n{RESUME}")
    except OSError as error:
        what = f"{error.filename or config.output}: {error.strerror or error}"
        return _fail(f"{what}: results so far are kept; mend it, and {RESUME}")
    except Interrupted as error:
        sys.stderr.write(f"tandem batch: stopped: {error}; {RESUME}\n")
        return STOPPED
    return SOME_FAILED if num_failed else 0


def _fail(sentence: str) -> int:
    sys.stderr.write(f"tandem batch: error: {sentence}\n")
    return COULD_NOT_RUN


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
    """Reject files that would overwrite each other.

    Raises:
        ConfigInvalid: Two are the same.
    """
    seen = {config.input.resolve(): "the input"}
    for name, path in (("-o", config.output), ("--error-file", config.error_file)):
        if path is None:
            continue
        if other := seen.get(path.resolve()):
            raise ConfigInvalid(f"{path} is {other} and {name}: give another file")
        seen[path.resolve()] = name
