"""The flags of `tandem bench` and their help.

Names that users of `sglang.bench_serving` and `vllm bench serve` know are taken where they mean the same.
"""

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  tandem bench                                           16 streams against http://127.0.0.1:8000
  tandem bench --concurrency 1 8 64 --html report.html   a curve of throughput over latency
  tandem bench --request-rate 4 --slo-ttft-ms 500 --slo-itl-ms 50
                                                         arrivals as they come, and goodput
  tandem bench --api chat --model M --url http://host:8000 --turns 4 --think-time-s 2
  tandem bench --trace mooncake_trace.jsonl --trace-speed 0.5 --trace-limit 1000

Ctrl-C ends the load and reports what was measured so far; a second one ends all.
exit status: 0 done; 1 the server could not be driven; 2 wrong usage; 130 stopped by Ctrl-C.

More: tandem docs bench; tandem docs tuning
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="tandem bench",
        description="Send streamed requests to a server and say how it served them: time to the first "
        "token, time between tokens, throughput and goodput.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load: how many requests, and when"))
    _add_prompts(parser.add_argument_group("prompts and answers: random, of these lengths"))
    _add_output(parser.add_argument_group("what is said of it"))
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
    add("--api-key", default="", metavar="KEY", help="sent as a bearer token")
    add(
        "--extra-request-body",
        dest="extra_body",
        default="{}",
        metavar="JSON",
        help="more fields of each request, such as '{\"temperature\": 0.7}'",
    )
    add(
        "--timeout-s",
        type=float,
        default=300.0,
        help="a request that hears nothing for so long has failed (default: 300)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="closed loop: N streams, each sending its next request when one has ended; several: one "
        "load after the other (default: 16)",
    )
    add(
        "--request-rate",
        "--rate",
        type=float,
        default=0.0,
        metavar="R",
        help="open loop: R requests a second, whatever the server does; inf: all at once",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="of the open loop: 1 is Poisson, less is burstier, inf is even (default: 1)",
    )
    add(
        "--max-concurrency",
        type=int,
        default=0,
        metavar="N",
        help="bound of an open loop or a trace; without either the same as --concurrency",
    )
    add("--trace", type=Path, metavar="FILE", help="replay: JSON lines as Mooncake publishes them")
    add("--trace-speed", type=float, default=1.0, help="times as fast as recorded (default: 1)")
    add("--trace-limit", type=int, default=0, metavar="N", help="only its first N requests")
    add(
        "--num-prompts",
        "--num-requests",
        type=int,
        default=0,
        metavar="N",
        help="conversations of each load (default: 8 for each stream; 200 in an open loop)",
    )
    add("--warmup-requests", "--num-warmups", type=int, default=1, help="not counted (default: 1)")
    add(
        "--clients", type=int, default=0, metavar="N", help="processes that send (default: by load)"
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--input-len",
        "--random-input-len",
        dest="input_tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a prompt (default: 512)",
    )
    add(
        "--output-len",
        "--random-output-len",
        dest="output_tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens of an answer (default: 128)",
    )
    add(
        "--random-range-ratio",
        dest="range_ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are drawn from N * (1 - R) to N * (1 + R), as vLLM has it; SGLang's R is another",
    )
    add(
        "--shared-prefix-tokens",
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="before each prompt, shared with others",
    )
    add("--num-prefixes", type=int, default=1, metavar="N", help="different ones (default: 1)")
    add("--turns", type=int, default=1, metavar="N", help="requests of a conversation (default: 1)")
    add("--think-time-s", type=float, default=0.0, help="between an answer and the next turn")
    add(
        "--disable-ignore-eos",
        dest="is_eos_ignored",
        action="store_false",
        help="let answers end by themselves; without it a shorter one has failed",
    )
    add("--vocab-size", type=int, default=0, metavar="N", help="of random ids (default: asked for)")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--slo-ttft-ms", type=float, metavar="MS", help="goodput: time to the first token, at most")
    add("--slo-itl-ms", type=float, metavar="MS", help="goodput: a request's mean between tokens")
    add("--slo-e2e-ms", type=float, metavar="MS", help="goodput: the whole answer, at most")
    add("--output-file", type=Path, metavar="FILE", help="write the report as JSON")
    add("--html", type=Path, metavar="FILE", help="write it as a page with plots")
