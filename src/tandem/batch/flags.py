"""The flags of `tandem batch` and their help."""

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  tandem batch requests.jsonl -o answers.jsonl               through the router of this machine, at port 8000
  tandem batch requests.jsonl -o answers.jsonl --url http://10.0.0.2:8000 --extra-request-body '{"priority": -1}'
                                                             behind whoever waits for an answer now
  tandem batch requests.jsonl -o answers.jsonl --url http://gpu1:30000 --url http://gpu2:30000
                                                             servers of any kind, the least busy one first
  tandem batch requests.jsonl -o answers.jsonl               again, after a crash or Ctrl-C: goes on

A line of IN.jsonl, as OpenAI's batches have it:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "M", "messages": [...]}}
and one of OUT.jsonl, in the same order:
  {"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Ctrl-C takes nothing new and waits for what is under way; a second one ends at once. Nothing that was written
is asked for again.
exit status: 0 all succeeded; 1 some failed; 2 it could not run, or not to its end; 130 stopped by Ctrl-C.

More: tandem docs batch
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="tandem batch",
        description="Send a file of requests through a cluster, or a list of servers, as fast as nothing waits "
        "there, and write the answers to a file. A command that dies goes on where it was.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
        help="answers in the order of the requests, written at the end; until then they are in OUT.jsonl.journal",
    )
    add(
        "--error-file",
        type=Path,
        metavar="FILE",
        help="what failed goes there, as OpenAI has it (default: into the output, too)",
    )
    add(
        "--restart",
        dest="is_restarted",
        action="store_true",
        help="begin again: throw away what was answered so far, and replace the output",
    )
    add(
        "--skip-invalid",
        dest="skips_invalid",
        action="store_true",
        help="go on without the lines that are no requests; without it they are told, and nothing is sent",
    )
    add(
        "--max-line-bytes",
        type=int,
        default=32 << 20,
        metavar="N",
        help="of a request, at most; servers take no more by default (default: 33554432)",
    )


def _add_servers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--url",
        "--base-url",
        dest="urls",
        action="append",
        metavar="URL",
        help="of a router, or of any server with OpenAI's API; may be given several times (default: "
        "http://127.0.0.1:8000)",
    )
    add(
        "--api-key",
        default="",
        metavar="KEY",
        help="sent as a bearer token (default: of TANDEM_API_KEY, else of OPENAI_API_KEY; `ps` does not show those)",
    )
    add(
        "--extra-request-body",
        dest="extra_body",
        default="{}",
        metavar="JSON",
        help="fields for the requests that do not have them, such as '{\"priority\": -1}'",
    )
    add(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="a request that is not answered in so long is sent again (default: 600)",
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-concurrency",
        type=int,
        default=1024,
        metavar="N",
        help="requests under way at all servers together, at most (default: 1024)",
    )
    add(
        "--min-concurrency",
        type=int,
        default=1,
        metavar="N",
        help="at each server that is there, at least, whoever waits; equal to the other: a fixed number (default: 1)",
    )
    add(
        "--max-attempts",
        type=int,
        default=5,
        metavar="N",
        help="how often a request is sent that ends in 408, 5xx or a broken connection (default: 5)",
    )
    add(
        "--patience-s",
        type=float,
        default=900.0,
        metavar="S",
        help="how long one request is tried again after 429 and 503, and how long no server may answer before "
        "the command ends (default: 900)",
    )
    add(
        "--grace-s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long Ctrl-C waits for the answers under way (default: 60)",
    )
