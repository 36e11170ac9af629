"""The flags of `tandem bench`, and the loads that the flags describe.

Flag names of `sglang.bench_serving` and `vllm bench serve` are accepted where the meaning is the same.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NewType

import msgspec

from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url
from tandem.wire.options import Flag, add_flags, read_flags

EXAMPLES = """\
examples:
  tandem bench                                           16 streams against http://127.0.0.1:8000
  tandem bench --concurrency 1 8 64                      a curve of throughput over latency
  tandem bench --request-rate 4 --slo-ttft-ms 500 --slo-itl-ms 50
                                                         an open loop, and goodput
  tandem bench --api chat --model M --url http://host:8000
  tandem bench --trace mooncake_trace.jsonl --trace-speed 0.5 --num-prompts 1000

Ctrl-C ends the load and reports what was measured so far; a second one ends the command.
exit status: 0 done; 1 the server could not be driven; 2 wrong usage; 130 stopped by Ctrl-C.

More: tandem docs bench; tandem docs tuning
"""
DEFAULT_STREAMS = 16
# Minimum of flags that must be positive.
LEAST = 0.001

Rate = NewType("Rate", float)
"""A number that may be infinite."""


class Load(msgspec.Struct, frozen=True):
    """One load: a number of streams, a rate, or a trace.

    Attributes:
        concurrency: The maximum number of requests at once; 0: no limit.
        rate: Requests per second; infinity: all at once; 0: a closed loop or a trace.
    """

    concurrency: int = 0
    rate: float = 0.0
    is_trace: bool = False

    @property
    def kind(self) -> Literal["closed", "open", "trace"]:
        """The kind of load, which decides when requests are sent."""
        if self.is_trace:
            return "trace"
        return "open" if self.rate else "closed"

    @property
    def name(self) -> str:
        """A label for reports."""
        streams = f"{self.concurrency} stream{'s' * (self.concurrency > 1)}"
        bound = f", at most {streams}" if self.concurrency else ""
        if self.is_trace:
            return f"trace{bound}"
        if not self.rate:
            return streams
        each = "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"
        return f"{each}{bound}"


def _rate(flag: str, least: float, text: str) -> Rate:
    try:
        rate = Rate(float(text))
    except ValueError:
        rate = Rate(math.nan)
    if not rate >= least:
        raise ConfigInvalid(f"{flag} is {text}: give at least {least:g}, or inf")
    return rate


def _streams(words: Sequence[Sequence[str]]) -> list[int]:
    given = [word for each in words for word in each]
    if not all(word.isdecimal() and int(word) for word in given):
        raise ConfigInvalid(f"--concurrency is {' '.join(given)}: give at least 1")
    return [int(word) for word in given]


def json_object(text: str) -> dict[str, object]:
    """Parse the value of `--extra-request-body`."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigInvalid(f"--extra-request-body: {error}; give a JSON object") from error


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem bench`."""

    url: Annotated[
        str,
        Flag(
            *("--url", "--base-url"),
            group="server",
            help="http(s)://HOST:PORT",
            parse=lambda url: checked_url("--url", url.rstrip("/").removesuffix("/v1")),
        ),
    ] = "http://127.0.0.1:8000"
    api: Annotated[
        Literal["native", "completions", "chat"],
        Flag("--api", help="/generate, /v1/completions or /v1/chat/completions"),
    ] = "native"
    model: Annotated[
        str, Flag("--model", help="model for OpenAI's APIs (default: the server's first)")
    ] = ""
    api_key: Annotated[str, Flag("--api-key", help="bearer token")] = ""
    extra_body: Annotated[
        dict[str, object],
        Flag(
            "--extra-request-body",
            help="JSON object: more fields for each request",
            parse=json_object,
        ),
    ] = {}
    timeout_s: Annotated[
        float,
        Flag("--timeout-s", ge=LEAST, help="a request that receives nothing for this long fails"),
    ] = 300.0
    concurrency: Annotated[
        tuple[int, ...],
        Flag(
            "--concurrency",
            group="load: how many requests, and when",
            nargs="+",
            metavar="N",
            help=f"closed loop of N streams; several: one after the other (default: {DEFAULT_STREAMS})",
            parse=_streams,
        ),
    ] = ()
    request_rate: Annotated[
        Rate,
        Flag(
            *("--request-rate", "--rate"),
            metavar="R",
            help="open loop: requests a second; inf: all at once",
            parse=lambda text: _rate("--request-rate", 0.0, text),
        ),
    ] = Rate(0.0)
    burstiness: Annotated[
        Rate,
        Flag(
            "--burstiness",
            help="of an open loop: 1 is Poisson, less is burstier, inf is even",
            parse=lambda text: _rate("--burstiness", LEAST, text),
        ),
    ] = Rate(1.0)
    max_concurrency: Annotated[
        int,
        Flag(
            "--max-concurrency",
            ge=0,
            help="maximum number of requests at once, of an open loop or a trace",
        ),
    ] = 0
    trace: Annotated[str, Flag("--trace", help="replay JSON lines in Mooncake's format")] = ""
    trace_speed: Annotated[
        float, Flag("--trace-speed", ge=LEAST, help="factor on the recorded speed")
    ] = 1.0
    num_prompts: Annotated[
        int,
        Flag(
            *("--num-prompts", "--num-requests"),
            ge=0,
            help="requests of each load (default: 8 a stream; 200 in an open loop; all of a trace)",
        ),
    ] = 0
    warmup_requests: Annotated[
        int, Flag("--warmup-requests", "--num-warmups", ge=0, help="requests that are not counted")
    ] = 1
    input_tokens: Annotated[
        int,
        Flag(
            *("--input-len", "--random-input-len"),
            group="prompts and answers: random, of these lengths",
            ge=1,
            help="tokens of a prompt",
        ),
    ] = 512
    output_tokens: Annotated[
        int, Flag("--output-len", "--random-output-len", ge=1, help="tokens of an answer")
    ] = 128
    range_ratio: Annotated[
        float,
        Flag(
            "--random-range-ratio",
            metavar="R",
            ge=0,
            le=1,
            help="draw lengths from N * (1 - R) to N * (1 + R), as vLLM does",
        ),
    ] = 0.0
    shared_prefix_tokens: Annotated[
        int,
        Flag(
            *("--shared-prefix-tokens", "--random-prefix-len"),
            ge=0,
            help="tokens before each prompt that others share",
        ),
    ] = 0
    is_eos_ignored: Annotated[
        bool,
        Flag(
            "--disable-ignore-eos",
            help="let answers end by themselves (default: a shorter one failed)",
        ),
    ] = True
    vocab_size: int = 0  # upper bound of random ids; 0: query the server
    seed: Annotated[int, Flag("--seed", ge=0, help="seed of prompts, lengths and arrivals")] = 0
    slo_ttft_ms: Annotated[
        float | None,
        Flag(
            "--slo-ttft-ms",
            group="report",
            ge=LEAST,
            help="goodput: limit of the time to the first token",
        ),
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        Flag("--slo-itl-ms", ge=LEAST, help="goodput: limit of the mean time between tokens"),
    ] = None
    output_file: Annotated[str, Flag("--output-file", help="write the report as JSON")] = ""

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads that the flags describe, in order."""
        if self.trace or self.request_rate:
            return (Load(self.max_concurrency, self.request_rate, bool(self.trace)),)
        default = [self.max_concurrency or DEFAULT_STREAMS]
        return tuple(Load(streams) for streams in self.concurrency or default)


COMMON = (
    "--url",
    "--api",
    "--model",
    "--api-key",
    "--concurrency",
    "--request-rate",
    "--max-concurrency",
    "--num-prompts",
    "--warmup-requests",
    "--input-len",
    "--output-len",
    "--trace",
    "--slo-ttft-ms",
    "--slo-itl-ms",
    "--output-file",
)


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem bench",
        common=COMMON,
        description="Send streamed requests to a server and measure time to the first token, time between "
        "tokens, throughput and goodput.",
        epilog=EXAMPLES,
    )
    add_flags(parser, BenchConfig)
    return parser


def parse(argv: Sequence[str]) -> BenchConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value is invalid; the message names the remedy.
        SystemExit: argparse rejects a flag (2) or prints --help (0).
    """
    config = read_flags(BenchConfig, build_parser().parse_args(argv))
    kinds = {
        "--concurrency": config.concurrency,
        "--rate": config.request_rate,
        "--trace": config.trace,
    }
    given = [flag for flag, value in kinds.items() if value]
    if len(given) > 1:
        raise ConfigInvalid(
            f"{given[0]} and {given[1]}: give one of them; --max-concurrency bounds an open loop"
        )
    if config.trace and config.shared_prefix_tokens:
        raise ConfigInvalid("--trace has its own prompts: leave out --shared-prefix-tokens")
    if config.concurrency and config.max_concurrency:
        raise ConfigInvalid("--max-concurrency bounds an open loop: leave it out")
    return config
