"""One input file, from the check of its lines to the last line of its output.

Each result is one line, appended with one write: a process that is killed leaves at most one torn line, the
last one. The next run cuts it off, reads the `custom_id` of every line, and sends the other requests.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.batch.client import BatchClient, BatchSettings
from tandem.batch.lines import BatchError, BatchRequest, LineInvalid, failure_of, read_request
from tandem.long_work import counted
from tandem.wire.channel import allow_descriptors
from tandem.wire.errors import ConfigInvalid

NUM_SHOWN = 20
# Every line of an output begins so: a torn line that does not is somebody else's.
PREFIX = b'{"id":"batch_req_'


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The flags of `tandem batch`; their help says what each is."""

    input: Path
    output: Path
    error_file: Path | None
    urls: tuple[str, ...]
    settings: BatchSettings
    is_restarted: bool
    skips_invalid: bool
    max_line_bytes: int
    grace_s: float


class Interrupted(Exception):
    """The operator stopped the command before its end."""


class _Status(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    custom_id: str
    response: _Status | None
    error: BatchError | None


_decoder = msgspec.json.Decoder(_Line)


class Output:
    """An output file, which no other process writes.

    Raises:
        ConfigInvalid: Another command writes it.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, *, is_restarted: bool) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise ConfigInvalid(f"{path} is in use: another tandem batch writes it") from error
        if is_restarted:
            os.ftruncate(self._fd, 0)

    def outcomes(self) -> Iterator[tuple[str, str]]:
        """Yield name and failure of each result in the file, and cut off a torn last line.

        Raises:
            ConfigInvalid: It is no output of `tandem batch`.
        """
        end = 0
        with self._path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n") and line[: len(PREFIX)] == PREFIX[: len(line)]:
                    os.ftruncate(self._fd, end)
                    return
                try:
                    found = _decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise ConfigInvalid(
                        f"{self._path} is no output of tandem batch ({error}): give another file, or --restart, "
                        "which replaces it"
                    ) from error
                end += len(line)
                status = found.response.status_code if found.response else 0
                yield found.custom_id, failure_of(status, found.error)

    def append(self, line: bytes) -> None:
        """Write a line; it outlives this process at once.

        Raises:
            OSError: The disk is full; the next run cuts off the part that was written.
        """
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Have the disk hold all of it, and let others write."""
        os.fsync(self._fd)
        os.close(self._fd)


async def run_job(config: BatchConfig) -> int:
    """Send the requests that have no result yet; return how many results of the output are failures.

    Raises:
        ConfigInvalid: The input or the output is unfit.
        BatchStopped: The servers are away or require another key.
        OSError: A file could not be read or written.
        Interrupted: The operator stopped it; every answer that came is in the output.
    """
    began_s, names = time.monotonic(), check_input(config)
    with contextlib.ExitStack() as stack:
        paths = dict.fromkeys((config.output, config.error_file or config.output))
        files = []
        for path in paths:
            files.append(Output(path, is_restarted=config.is_restarted))
            stack.callback(files[-1].close)
        outcomes = dict(outcome for file in files for outcome in file.outcomes())
        num_requests, num_before = len(names | outcomes.keys()), len(outcomes)
        if outcomes:
            sys.stderr.write(f"resuming: {num_before} of {num_requests} are done\n")
        if num_requests > num_before:
            pending = (each for each in requests_of(config) if each.custom_id not in outcomes)
            await _send(config, pending, files, outcomes, num_requests)
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


def check_input(config: BatchConfig) -> set[str]:
    """Read the whole input; return the `custom_id` of every request.

    Raises:
        ConfigInvalid: It cannot be read, two requests have the same name, or a line is no request.
    """
    lines_of: dict[str, int] = {}
    invalid: list[str] = []
    for number, request in _lines(config):
        if isinstance(request, LineInvalid):
            invalid.append(f"line {number}: {request}")
        elif first := lines_of.get(request.custom_id):
            raise ConfigInvalid(
                f"{config.input}: lines {first} and {number} have the same custom_id "
                f"{request.custom_id!r}: give each request a name of its own"
            )
        else:
            lines_of[request.custom_id] = number
    if invalid:
        shown = [*invalid[:NUM_SHOWN], *(["..."] if len(invalid) > NUM_SHOWN else [])]
        text = "\n".join([f"{config.input}: {len(invalid)} lines are no requests", *shown])
        if not config.skips_invalid:
            raise ConfigInvalid(f"{text}\nmend them, or leave them out with --skip-invalid")
        sys.stderr.write(f"{text}\nleaving them out\n")
    return set(lines_of)


def requests_of(config: BatchConfig) -> Iterator[BatchRequest]:
    """Yield the requests of the input without its invalid lines."""
    return (request for _, request in _lines(config) if isinstance(request, BatchRequest))


def _lines(config: BatchConfig) -> Iterator[tuple[int, BatchRequest | LineInvalid]]:
    """Yield the number and content of every line that is not blank."""
    if config.input.exists() and not config.input.is_file():
        raise ConfigInvalid(f"{config.input} can be read only once: save it as a file first")
    try:
        file = config.input.open("rb")
    except OSError as error:
        raise ConfigInvalid(f"{config.input}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not (content := line.strip()):
                continue
            if len(content) > config.max_line_bytes:
                yield (
                    number,
                    LineInvalid(
                        f"longer than {config.max_line_bytes} bytes: shorten it, or raise --max-line-bytes and the "
                        "server's --max-body-bytes"
                    ),
                )
                continue
            try:
                yield number, read_request(content)
            except LineInvalid as error:
                yield number, error


async def _send(
    config: BatchConfig,
    requests: Iterator[BatchRequest],
    files: Sequence[Output],
    outcomes: dict[str, str],
    num_requests: int,
) -> None:
    """Send requests, append their results to the files, and note their outcomes.

    Raises:
        Interrupted: A second signal, or the end of the grace.
    """
    allow_descriptors(config.settings.max_concurrency, "requests at once")
    async with BatchClient(config.urls, config.settings) as client:
        with (
            _stopping_on_signals(client, config.grace_s),
            counted("tandem batch", num_requests) as advance,
        ):
            try:
                async with contextlib.aclosing(client.run(requests)) as results:
                    async for result in results:
                        files[0 if result.is_ok else -1].append(result.line())
                        outcomes[result.custom_id] = result.failure
                        problems = [f"{s.url} {s.problem}" for s in client.servers if s.problem]
                        advance(
                            len(outcomes), f"{client.in_flight} in flight {' · '.join(problems)}"
                        )
            except asyncio.CancelledError:
                raise Interrupted(f"{len(outcomes)} of {num_requests} are done") from None


@contextlib.contextmanager
def _stopping_on_signals(client: BatchClient, grace_s: float) -> Iterator[None]:
    """On the first Ctrl-C or SIGTERM wait for answers under way; on a second, end at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    end: asyncio.TimerHandle | None = None

    def stop() -> None:
        nonlocal end
        if end is not None:
            task.cancel()
            return
        sys.stderr.write(
            f"tandem batch: waiting up to {grace_s:g} s for {client.in_flight} answers under way; Ctrl-C "
            "again ends at once\n"
        )
        client.stop()
        end = loop.call_later(grace_s, task.cancel)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if end is not None:
            end.cancel()
