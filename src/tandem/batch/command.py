"""`tandem batch`: sends a file of requests and writes a file of results; the same command resumes.

Each result is one line, appended as it arrives. A request whose `custom_id` has a line is not sent again.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tandem.batch.client import BatchClient, BatchSettings, BatchStopped
from tandem.batch.lines import BatchError, BatchRequest, LineInvalid, failure_of, read_request
from tandem.long_work import counted
from tandem.wire.channel import allow_descriptors
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import Flag, add_flags, read_flags

EXAMPLES = """\
examples:
  tandem batch requests.jsonl -o answers.jsonl               through the router of this machine, at port 8000
  tandem batch requests.jsonl -o answers.jsonl --url http://10.0.0.2:8000 --extra-request-body '{"priority": -1}'
                                                             behind requests of a higher priority
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
SOME_FAILED = 1
STOPPED = 130  # the exit status that shells report after Ctrl-C
RESUME = "give the same command again to go on"
# Every output line starts with this; a torn last line that does not is from another program.
PREFIX = b'{"id":"batch_req_'


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem batch`."""

    input: Path
    output: Annotated[
        Path | None,
        Flag(
            *("--output", "-o", "--output-file"),
            group="output and server",
            metavar="OUT.jsonl",
            help="answers, each appended as it comes (required)",
            parse=Path,
        ),
    ] = None
    url: Annotated[
        str, Flag(*("--url", "--base-url"), help="a router, or any server with OpenAI's API")
    ] = "http://127.0.0.1:8000"
    settings: BatchSettings = BatchSettings()


class Interrupted(Exception):
    """The operator stopped the command before its end."""


class _Status(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    custom_id: str
    response: _Status | None
    error: BatchError | None


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
        raise ConfigInvalid("--output is missing: give -o OUT.jsonl")
    if config.output.resolve() == config.input.resolve():
        raise ConfigInvalid(f"{config.output} is the input: give another file for the output")
    if config.settings.api_key or not (key := environment.get("OPENAI_API_KEY")):
        return config
    settings = msgspec.structs.replace(config.settings, api_key=key)
    return msgspec.structs.replace(config, settings=settings)


async def carry_out(config: BatchConfig) -> int:
    """Run the job and return the exit status.

    Raises:
        ConfigInvalid: The job could not start or finish.
    """
    try:
        num_failed = await run_job(config)
    except BatchStopped as error:
        raise ConfigInvalid(f"{error}\n{RESUME}") from error
    except OSError as error:
        what = f"{error.filename or config.output}: {error.strerror or error}"
        raise ConfigInvalid(f"{what}: results so far are kept; mend it, and {RESUME}") from error
    except Interrupted as error:
        sys.stderr.write(f"tandem batch: stopped: {error}; {RESUME}\n")
        return STOPPED
    return SOME_FAILED if num_failed else 0


async def run_job(config: BatchConfig) -> int:
    """Send the requests that have no result yet; return the number of failures in the output.

    Raises:
        ConfigInvalid: The input or the output is invalid.
        BatchStopped: The server does not answer, or requires another key.
        OSError: A file could not be read or written.
        Interrupted: The operator stopped the job; the output has every answer that arrived.
    """
    assert config.output is not None
    began_s, names = time.monotonic(), check_input(config.input)
    with contextlib.closing(Output(config.output)) as output:
        outcomes = dict(output.outcomes())
        num_requests, num_before = len(names | outcomes.keys()), len(outcomes)
        if outcomes:
            sys.stderr.write(f"resuming: {num_before} of {num_requests} are done\n")
        if num_requests > num_before:
            requests = (each for _, each in _requests(config.input))
            pending = (each for each in requests if each.custom_id not in outcomes)
            await _send(config, pending, output, outcomes, num_requests)
    if len(outcomes) < num_requests:
        raise Interrupted(f"{len(outcomes)} of {num_requests} are done")
    failures = Counter(filter(None, outcomes.values()))
    kinds = ", ".join(f"{num} x {kind}" for kind, num in failures.most_common(5))
    sys.stdout.write(
        f"{num_requests} requests: {num_requests - failures.total()} succeeded, {failures.total()} failed"
        + (f" ({kinds})" if kinds else "")
        + f"; {num_requests - num_before} of them now, in {time.monotonic() - began_s:.1f} s\n"
    )
    return failures.total()


class Output:
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
            raise ConfigInvalid(f"{path} is in use: another tandem batch writes it") from error

    def outcomes(self) -> Iterator[tuple[str, str]]:
        """Yield the `custom_id` and failure of each result in the file; truncate a torn last line.

        Raises:
            ConfigInvalid: The file is no output of `tandem batch`.
        """
        end, decoder = 0, msgspec.json.Decoder(_Line)
        with self._path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n") and line[: len(PREFIX)] == PREFIX[: len(line)]:
                    os.ftruncate(self._fd, end)
                    return
                try:
                    found = decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise ConfigInvalid(
                        f"{self._path} is no output of tandem batch ({error}): give another file"
                    ) from error
                end += len(line)
                status = found.response.status_code if found.response else 0
                yield found.custom_id, failure_of(status, found.error)

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


def check_input(path: Path) -> set[str]:
    """Read the whole input; return the `custom_id` of every request.

    Raises:
        ConfigInvalid: The file cannot be read, a `custom_id` repeats, or a line is no request.
    """
    lines_of: dict[str, int] = {}
    for number, request in _requests(path):
        if first := lines_of.get(request.custom_id):
            raise ConfigInvalid(
                f"{path}: lines {first} and {number} have the same custom_id {request.custom_id!r}: give each "
                "request a name of its own"
            )
        lines_of[request.custom_id] = number
    return set(lines_of)


def _requests(path: Path) -> Iterator[tuple[int, BatchRequest]]:
    """Yield the line number and request of every nonblank line."""
    if path.exists() and not path.is_file():
        raise ConfigInvalid(f"{path} can be read only once: save it as a file first")
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                if content := line.strip():
                    yield number, read_request(content)
            except LineInvalid as error:
                raise ConfigInvalid(f"{path}, line {number}: {error}") from error


async def _send(
    config: BatchConfig,
    requests: Iterator[BatchRequest],
    output: Output,
    outcomes: dict[str, str],
    num_requests: int,
) -> None:
    """Send requests, append their results to `output`, and record their failures in `outcomes`.

    Raises:
        Interrupted: A second signal arrived.
    """
    allow_descriptors(config.settings.max_concurrency, "requests at once")
    client = BatchClient(config.url, config.settings)
    with _stopping_on_signals(client), counted("tandem batch", num_requests) as advance:
        try:
            async with contextlib.aclosing(client.run(requests)) as results:
                async for result in results:
                    output.append(result.line())
                    outcomes[result.custom_id] = result.failure
                    advance(len(outcomes), f"{client.num_at_server} in flight {client.problem}")
        except asyncio.CancelledError:
            raise Interrupted(f"{len(outcomes)} of {num_requests} are done") from None


@contextlib.contextmanager
def _stopping_on_signals(client: BatchClient) -> Iterator[None]:
    """On the first Ctrl-C or SIGTERM, wait for requests in flight; on a second, stop at once."""
    loop, task, is_second = asyncio.get_running_loop(), asyncio.current_task(), False
    assert task is not None

    def stop() -> None:
        nonlocal is_second
        if is_second:
            task.cancel()
            return
        is_second = True
        sys.stderr.write(
            f"tandem batch: waiting for {client.num_at_server} answers under way; Ctrl-C again ends at once\n"
        )
        client.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
