"""The processes of a command that runs others, and the terminal in front of them: `tandem up`, `tandem serve`.

```
 start ──all healthy──▶ banner, then only warnings and errors ──Ctrl-C──▶ drain ──again, or too late──▶ kill
```

Each process runs the command an operator would type. If one exits, all stop: half of a local cluster is useless.
"""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

COMMAND = (sys.executable, "-P", "-m", "tandem")
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
# Beyond what a process needs to drain.
STOP_GRACE_S = 10.0
# Limit of a log line: a longer line would stop all processes.
MOST_LINE_BYTES = 1 << 26
# A log line of no interest while all is well; every other line, such as a traceback, is shown.
ROUTINE = re.compile(r"\S+ \[(debug|info)\b")
# A node's log line about its download, with the percentage until that ends.
DOWNLOAD = re.compile(r"model\.(?:downloading .* percent=(\d+)|resolved)")
HEALTH_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Member:
    """One process.

    Attributes:
        name: The name in the log.
        argv: The arguments after `tandem`.
        url: Where it serves HTTP.
        environment: Variables to add, such as secrets: `ps` shows arguments but no variables.
    """

    name: str
    argv: list[str]
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def shown_url(scheme: str, host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server on `host`."""
    shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def run(name: str, members: Sequence[Member], drain_s: float, *, is_verbose: bool) -> int:
    """Run the processes of `tandem NAME` until a signal or the end of one; return the exit status.

    Args:
        drain_s: How long requests in progress may take after Ctrl-C.
        is_verbose: Show the log in the terminal instead of writing it to a file.
    """
    console, names = Console(highlight=False), [each.name for each in members]
    with (
        contextlib.nullcontext() if is_verbose else log_file(name) as log,
        Screen(console, names, log) as screen,
    ):
        processes = Processes(f"tandem {name}", members, screen, drain_s)
        status: int = uvloop.run(processes.run())
    return status


def log_file(name: str) -> TextIO:
    """Open a new file that only this user can read."""
    fd, path = tempfile.mkstemp(prefix=f"tandem-{name}-", suffix=".log")
    os.close(fd)
    return open(path, "w", buffering=1, encoding="utf-8")


class Screen:
    """What the terminal shows: with a log file, how each process starts, and later only warnings and errors.

    Args:
        names: Names of the processes, in the order they start.
        log: The file that gets every line; None: the terminal gets them.
    """

    def __init__(self, console: Console, names: Sequence[str], log: TextIO | None) -> None:
        self.console, self.log = console, log
        self._width, self._began_s = max(map(len, names)), time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        is_shown = log is not None and console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not is_shown)
        self._rows = {
            name: self._progress.add_task(f"{name:<{self._width}} starts") for name in names
        }
        self._colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._progress.stop()

    def line(self, name: str, said: Text) -> None:
        """Take a line that a process wrote."""
        if self.log is not None:
            self.log.write(f"{name:<{self._width}} │ {said.plain}\n")
            if ROUTINE.match(said.plain):
                if (found := DOWNLOAD.search(said.plain)) is not None:
                    does = f"downloads: {found[1]} %" if found[1] else "starts"
                    row = self._rows[name]
                    self._progress.update(row, description=f"{name:<{self._width}} {does}")
                return
        prefix = (f"{name:<{self._width}} │ ", self._colours[name])
        self.console.print(Text.assemble(prefix, said), soft_wrap=True)

    def note(self, sentence: str) -> None:
        """Show what this command itself does."""
        self._progress.stop()
        self.console.print(Text(sentence), soft_wrap=True)

    def ready(self, name: str) -> None:
        """Show that a process serves."""
        if self.log is not None:
            self._progress.remove_task(self._rows[name])
            took_s = time.monotonic() - self._began_s
            self.console.print(f"{name:<{self._width}}   ready after {took_s:.1f} s")

    def banner(self, url: str, *, has_page: bool) -> None:
        """Show what to do with a server that is ready. A router has a page."""
        self._progress.stop()
        log = "" if self.log is None else f"  log: {self.log.name}\n"
        look = f"  What it does: {url} in a browser, or tandem top {url}\n"
        page = look if has_page else ""
        self.console.print(
            Text.from_markup(
                f"\n[bold green]Tandem serves at {url}[/]  (Ctrl-C stops it)\n\n"
                f"  curl -s {url}/generate -H 'Content-Type: application/json' \\\n"
                '       -d \'{"text": "The capital of France is", "max_new_tokens": 32}\'\n\n'
                f"{page}"
                f"  OpenAI clients: base_url={url}/v1   health: {url}/health   "
                f"metrics: {url}/metrics\n{log}"
            ),
            soft_wrap=True,
        )


class Processes:
    """The processes of one command, from start to stop.

    Args:
        prog: The command, for errors.
        members: In the order they start. The last one serves clients, and stops first.
        drain_s: How long requests in progress may take after Ctrl-C.
    """

    def __init__(
        self, prog: str, members: Sequence[Member], screen: Screen, drain_s: float
    ) -> None:
        self._prog, self._members, self._drain_s = prog, members, drain_s
        self._screen = screen
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Start all processes, announce readiness, wait for a signal or an exit, stop all processes.

        Returns:
            0 after a signal; else the status of the first process that exited, at least 1.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(self._member(member)) for member in self._members]
                ready = tasks.create_task(self._announce())
                stopped = tasks.create_task(self._stopping.wait())
                await asyncio.wait([*watchers, stopped], return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                stopped.cancel()
                await self._stop()
            return self._status
        finally:
            self._kill()

    def _signalled(self) -> None:
        if self._stopping.is_set():
            self._screen.note("ended at once")
            self._kill()
            return
        self._screen.note(
            f"Stopping: requests in progress finish within {self._drain_s:g} s. Ctrl-C again ends them now."
        )
        self._stopping.set()

    async def _member(self, member: Member) -> None:
        # A separate session: Ctrl-C reaches only the parent, which then stops its children in order.
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *member.argv,
            env=os.environ | member.environment,
            limit=MOST_LINE_BYTES,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes[member.name] = process
        assert process.stdout is not None
        refusal, last, says = "", "", f"tandem {member.argv[0]}: error: "
        async for line in process.stdout:
            said = Text.from_ansi(line.decode(errors="replace").rstrip())
            refusal = said.plain.removeprefix(says) if said.plain.startswith(says) else refusal
            last = said.plain if said.plain and not ROUTINE.match(said.plain) else last
            self._screen.line(member.name, said)
        status = await process.wait()
        if not self._stopping.is_set():
            self._stopping.set()  # only the first exit is reported
            self._status = max(status, 1)  # negative after a signal
            where = "" if self._screen.log is None else f"; log: {self._screen.log.name}"
            reason = refusal or _ending(status, last)
            sys.stderr.write(f"{self._prog}: error: {member.name}: {reason}; stopping{where}\n")

    async def _announce(self) -> None:
        # The certificate is not verified: it belongs to our own child and names the host that clients use.
        connector = aiohttp.TCPConnector(ssl=False)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for member in self._members:
                tasks.create_task(self._wait_ready(member.name, session, member.url))
        last = self._members[-1]
        self._screen.banner(last.url, has_page=last.argv[0] == "lb")

    async def _wait_ready(self, name: str, session: aiohttp.ClientSession, url: str) -> None:
        while not await _is_healthy(session, url):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(HEALTH_INTERVAL_S)
        self._screen.ready(name)

    async def _stop(self) -> None:
        """Terminate the last process, then the others, so that no request meets a stopped node; kill what stays."""
        self._stopping.set()
        began_s = time.monotonic()
        last = self._processes.get(self._members[-1].name)
        try:
            async with asyncio.timeout(self._drain_s + STOP_GRACE_S):
                for processes in (
                    [last] if last is not None else [],
                    list(self._processes.values()),
                ):
                    await _ended(processes)
        except TimeoutError:
            self._screen.note("Not all processes ended in time: killed")
            self._kill()
        if not self._status:
            self._screen.note(f"Stopped after {time.monotonic() - began_s:.1f} s.")

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()


def _ending(status: int, last: str) -> str:
    """Return how a process ended, with the last line that it wrote beyond its routine."""
    how = (
        f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    )
    return f"{how}: {last}" if last else how


async def _ended(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
    await asyncio.gather(*(process.wait() for process in processes))


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
