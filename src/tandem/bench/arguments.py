"""The flags of `tandem bench`, read and checked; nothing is done."""

import argparse
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from tandem.bench.config import BenchConfig, Load
from tandem.bench.flags import build_parser
from tandem.wire.errors import ConfigInvalid

DEFAULT_STREAMS = 16


def parse(argv: Sequence[str]) -> BenchConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser().parse_args(argv)
    _check_numbers(args)
    loads = _loads(args)
    given = vars(args)
    for name in ("request_rate", "max_concurrency", "concurrency"):  # what `loads` was made of
        del given[name]
    checked = {"url": _url(args.url), "extra_body": _extra_body(args.extra_body), "loads": loads}
    return BenchConfig(**given | checked)


def _check_numbers(args: argparse.Namespace) -> None:
    least: dict[str, float] = {
        **dict.fromkeys(("max_concurrency", "num_prompts", "trace_limit", "clients"), 0),
        **dict.fromkeys(("shared_prefix_tokens", "think_time_s", "vocab_size", "seed"), 0),
        **dict.fromkeys(("warmup_requests", "range_ratio", "request_rate"), 0),
        **dict.fromkeys(("input_tokens", "output_tokens", "num_prefixes", "turns"), 1),
    }
    flags = {"input_tokens": "input_len", "output_tokens": "output_len"}
    flags["range_ratio"] = "random_range_ratio"
    for name, bound in least.items():
        if not getattr(args, name) >= bound:
            flag = "--" + flags.get(name, name).replace("_", "-")
            raise ConfigInvalid(f"{flag} is {getattr(args, name)}: give at least {bound}")
    for name in (
        "burstiness",
        "trace_speed",
        "timeout_s",
        "slo_ttft_ms",
        "slo_itl_ms",
        "slo_e2e_ms",
    ):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigInvalid(f"--{name.replace('_', '-')} is {value:g}: give more than 0")
    if args.range_ratio > 1:
        raise ConfigInvalid(f"--random-range-ratio is {args.range_ratio:g}: give 0 to 1")


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    """Return the loads that the flags come to.

    Raises:
        ConfigInvalid: Two of them exclude each other.
    """
    kinds = {"--concurrency": args.concurrency, "--rate": args.request_rate, "--trace": args.trace}
    given = [flag for flag, value in kinds.items() if value]
    if len(given) > 1:
        raise ConfigInvalid(
            f"{given[0]} and {given[1]}: give one of them; --max-concurrency bounds an open loop"
        )
    if args.trace and (args.turns > 1 or args.num_prompts or args.shared_prefix_tokens):
        raise ConfigInvalid(
            "--trace says itself what is asked for: leave out --turns, --num-prompts and "
            "--shared-prefix-tokens; --trace-limit takes its first requests"
        )
    if any(streams < 1 for streams in args.concurrency):
        raise ConfigInvalid("--concurrency: give at least 1")
    if args.trace or args.request_rate:
        return (Load(args.max_concurrency, args.request_rate, bool(args.trace)),)
    default = [args.max_concurrency or DEFAULT_STREAMS]
    return tuple(Load(streams) for streams in args.concurrency or default)


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_whole = False
    if not is_whole:
        raise ConfigInvalid(f"--url {text}: give http://HOST:PORT or https://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def _extra_body(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigInvalid(f"--extra-request-body: {error}; give a JSON object") from error
