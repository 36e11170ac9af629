"""What can be seen while a batch runs: a bar on a terminal, elsewhere a line now and then, on standard error."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from tandem.batch.servers import Server
from tandem.batch.values import BatchResult, Totals

# Rates are of so long, so that they follow a cluster that grows.
WINDOW_S = 30.0
DRAW_EVERY_S = 0.5
LINE_EVERY_S = 10.0


class Progress:
    """How far a batch is.

    Args:
        num_requests: Of the whole file.
        num_before: That were done when it began.
        start_s: When it began, on the clock of the times given later.
    """

    def __init__(self, num_requests: int, num_before: int, start_s: float) -> None:
        self.num_requests, self.num_done = num_requests, num_before
        self.num_failed = self.num_tokens = 0
        self._marks = deque([(start_s, num_before, 0)])

    def take(self, result: BatchResult) -> None:
        """Count a result."""
        self.num_done += 1
        self.num_failed += not result.is_ok
        self.num_tokens += result.told.output_tokens

    def line(self, in_flight: int, servers: Iterable[Server], now_s: float) -> str:
        """Return it as one line."""
        while len(self._marks) > 1 and self._marks[1][0] <= now_s - WINDOW_S:
            self._marks.popleft()
        since_s, done, tokens = self._marks[0]
        past_s = max(now_s - since_s, 1e-3)
        rate, speed = (self.num_done - done) / past_s, (self.num_tokens - tokens) / past_s
        self._marks.append((now_s, self.num_done, self.num_tokens))
        parts = [
            f"{self.num_done}/{self.num_requests} done",
            f"{self.num_failed} failed",
            f"{in_flight} in flight",
            f"{rate:,.1f}/s",
            f"{speed:,.0f} tokens/s",
        ]
        if rate:
            parts.append(f"{span((self.num_requests - self.num_done) / rate)} left")
        parts += [f"{server.url} {server.problem}" for server in servers if server.problem]
        return " · ".join(parts)


def span(seconds: float) -> str:
    """Return a time in the units that people have for it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@asynccontextmanager
async def shown(progress: Progress, line: Callable[[], str]) -> AsyncIterator[None]:
    """Show a batch while this is open."""
    console = Console(stderr=True, markup=False, highlight=False)
    bar = Bar(BarColumn(24), TextColumn("{task.description}"), console=console, auto_refresh=False)
    task = bar.add_task("", total=progress.num_requests or None)

    def draw() -> None:
        bar.update(task, completed=progress.num_done, description=line(), refresh=True)

    async def show() -> None:
        while True:
            await asyncio.sleep(DRAW_EVERY_S if console.is_terminal else LINE_EVERY_S)
            if console.is_terminal:
                draw()
            else:
                console.print(line(), soft_wrap=True)

    showing = asyncio.create_task(show())
    try:
        if console.is_terminal:
            with bar:
                yield
                draw()
        else:
            yield
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


def summary(totals: Totals, took_s: float, num_now: int) -> str:
    """Return what came of the whole file.

    Args:
        took_s: By this command.
        num_now: Requests that it did; others were done before.
    """
    said = f"{totals.num_ok + totals.num_failed} requests: {totals.num_ok} succeeded, {totals.num_failed} failed"
    if totals.failures:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in totals.failures.most_common(5))
        said += f" ({kinds})"
    return (
        f"{said}; {totals.prompt_tokens:,} prompt tokens, {totals.output_tokens:,} generated; "
        f"{num_now} of them now, in {span(took_s)}"
    )


def started() -> float:
    """Return the time that `Progress` is told of."""
    return time.monotonic()
