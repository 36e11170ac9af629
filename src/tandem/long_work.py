"""Shows the progress of long work on standard error: a bar on a terminal, elsewhere a line every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 5.0

Advance = Callable[[int, str], None]
"""Called with how many steps are done, and a few words on the one that comes."""


@contextmanager
def counted(name: str, total: int | None) -> Iterator[Advance]:
    """Show the progress of `total` steps (None: unknown) while the block runs.

    Args:
        name: The label of the work.
    """
    console = Console(stderr=True, markup=False, highlight=False)
    if console.is_terminal:
        columns = (TextColumn(name), BarColumn(24), TimeElapsedColumn())
        with Bar(
            *columns, TextColumn("{task.description}"), console=console, transient=True
        ) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, words: bar.update(task, completed=done, description=words)
        return
    last_s = time.monotonic()

    def write(done: int, words: str) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= LINE_EVERY_S:
            last_s = now_s
            so_far = f"{done}/{total}" if total else f"{done}"
            console.print(f"{name}: {so_far} · {words}", soft_wrap=True)

    yield write
