"""The child processes of `tandem up` and `tandem serve`, and their output on the terminal.

```
 start ──all healthy──▶ banner, then only warnings and errors ──Ctrl-C──▶ drain ──Ctrl-C or timeout──▶ kill
```

Each process runs the command that an operator would type, with a JSON log. `tandem.telemetry.log` documents the fields
that are read from it. If one process exits, all stop: part of a cluster is useless.
"""

import asyncio
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TextIO

import aiohttp
import uvloop
import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tandem.settings.flags import error_prefix
from tandem.telemetry.log import (
    MODEL_DOWNLOADING,
    MODEL_RESOLVED,
    LogFormat,
    console_text,
    read_line,
)

COMMAND = (sys.executable, "-P", "-m", "tandem")
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
# Time for a process to exit, in addition to its drain.
STOP_GRACE_S = 10.0
# Limit of a log line. asyncio raises at a longer one, which would stop all processes.
MAX_LINE_BYTES = 1 << 26
# Levels of log lines that the terminal does not show; other output, such as a traceback, is shown.
ROUTINE_LEVELS = {"debug", "info"}
HEALTH_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process to run.

    Attributes:
        name: Name in the log.
        argv: Arguments after `tandem`. The first one is the command.
        settings: Settings of its config file. Secrets go here: `ps` shows arguments.
        url: URL of its HTTP server.
        environment: Variables to add.
    """

    name: str
    argv: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def with_file(self, directory: str) -> "ChildProcess":
        """Write the settings to a file that only this user can read; return the process that reads it."""
        path = Path(directory, f"{self.name}.yaml")
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(yaml.safe_dump(self.settings, sort_keys=False), encoding="utf-8")
        command, *rest = self.argv
        return replace(self, argv=[command, "--config", str(path), *rest])


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line that a process wrote.

    Attributes:
        text: Text to show. A log line with a traceback becomes several lines.
        fields: Fields of a log line; empty for other output.
    """

    text: Text
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_routine(self) -> bool:
        """Whether it is a log line below the level of a warning."""
        return self.fields.get("level") in ROUTINE_LEVELS


def read_output(line: str, log_format: LogFormat) -> OutputLine:
    """Return a line of a process, to be shown in `log_format`; `auto` is `console` here."""
    fields = read_line(line)
    if fields is None:
        return OutputLine(Text.from_ansi(line))
    return OutputLine(Text(line if log_format == "json" else console_text(fields)), fields)


