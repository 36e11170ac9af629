"""The flags of `tandem bench` and their help.

Names that users of `sglang.bench_serving` and `vllm bench serve` know are accepted where they mean the same.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from tandem.wire.command_line import Parser

EXAMPLES = """\
examples:
  tandem bench                                           16 streams against http://127.0.0.1:8000
  tandem bench --concurrency 1 8 64                      a curve of throughput over latency
  tandem bench --request-rate 4 --slo-ttft-ms 500 --slo-itl-ms 50
                                                         an open loop, and goodput
  tandem bench --api chat --model M --url http://host:8000
  tandem bench --trace mooncake_trace.jsonl --trace-speed 0.5 --trace-limit 1000

Ctrl-C ends the load and reports what was measured so far; a second one ends the command.
exit status: 0 done; 1 the server could not be driven; 2 wrong usage; 130 stopped by Ctrl-C.

More: tandem docs bench; tandem docs tuning
"""


def _number(
    kind: type[int] | type[float],
    least: float,
    most: float = float("inf"),
    *,
    is_open: bool = False,
) -> Callable[[str], float]:
    """Return a type of argparse: a number from `least`, which it may not be if `is_open`, to `most`."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or (is_open and value == least):
            bound = f"more than {least:g}" if is_open else f"at least {least:g}"
            upper = "" if most == float("inf") else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"{text}: give {bound}{upper}")
        return value

    return number


COUNT, POSITIVE_COUNT = _number(int, 0), _number(int, 1)
NUMBER, POSITIVE = _number(float, 0), _number(float, 0, is_open=True)


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem bench",
        description="Send streamed requests to a server and measure time to the first token, time between "
        "tokens, throughput and goodput.",
        epilog=EXAMPLES,
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load: how many requests, and when"))
    _add_prompts(parser.add_argument_group("prompts and answers: random, of these lengths"))
    _add_output(parser.add_argument_group("report"))
    return parser


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", "--base-url", default="http://127.0.0.1:8000", help="http(s)://HOST:PORT")
    add(
        "--api",
        choices=["native", "completions", "chat"],
        default="native",
        help="/generate, /v1/completions or /v1/chat/completions (default: native)",
    )
    add("--model", default="", help="asked for over OpenAI's APIs (default: the server's first)")
    add("--api-key", default="", metavar="KEY", help="bearer token")
    add(
        "--extra-request-body",
        dest="extra_body",
        default="{}",
        metavar="JSON",
        help="more fields for each request, such as '{\"temperature\": 0.7}'",
    )
    add(
        "--timeout-s",
        type=POSITIVE,
        default=300.0,
        help="a request that receives nothing for this long has failed (default: 300)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=POSITIVE_COUNT,
        nargs="+",
        default=[],
        metavar="N",
        help="closed loop: N streams, each sends its next request when one has ended; several numbers run one "
        "load after the other (default: 16)",
    )
    add(
        "--request-rate",
        "--rate",
        type=NUMBER,
        default=0.0,
        metavar="R",
        help="open loop: R requests a second, whether or not the server keeps up; inf: all at once",
    )
    add(
        "--burstiness",
        type=POSITIVE,
        default=1.0,
        help="of an open loop: 1 is Poisson, less is burstier, inf is even (default: 1)",
    )
    add(
        "--max-concurrency",
        type=COUNT,
        default=0,
        metavar="N",
        help="maximum number of requests at once of an open loop or a trace; with neither the same as --concurrency",
    )
    add("--trace", type=Path, metavar="FILE", help="replay JSON lines in Mooncake's format")
    add(
        "--trace-speed",
        type=POSITIVE,
        default=1.0,
        help="factor on the recorded speed (default: 1)",
    )
    add(
        "--trace-limit", type=COUNT, default=0, metavar="N", help="replay only the first N requests"
    )
    add(
        "--num-prompts",
        "--num-requests",
        type=COUNT,
        default=0,
        metavar="N",
        help="requests of each load (default: 8 for each stream; 200 in an open loop)",
    )
    add(
        "--warmup-requests", "--num-warmups", type=COUNT, default=1, help="not counted (default: 1)"
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--input-len",
        "--random-input-len",
        dest="input_tokens",
        type=POSITIVE_COUNT,
        default=512,
        metavar="N",
        help="tokens of a prompt (default: 512)",
    )
    add(
        "--output-len",
        "--random-output-len",
        dest="output_tokens",
        type=POSITIVE_COUNT,
        default=128,
        metavar="N",
        help="tokens of an answer (default: 128)",
    )
    add(
        "--random-range-ratio",
        dest="range_ratio",
        type=_number(float, 0, 1),
        default=0.0,
        metavar="R",
        help="draw lengths from N * (1 - R) to N * (1 + R), as vLLM does; SGLang's R differs (default: 0)",
    )
    add(
        "--shared-prefix-tokens",
        "--random-prefix-len",
        type=COUNT,
        default=0,
        metavar="N",
        help="tokens before each prompt that others share (default: 0)",
    )
    add(
        "--num-prefixes",
        type=POSITIVE_COUNT,
        default=1,
        metavar="N",
        help="shared prefixes (default: 1)",
    )
    add(
        "--disable-ignore-eos",
        dest="is_eos_ignored",
        action="store_false",
        help="let answers end by themselves; by default a shorter one has failed",
    )
    add(
        "--vocab-size",
        type=COUNT,
        default=0,
        metavar="N",
        help="random ids are below N (default: ask the server)",
    )
    add("--seed", type=COUNT, default=0, help="of prompts, lengths and arrivals (default: 0)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--slo-ttft-ms",
        type=POSITIVE,
        metavar="MS",
        help="goodput: limit of the time to the first token",
    )
    add(
        "--slo-itl-ms",
        type=POSITIVE,
        metavar="MS",
        help="goodput: limit of a request's mean time between tokens",
    )
    add(
        "--slo-e2e-ms",
        type=POSITIVE,
        metavar="MS",
        help="goodput: limit of the time of the whole answer",
    )
    add("--output-file", type=Path, metavar="FILE", help="write the report as JSON")
