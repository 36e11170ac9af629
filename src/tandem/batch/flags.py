"""The flags of `tandem batch` and their help."""

import argparse
from pathlib import Path

from tandem.wire.command_line import Parser

EXAMPLES = """\
examples:
  tandem batch requests.jsonl -o answers.jsonl               through the router of this machine, at port 8000
  tandem batch requests.jsonl -o answers.jsonl --url http://10.0.0.2:8000 --extra-request-body '{"priority": -1}'
                                                             behind requests of a higher priority
  tandem batch requests.jsonl -o answers.jsonl --url http://gpu1:30000 --url http://gpu2:30000
                                                             any OpenAI servers, the least busy one first
  tandem batch requests.jsonl -o answers.jsonl               again, after a crash or Ctrl-C: resumes

A line of IN.jsonl, in OpenAI's batch format:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "M", "messages": [...]}}
and a line of OUT.jsonl, in the order in which answers come:
  {"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Ctrl-C sends nothing new and waits for answers under way; a second one ends at once. A request that has a line
in the output is not sent again.
exit status: 0 all succeeded; 1 some failed; 2 the job could not run, or not to its end; 130 stopped by Ctrl-C.

More: tandem docs batch
"""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem batch",
        description="Send a file of requests to a cluster, or to any OpenAI servers, and write the answers to a "
        "file. After a crash the same command resumes.",
        epilog=EXAMPLES,
    )
    _add_files(parser.add_argument_group("files"))
    _add_servers(parser.add_argument_group("servers"))
    _add_pace(parser.add_argument_group("how many at once, and how often"))
    return parser


def _add_files(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("input", type=Path, metavar="IN.jsonl", help="requests, one a line")
    add(
        "-o",
        "--output",
        "--output-file",
        type=Path,
        required=True,
        metavar="OUT.jsonl",
        help="answers, each appended as it comes",
    )
    add(
        "--error-file",
        type=Path,
        metavar="FILE",
        help="write failed requests there, as OpenAI does (default: to the output)",
    )
    add(
        "--restart",
        dest="is_restarted",
        action="store_true",
        help="begin again: empty the output and the error file",
    )
    add(
        "--skip-invalid",
        dest="skips_invalid",
        action="store_true",
        help="leave out lines that are no requests; by default they are reported, and nothing is sent",
    )
    add(
        "--max-line-bytes",
        type=int,
        default=32 << 20,
        metavar="N",
        help="maximum size of a request; servers accept no more by default (default: 33554432)",
    )


def _add_servers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--url",
        "--base-url",
        dest="urls",
        action="append",
        metavar="URL",
        help="a router, or any server with OpenAI's API; repeat for several (default: http://127.0.0.1:8000)",
    )
    add(
        "--api-key",
        default="",
        metavar="KEY",
        help="bearer token (default: TANDEM_API_KEY, then OPENAI_API_KEY, which `ps` does not show)",
    )
    add(
        "--extra-request-body",
        dest="extra_body",
        default="{}",
        metavar="JSON",
        help="fields for requests that lack them, such as '{\"priority\": -1}'",
    )
    add(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="time of one attempt, answer included (default: 600)",
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-concurrency",
        type=int,
        default=1024,
        metavar="N",
        help="maximum number of requests at all servers together (default: 1024)",
    )
    add(
        "--min-concurrency",
        type=int,
        default=1,
        metavar="N",
        help="refusals (429, 503) do not lower the number at one server below this (default: 1)",
    )
    add(
        "--max-attempts",
        type=int,
        default=5,
        metavar="N",
        help="how often to send a request that ends in 408, 5xx or a broken connection (default: 5)",
    )
    add(
        "--patience-s",
        type=float,
        default=900.0,
        metavar="S",
        help="how long to retry a request after 429 and 503, and how long to wait while no server answers "
        "(default: 900)",
    )
    add(
        "--grace-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long Ctrl-C waits for answers under way (default: 60)",
    )
