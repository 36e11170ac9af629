"""`tandem batch`: sends a file of requests and writes a file of results; the same command resumes.

Each result is one line, appended as it arrives. A request whose `custom_id` has a line is not sent again.
"""

import asyncio
import codecs
import contextlib
import fcntl
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console

from tandem.settings.flags import Flag, add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.tools.batch.client import (
    NOT_JSON,
    BatchClient,
    BatchError,
    BatchRequest,
    BatchResponse,
    BatchResult,
    Outcome,
)
from tandem.tools.query import QueryFailed
from tandem.wire.channel import raise_descriptor_limit
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url

EXAMPLES = """\
examples:
  tandem batch requests.jsonl -o answers.jsonl               through the router of this machine, at port 8000
  tandem batch requests.jsonl -o answers.jsonl --url http://10.0.0.2:8000
  tandem batch requests.jsonl -o answers.jsonl               again, after a crash or Ctrl-C: resumes

A line of IN.jsonl, in OpenAI's batch format:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "M", "messages": [...]}}
and a line of OUT.jsonl, in order of completion:
  {"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

exit status: 0 all succeeded; 1 some failed; 2 the job did not start or finish; 130 stopped by Ctrl-C.

More: docs/batch.md
"""
SOME_FAILED = 1
RESUME = "repeat the command to resume"
# Every output line starts with this. A partial last line that does not is from a different program.
PREFIX = b'{"id":"batch_req_'


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem batch`."""

    input: Path
    output: Annotated[
        Path | None,
        Flag(
            *("--output", "-o", "--output-file"),
            metavar="OUT.jsonl",
            help="file of results, each appended on arrival (required)",
            parse=Path,
        ),
    ] = None
    url: Annotated[
        str,
        Flag(
            *("--url", "--base-url"),
            help="a router, or any server with OpenAI's API",
            parse=lambda url: checked_url("--url", url.rstrip("/").removesuffix("/v1")),
        ),
    ] = "http://127.0.0.1:8000"
    api_key: Annotated[
        str,
        Flag(
            "--api-key",
            metavar="KEY",
            help="bearer token (default: TANDEM_API_KEY, then OPENAI_API_KEY, which `ps` does not show)",
        ),
    ] = ""
    max_concurrency: Annotated[
        int,
        Flag("--max-concurrency", metavar="N", ge=1, help="maximum number of requests at once"),
    ] = 256
    timeout_s: Annotated[
        float,
        Flag("--timeout-s", metavar="S", ge=0.001, help="time of one attempt, response included"),
    ] = 600.0


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem batch",
        description="Send a file of requests to a cluster, or to any OpenAI server, and write the answers to a "
        "file. After a crash the same command resumes.",
        epilog=EXAMPLES,
    )
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="requests, one a line")
    add_flags(parser, BatchConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return asyncio.run(carry_out(parse(argv, os.environ)))


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> BatchConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value is invalid; the message names the remedy.
        SystemExit: argparse rejects a flag (2) or prints --help (0).
    """
    args = build_parser().parse_args(argv)
    config = read_flags(BatchConfig, args, input=args.input)
    if config.output is None:
        raise ConfigInvalid("--output is missing: pass -o OUT.jsonl")
    if config.output.resolve() == config.input.resolve():
        raise ConfigInvalid(f"{config.output} is the input: use a different file for the output")
    api_key = config.api_key or environment.get("OPENAI_API_KEY", "")
    return msgspec.structs.replace(config, api_key=api_key)


async def carry_out(config: BatchConfig) -> int:
    """Send the requests that have no result yet, and return the exit status.

    Raises:
        ConfigInvalid: The job could not start or finish.
    """
    assert config.output is not None
    requests = read_requests(config.input)
    try:
        with contextlib.closing(OutputFile(config.output)) as output:
            failures = dict(output.failures())
            if failures:
                num_requests = len(requests.keys() | failures.keys())
                sys.stderr.write(f"resuming: {len(failures)} of {num_requests} are done\n")
            pending = [each for name, each in requests.items() if name not in failures]
            await _send(config, pending, output, failures)
    except QueryFailed as error:
        raise ConfigInvalid(f"{error.message}\n{RESUME}") from error
    except OSError as error:
        what = f"{error.filename or config.output}: {error.strerror or error}"
        raise ConfigInvalid(f"{what}: results so far are kept; fix it, and {RESUME}") from error
    failed = Counter(filter(None, failures.values()))
    kinds = ", ".join(f"{num} x {kind}" for kind, num in failed.most_common(5))
    sys.stdout.write(
        f"{len(failures)} requests: {len(failures) - failed.total()} succeeded, {failed.total()} failed"
        + (f" ({kinds})\n" if kinds else "\n")
    )
    return SOME_FAILED if failed else 0


async def _send(
    config: BatchConfig,
    requests: Sequence[BatchRequest],
    output: "OutputFile",
    failures: dict[str, str],
) -> None:
    """Send requests, append their results to `output`, and note their failures in `failures`."""
    raise_descriptor_limit(config.max_concurrency, "requests at once")
    client = BatchClient(
        config.url,
        api_key=config.api_key,
        max_concurrency=config.max_concurrency,
        timeout_s=config.timeout_s,
    )
    with Console(stderr=True).status(f"0 of {len(requests)} requests") as status:
        num_before = len(failures)

        def write(request: BatchRequest, outcome: Outcome) -> None:
            result = BatchResult(
                id=f"batch_req_{secrets.token_hex(12)}",
                custom_id=request.custom_id,
                response=outcome if isinstance(outcome, BatchResponse) else None,
                error=outcome if isinstance(outcome, BatchError) else None,
            )
            output.append(msgspec.json.encode(result) + b"\n")
            failures[result.custom_id] = result.failure
            status.update(f"{len(failures) - num_before} of {len(requests)} requests")

        await client.run(requests, write)


class OutputFile:
    """The output file, locked against other writers.

    Raises:
        ConfigInvalid: Another process holds the lock.
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise ConfigInvalid(
                f"{path} is in use: a different tandem batch is writing to it"
            ) from error

    def failures(self) -> Iterator[tuple[str, str]]:
        """Yield the `custom_id` and failure of each result in the file; truncate a torn last line.

        Raises:
            ConfigInvalid: The file is not an output of `tandem batch`.
        """
        end, decoder = 0, msgspec.json.Decoder(BatchResult)
        with self._path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n") and line[: len(PREFIX)] == PREFIX[: len(line)]:
                    os.ftruncate(self._fd, end)
                    return
                try:
                    result = decoder.decode(line)
                except NOT_JSON as error:
                    raise ConfigInvalid(
                        f"{self._path} is not an output of tandem batch ({error}): use a different file"
                    ) from error
                end += len(line)
                yield result.custom_id, result.failure

    def append(self, line: bytes) -> None:
        """Append a line, unbuffered: the line survives a crash of this process.

        Raises:
            OSError: The write failed, e.g. on a full disk; the next run removes a partial line.
        """
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Sync the file to disk and release the lock."""
        os.fsync(self._fd)
        os.close(self._fd)


def read_requests(path: Path) -> dict[str, BatchRequest]:
    """Return the requests of the input by `custom_id`.

    Raises:
        ConfigInvalid: The file cannot be read, a `custom_id` repeats, or a line is not a request.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror}") from error
    requests: dict[str, BatchRequest] = {}
    decoder = msgspec.json.Decoder(BatchRequest)
    for number, line in enumerate(lines, 1):
        # Some editors begin a file with a byte order mark, which files joined of several have inside.
        content = line.removeprefix(codecs.BOM_UTF8).strip()
        if not content:
            continue
        try:
            request = decoder.decode(content)
        except NOT_JSON as error:
            raise ConfigInvalid(f"{path}, line {number}: {error}") from error
        if request.custom_id in requests:
            raise ConfigInvalid(
                f"{path}, line {number}: custom_id {request.custom_id!r} repeats: set a unique name for each request"
            )
        requests[request.custom_id] = request
    return requests
