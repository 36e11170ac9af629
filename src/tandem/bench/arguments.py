"""The flags of `tandem bench`, read and checked."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tandem.bench.flags import build_parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url

DEFAULT_STREAMS = 16

Api = Literal["native", "completions", "chat"]


@dataclass(frozen=True, slots=True)
class Load:
    """One load: a bound on the streams, a rate, or a trace.

    Attributes:
        concurrency: Maximum number of requests at once; 0 for no bound.
        rate: Requests a second, infinity for all at once; 0 for a closed loop or a trace.
    """

    concurrency: int = 0
    rate: float = 0.0
    is_trace: bool = False

    @property
    def kind(self) -> Literal["closed", "open", "trace"]:
        """What decides when a request is sent."""
        if self.is_trace:
            return "trace"
        return "open" if self.rate else "closed"

    @property
    def name(self) -> str:
        """The load in words."""
        streams = f"{self.concurrency} stream{'s' * (self.concurrency > 1)}"
        bound = f", at most {streams}" if self.concurrency else ""
        if self.is_trace:
            return f"trace{bound}"
        if not self.rate:
            return streams
        each = "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"
        return f"{each}{bound}"


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The flags of `tandem bench`; their help says what each is."""

    url: str
    api: Api
    model: str
    api_key: str
    extra_body: dict[str, object]
    is_eos_ignored: bool
    timeout_s: float
    loads: tuple[Load, ...]
    num_prompts: int
    burstiness: float
    trace: Path | None
    trace_speed: float
    trace_limit: int
    input_tokens: int
    output_tokens: int
    range_ratio: float
    shared_prefix_tokens: int
    num_prefixes: int
    vocab_size: int
    seed: int
    warmup_requests: int
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    slo_e2e_ms: float | None
    output_file: Path | None


def parse(argv: Sequence[str]) -> BenchConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser().parse_args(argv)
    loads = _loads(args)
    given = vars(args)
    for name in ("request_rate", "max_concurrency", "concurrency"):  # `loads` has them
        del given[name]
    checked = {
        "url": checked_url("--url", args.url.rstrip("/").removesuffix("/v1")),
        "extra_body": _extra_body(args.extra_body),
        "loads": loads,
    }
    return BenchConfig(**given | checked)


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    """Return the loads that the flags describe.

    Raises:
        ConfigInvalid: Two flags exclude each other.
    """
    kinds = {"--concurrency": args.concurrency, "--rate": args.request_rate, "--trace": args.trace}
    given = [flag for flag, value in kinds.items() if value]
    if len(given) > 1:
        raise ConfigInvalid(
            f"{given[0]} and {given[1]}: give one of them; --max-concurrency bounds an open loop"
        )
    if args.trace and (args.num_prompts or args.shared_prefix_tokens):
        raise ConfigInvalid(
            "--trace has its own requests: leave out --num-prompts and --shared-prefix-tokens; "
            "--trace-limit takes its first requests"
        )
    if args.trace or args.request_rate:
        return (Load(args.max_concurrency, args.request_rate, bool(args.trace)),)
    default = [args.max_concurrency or DEFAULT_STREAMS]
    return tuple(Load(streams) for streams in args.concurrency or default)


def _extra_body(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigInvalid(f"--extra-request-body: {error}; give a JSON object") from error
