"""The flags of `tandem bench`. Names of `sglang.bench_serving` and `vllm bench serve` have the same meaning."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from tandem.settings.flags import Flag, add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.wire.hosts import checked_url

EXAMPLES = """\
examples:
  tandem bench                                           16 streams against http://127.0.0.1:8000
  tandem bench --max-concurrency 64 --processes 4        64 streams from 4 processes
  tandem bench --request-rate 4 --slo-ttft-ms 500 --slo-itl-ms 50
                                                         an open loop, and goodput
  tandem bench --api completions --url http://host:8000

exit status: 0 done; 1 the server did not answer; 2 wrong usage; 130 stopped by Ctrl-C.

More: docs/bench.md; docs/tuning.md
"""
DEFAULT_STREAMS = 16
MIN_MS = 0.001


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem bench`. `vocab_size` bounds the ids of prompts; 0: query the server."""

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
        Literal["native", "completions"],
        Flag("--api", help="/generate or /v1/completions"),
    ] = "native"
    model: Annotated[
        str, Flag("--model", help="model for /v1/completions (default: the server's first)")
    ] = ""
    api_key: Annotated[str, Flag("--api-key", help="bearer token")] = ""
    max_concurrency: Annotated[
        int,
        Flag(
            "--max-concurrency",
            group="load",
            metavar="N",
            ge=0,
            help="maximum number of requests at once; without --request-rate, a closed loop of N streams "
            f"(default: {DEFAULT_STREAMS}, without a limit in an open loop)",
        ),
    ] = 0
    request_rate: Annotated[
        float,
        Flag(
            *("--request-rate", "--rate"),
            metavar="R",
            ge=0,
            help="open loop: Poisson arrivals, in requests per second",
        ),
    ] = 0.0
    num_prompts: Annotated[
        int,
        Flag(
            *("--num-prompts", "--num-requests"),
            ge=0,
            help="number of requests (default: 8 per stream; 200 in an open loop)",
        ),
    ] = 0
    num_processes: Annotated[
        int, Flag("--processes", ge=1, help="number of processes that send the load")
    ] = 1
    input_tokens: Annotated[
        int, Flag("--input-len", "--random-input-len", ge=1, help="tokens of a prompt")
    ] = 512
    output_tokens: Annotated[
        int, Flag("--output-len", "--random-output-len", ge=1, help="tokens of an answer")
    ] = 128
    seed: Annotated[int, Flag("--seed", ge=0, help="seed of prompts and arrivals")] = 0
    slo_ttft_ms: Annotated[
        float | None,
        Flag(
            "--slo-ttft-ms",
            group="report",
            ge=MIN_MS,
            help="goodput: limit of the time to the first token",
        ),
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        Flag("--slo-itl-ms", ge=MIN_MS, help="goodput: limit of the mean time between tokens"),
    ] = None
    output_file: Annotated[str, Flag("--output-file", help="file for the report as JSON")] = ""
    vocab_size: int = 0

    @property
    def concurrency(self) -> int:
        """The maximum number of requests at once; 0: no limit."""
        return self.max_concurrency or (0 if self.request_rate else DEFAULT_STREAMS)

    @property
    def load(self) -> str:
        """The load in words."""
        streams = f"{self.concurrency} stream{'s' * (self.concurrency > 1)}"
        if not self.request_rate:
            return streams
        bound = f", at most {streams}" if self.concurrency else ""
        return f"{self.request_rate:g} requests/s{bound}"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem bench",
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
    return read_flags(BenchConfig, build_parser().parse_args(argv))
