"""One file of requests, from the first look at it to the output.

```
 examine ─▶ journal: new, or what was done before ─▶ check the servers ─▶ send what is not done ─▶ output, in order
 nothing is sent before here ────────────────────────────────────────┘      every result ─▶ journal
```
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator

from rich.console import Console

from tandem.batch.client import BatchClient
from tandem.batch.config import BatchConfig
from tandem.batch.examine import Examined, InputFile
from tandem.batch.journal import Journal, write_outputs
from tandem.batch.progress import Progress, shown, started, summary
from tandem.batch.values import Totals
from tandem.wire.errors import ConfigInvalid

# Results of so long may be asked for again when the machine loses its power; none when only the command dies.
SYNC_EVERY_S = 1.0


class Interrupted(Exception):
    """The user ended it before its end."""


async def run_job(config: BatchConfig) -> Totals:
    """Do what is not done yet; return what the whole file came to.

    Raises:
        ConfigInvalid: The input, or what was done before, is not fit.
        BatchStopped: The servers are away or want another key.
        OSError: A file could not be read or written.
        Interrupted: Ctrl-C; all answers that came are in the journal.
    """
    began_s = started()
    with contextlib.closing(InputFile(config.input, config.max_line_bytes)) as file:
        _refuse_output(config)
        found = _examine(config, file)
        _refuse_output(config)  # another command may have ended while the input was read
        with contextlib.closing(
            Journal.open(
                config.journal,
                found.sha256,
                found.num_requests,
                is_restarted=config.is_restarted,
            )
        ) as journal:
            num_before = journal.num_done
            _tell_journal(journal, found)
            if num_before < found.num_requests:
                await _send(
                    config, file, journal, Progress(found.num_requests, num_before, began_s)
                )
            totals = Totals()
            write_outputs(journal.results(), config.output, config.error_file, totals.take)
            journal.remove()
    num_now = found.num_requests - num_before
    sys.stdout.write(summary(totals, started() - began_s, num_now) + f"; {config.output}\n")
    return totals


def _refuse_output(config: BatchConfig) -> None:
    if config.output.exists() and not config.journal.exists() and not config.is_restarted:
        raise ConfigInvalid(
            f"{config.output} is there already, and whole: give another -o, or --restart to replace it"
        )


def _examine(config: BatchConfig, file: InputFile) -> Examined:
    """Look at the whole input.

    Raises:
        ConfigInvalid: It has lines that are no requests.
    """
    console = Console(stderr=True, markup=False, highlight=False)
    with console.status(f"reading {config.input}") as status:
        found = file.examine(lambda n: status.update(f"reading {config.input}: {n >> 20:,} MiB"))
    if not found.num_invalid:
        return found
    lines = f"{config.input}: {found.num_invalid} lines are no requests\n{found.told}"
    if not config.skips_invalid:
        raise ConfigInvalid(f"{lines}\nmend them, or go on without them with --skip-invalid")
    console.print(f"{lines}\ngoing on without them", soft_wrap=True)
    return found


def _tell_journal(journal: Journal, found: Examined) -> None:
    if journal.num_corrupt:
        sys.stderr.write(
            f"tandem batch: {journal.path} has {journal.num_corrupt} lines that are not what was written: does "
            "its disk fail? Their requests are sent again\n"
        )
    if journal.num_done:
        sys.stderr.write(f"going on: {journal.num_done} of {found.num_requests} are done\n")


async def _send(config: BatchConfig, file: InputFile, journal: Journal, progress: Progress) -> None:
    """Send what is not in the journal, until it is.

    Raises:
        Interrupted: Not all of it is.
    """
    async with BatchClient(config.urls, config.settings) as client:
        for url, problem in (await client.check()).items():
            sys.stderr.write(
                f"tandem batch: {url} does not answer ({problem}): going on with others\n"
            )

        def line() -> str:
            return progress.line(client.in_flight, client.servers, started())

        try:
            with _stopping_on_signals(client, config.grace_s):
                async with shown(progress, line):
                    await _keep_results(client, file, journal, progress)
        except asyncio.CancelledError:
            raise Interrupted(_how_far(progress)) from None
        finally:
            journal.sync()
        if progress.num_done < progress.num_requests:
            raise Interrupted(_how_far(progress))


async def _keep_results(
    client: BatchClient, file: InputFile, journal: Journal, progress: Progress
) -> None:
    synced_s = started()
    results = client.run(file.requests(lambda number: not journal.is_done(number)))
    async with contextlib.aclosing(results):
        async for result in results:
            journal.append(result.request.number, result.line(journal.run))
            progress.take(result)
            if (now_s := started()) - synced_s >= SYNC_EVERY_S:
                await asyncio.to_thread(journal.sync)
                synced_s = now_s


@contextlib.contextmanager
def _stopping_on_signals(client: BatchClient, grace_s: float) -> Iterator[None]:
    """On the first Ctrl-C or SIGTERM wait for what is under way; on a second, or when time is up, for nothing."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    end: asyncio.TimerHandle | None = None

    def ask() -> None:
        nonlocal end
        if end is not None:
            task.cancel()
            return
        sys.stderr.write(
            f"tandem batch: waiting up to {grace_s:g} s for {client.in_flight} answers under way; Ctrl-C again "
            "ends at once\n"
        )
        client.stop()
        end = loop.call_later(grace_s, task.cancel)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if end is not None:  # else it might end what comes after
            end.cancel()


def _how_far(progress: Progress) -> str:
    return f"{progress.num_done} of {progress.num_requests} are done"
