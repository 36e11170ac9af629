"""What can be seen while a load runs: a bar on a terminal, elsewhere a line now and then, on standard error."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from tandem.bench.records import UNFINISHED, Progress

# Tokens "now" are those of so long.
WINDOW_S = 2.0
LINE_EVERY_S = 5.0


class Watch:
    """What clients have told of one load so far.

    Args:
        num_requests: That will be sent.
        start_s: When it began, on the clock of the times given later.
    """

    def __init__(self, num_requests: int, start_s: float) -> None:
        self.num_requests = num_requests
        self.num_done = self.num_failed = 0
        self._start_s = start_s
        self._running: dict[int, int] = {}
        self._first_token_s: list[float] = []
        self._gap_s, self._num_gaps = 0.0, 0
        self._recent = deque([(start_s, 0)])

    def take(self, client: int, progress: Progress, now_s: float) -> None:
        """Take what a client told."""
        self._running[client] = progress.num_running
        self._first_token_s += progress.first_token_s
        self._gap_s += progress.gap_s
        self._num_gaps += progress.num_gaps
        self.num_done += sum(not sample.failure for sample in progress.samples)
        self.num_failed += sum(s.failure not in ("", UNFINISHED) for s in progress.samples)
        self._recent.append((now_s, progress.num_tokens))
        while self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()

    def line(self, now_s: float) -> str:
        """Return it as one line."""
        ended = self.num_done + self.num_failed
        window_s = min(WINDOW_S, now_s - self._start_s)
        speed = sum(tokens for _, tokens in self._recent) / window_s if window_s > 0 else 0.0
        parts = [
            f"{ended}/{self.num_requests} done",
            f"{sum(self._running.values())} running",
            f"{self.num_failed} failed",
            f"{speed:,.0f} tokens/s",
        ]
        if self._first_token_s:
            parts.append(f"TTFT {statistics.median(self._first_token_s) * 1000:,.0f} ms")
        if self._num_gaps:
            parts.append(f"ITL {self._gap_s / self._num_gaps * 1000:,.1f} ms")
        if ended:
            left_s = (now_s - self._start_s) / ended * (self.num_requests - ended)
            parts.append(f"{left_s:,.0f} s left")
        return " · ".join(parts)


@contextmanager
def watching(name: str, num_requests: int) -> Iterator[Callable[[int, Progress], None]]:
    """Show a load; give what is to be called with what its clients tell."""
    console = Console(stderr=True, markup=False, highlight=False)
    watch = Watch(num_requests, time.monotonic())
    if console.is_terminal:
        with Bar(TextColumn(name), BarColumn(24), TextColumn("{task.description}")) as bar:
            task = bar.add_task("starting", total=num_requests)

            def draw(client: int, progress: Progress) -> None:
                watch.take(client, progress, now_s := time.monotonic())
                ended = watch.num_done + watch.num_failed
                bar.update(task, completed=ended, description=watch.line(now_s))

            yield draw
        return
    last_s = time.monotonic()

    def write(client: int, progress: Progress) -> None:
        nonlocal last_s
        watch.take(client, progress, now_s := time.monotonic())
        if now_s - last_s >= LINE_EVERY_S:
            last_s = now_s
            console.print(f"{name}: {watch.line(now_s)}", soft_wrap=True)

    yield write