def shown_url(scheme: str, host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server on `host`."""
    shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1") else host
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def activation() -> str:
    """Return the shell command that puts `tandem` on the PATH, to begin a command line; empty if `tandem` is there."""
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which("tandem") or not script.is_file():
        return ""
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return f". {shlex.quote(str(shown))} && "


def run(
    name: str,
    members: Sequence[ChildProcess],
    drain_s: float,
    *,
    is_verbose: bool,
    log_format: LogFormat = "console",
) -> int:
    """Run the processes of `tandem NAME` until a signal or until one exits; return the exit status.

    Args:
        drain_s: Seconds for requests in progress to finish after Ctrl-C.
        is_verbose: Show the log on the terminal instead of writing it to a file.
        log_format: Format in which log lines are shown; the processes write JSON.
    """
    console, names = Console(highlight=False), [each.name for each in members]
    with (
        contextlib.nullcontext() if is_verbose else log_file(name) as log,
        Screen(console, names, log) as screen,
    ):
        processes = Processes(f"tandem {name}", members, screen, drain_s, log_format)
        status: int = uvloop.run(processes.run())
    return status


def log_file(name: str) -> TextIO:
    """Open a new file that only this user can read."""
    fd, path = tempfile.mkstemp(prefix=f"tandem-{name}-", suffix=".log")
    os.close(fd)
    return open(path, "w", buffering=1, encoding="utf-8")


class Screen:
    """The terminal. With a log file it shows the start of each process, and later only warnings and errors.

    Args:
        names: Names of the processes, in the order in which they start.
        log: File for all lines; None: all lines go to the terminal.
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

    def line(self, name: str, line: OutputLine) -> None:
        """Write a process's line to the log file or the terminal."""
        texts = line.text.split("\n", allow_blank=True) or [line.text]
        if self.log is not None:
            for text in texts:
                self.log.write(f"{name:<{self._width}} │ {text.plain}\n")
            if line.is_routine:
                self._show_download(name, line.fields)
                return
        prefix = (f"{name:<{self._width}} │ ", self._colours[name])
        for text in texts:
            self.console.print(Text.assemble(prefix, text), soft_wrap=True)

    def _show_download(self, name: str, fields: Mapping[str, Any]) -> None:
        if fields["event"] == MODEL_DOWNLOADING:
            state = f"downloads: {fields['percent']} %"
        elif fields["event"] == MODEL_RESOLVED:
            state = "starts"
        else:
            return
        row = self._rows[name]
        self._progress.update(row, description=f"{name:<{self._width}} {state}")

    def note(self, sentence: str) -> None:
        """Show a message of this command itself."""
        self._progress.stop()
        self.console.print(Text(sentence), soft_wrap=True)

    def ready(self, name: str) -> None:
        """Show that a process is ready."""
        if self.log is not None:
            self._progress.remove_task(self._rows[name])
            duration_s = time.monotonic() - self._began_s
            self.console.print(f"{name:<{self._width}}   ready after {duration_s:.1f} s")

    def banner(self, url: str, *, has_page: bool) -> None:
        """Show how to use a server that is ready. A router has a web page."""
        self._progress.stop()
        log = "" if self.log is None else f"  log: {self.log.name}\n"
        page = (
            f"  Dashboard: {url} in a browser, or {activation()}tandem top {url}\n"
            if has_page
            else ""
        )
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
        prog: Name of the command, for errors.
        members: Processes in the order in which they start. The last one serves clients and stops first.
        drain_s: Seconds for requests in progress to finish after Ctrl-C.
        log_format: Format in which log lines are shown.
    """

    def __init__(
        self,
        prog: str,
        members: Sequence[ChildProcess],
        screen: Screen,
        drain_s: float,
        log_format: LogFormat = "console",
    ) -> None:
        self._prog, self._members, self._drain_s = prog, members, drain_s
        self._screen, self._log_format = screen, log_format
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Start all processes, announce readiness, wait for a signal or an exit, stop all processes.

        Returns:
            0 after a signal; else the exit status of the first process that exited, at least 1.
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
            self._screen.note("Killed.")
            self._kill()
            return
        self._screen.note(
            f"Stopping: requests in progress finish within {self._drain_s:g} s. Ctrl-C again ends them now."
        )
        self._stopping.set()

    async def _member(self, member: ChildProcess) -> None:
        # A separate session: Ctrl-C reaches only the parent, which then stops its children in order.
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *member.argv,
            env=os.environ | member.environment,
            limit=MAX_LINE_BYTES,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes[member.name] = process
        assert process.stdout is not None
        error, last, prefix = "", "", error_prefix(f"tandem {member.argv[0]}")
        async for data in process.stdout:
            line = read_output(data.decode(errors="replace").rstrip(), self._log_format)
            plain = line.text.plain
            error = plain.removeprefix(prefix) if plain.startswith(prefix) else error
            last = plain.rpartition("\n")[2] if plain and not line.is_routine else last
            self._screen.line(member.name, line)
        status = await process.wait()
        if not self._stopping.is_set():
            self._stopping.set()  # only the first exit is reported
            self._status = max(status, 1)  # negative after a signal
            where = "" if self._screen.log is None else f"; log: {self._screen.log.name}"
            reason = error or _exit_reason(status, last)
            sys.stderr.write(f"{self._prog}: error: {member.name}: {reason}; stopping{where}\n")

    async def _announce(self) -> None:
        # Do not verify the certificate: it belongs to our own child and names the host that clients use.
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
        """Terminate the last process, then the others, so that no request reaches a stopped node; kill after a timeout."""
        self._stopping.set()
        began_s = time.monotonic()
        last = self._processes.get(self._members[-1].name)
        try:
            async with asyncio.timeout(self._drain_s + STOP_GRACE_S):
                for processes in (
                    [last] if last is not None else [],
                    list(self._processes.values()),
                ):
                    await _terminate(processes)
        except TimeoutError:
            self._screen.note("Some processes did not exit in time and were killed.")
            self._kill()
        if not self._status:
            self._screen.note(f"Stopped after {time.monotonic() - began_s:.1f} s.")

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()


def _exit_reason(status: int, last: str) -> str:
    """Return how a process ended, with its last line that was not routine."""
    how = (
        f"killed by {signal.Signals(-status).name}"
        if status < 0
        else f"exited with status {status}"
    )
    return f"{how}: {last}" if last else how


async def _terminate(processes: Sequence[asyncio.subprocess.Process]) -> None:
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
