"""Run the fault matrix, keep what came of each cell, write the page.

    python -m tests.faults.matrix                                  all cells that are not done yet
    python -m tests.faults.matrix --only target=decode,fault=SIGKILL
    python -m tests.faults.matrix --write docs/fault-matrix.md     the same, then the page

Cells wait more than they compute: `--lanes` of them run at a time, each on a cluster of its own. Results are JSON
lines in `--results`, one a cell; a run that was cut off goes on where it was.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

from tests.faults.cells import FAULTS, STAGES, TARGETS, Cell, all_cells
from tests.faults.hurts import has_memory_limit
from tests.faults.network import has_network
from tests.faults.page import write_page
from tests.faults.results import Result, summary
from tests.faults.rig import RANKED, Rig, running_rig
from tests.faults.streams import Arithmetic, Measured
from tests.faults.trial import StageMissed, Trials

RESULTS = Path(tempfile.gettempdir()) / "tandem-fault-matrix.jsonl"


def why_not(cell: Cell) -> str:
    """Say why a cell cannot be run on this machine; empty when it can."""
    if cell.needs_network and not has_network():
        return "needs root and TUN devices"
    if cell.fault == "disk full" and os.geteuid() != 0:
        return "needs root, to mount a disk"
    if cell.fault == "memory limit" and not has_memory_limit():
        return "needs a memory cgroup that it may write to"
    return ""


async def run_cells(
    cells: Iterator[Cell], directory: Path, keep, durations: dict[str, float] | None = None
) -> None:
    """Run cells one after the other; those of one kind share a cluster. `keep` gets each result."""
    cell = next(cells, None)
    for number in itertools.count():
        if cell is None:
            return
        home = directory / str(number)
        home.mkdir()
        has_ranks, is_well = cell.needs_ranks, True
        async with _rig_of(cell, home) as rig:
            oracle = Measured() if has_ranks else Arithmetic(str(rig.model_dir))
            trials = Trials(rig, oracle, durations or {})
            while is_well and cell is not None and cell.needs_ranks == has_ranks:
                result = await _try(trials, cell)
                keep(result)
                is_well = "did not heal" not in result.errors
                cell = next(cells, None)


def _rig_of(cell: Cell, directory: Path) -> AbstractAsyncContextManager[Rig]:
    if not cell.needs_ranks:
        return running_rig(directory)
    from tests.tiny_models import make_tiny_model  # torch takes a second to import

    model = directory / "tiny"
    model.mkdir()
    make_tiny_model("qwen3", model)
    return running_rig(
        directory,
        flags=RANKED,
        model_dir=model,
        prefills=1,
        decode_flags=("--tp", "2"),
        is_networked=False,
    )


async def _try(trials: Trials, cell: Cell) -> Result:
    try:
        return await trials.run(cell)
    except StageMissed as missed:
        return Result(cell.target, cell.fault, cell.stage, not_run=str(missed))


def read_results(file: Path) -> dict[Cell, dict]:
    """Return the results so far, the last of each cell."""
    lines = file.read_text().splitlines() if file.exists() else []
    results = [json.loads(line) for line in lines]
    return {Cell(r["target"], r["fault"], r["stage"]): r for r in results}


def selected(cells: Iterable[Cell], only: str) -> list[Cell]:
    """Return the cells that `target=...,fault=...,stage=...` names.

    Raises:
        ValueError: It names what there is not.
    """
    known = {"target": TARGETS, "fault": FAULTS, "stage": STAGES}
    wanted = dict(part.partition("=")[::2] for part in only.split(",") if part)
    for key, value in wanted.items():
        if value not in known.get(key, ()):
            choices = "; ".join(f"{name}={' | '.join(of)}" for name, of in known.items())
            raise ValueError(f"--only {key}={value}: give some of {choices}")
    return [
        cell for cell in cells if all(getattr(cell, key) == value for key, value in wanted.items())
    ]


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_lane(waiting: "Queue[Cell | None]", results: Connection) -> None:
    """Run cells in a process and on a cluster of its own, until the queue is at its end."""

    def cells() -> Iterator[Cell]:
        parent = multiprocessing.parent_process()
        while parent is not None and parent.is_alive() and (cell := waiting.get()) is not None:
            yield cell

    with (
        contextlib.suppress(asyncio.CancelledError),  # terminated: the rig has ended its cluster
        tempfile.TemporaryDirectory(prefix="tandem-faults-") as directory,
    ):
        asyncio.run(run_cells(cells(), Path(directory), results.send))


def run_lanes(cells: Sequence[Cell], num_lanes: int, keep: Callable[[Result], None]) -> bool:
    """Run cells, so many at a time; return whether every lane reached the end of the queue."""
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    waiting.cancel_join_thread()  # what a cut-off run has left there is in nobody's way
    for cell in (*cells, *[None] * num_lanes):
        waiting.put(cell)
    # Terminated, this process ends its lanes below, and each of them its cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    lanes, receivers = list[BaseProcess](), list[Connection]()
    try:
        for _ in range(min(num_lanes, len(cells))):
            receiver, sender = context.Pipe(duplex=False)
            lanes.append(context.Process(target=run_lane, args=(waiting, sender)))
            receivers.append(receiver)
            lanes[-1].start()
            sender.close()  # so that the lane's end is the pipe's
        while receivers:
            ready = connection.wait(receivers)
            for receiver in [each for each in receivers if each in ready]:
                try:
                    keep(receiver.recv())
                except EOFError:
                    receivers.remove(receiver)
    except BaseException:
        for lane in lanes:
            lane.terminate()
        raise
    finally:
        for lane in lanes:
            lane.join()
    return not any(lane.exitcode for lane in lanes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status: 1 when a cell lost, repeated or leaked something."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.matrix", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--only", default="", metavar="KEY=VALUE,...", help="of target, fault and stage")
    add("--results", type=Path, default=RESULTS, metavar="FILE")
    add("--lanes", type=int, default=2, metavar="N", help="cells run at a time (default: 2)")
    add("--write", type=Path, default=None, metavar="PAGE", help="write the page at the end")
    add("--again", action="store_true", help="run cells that have a result, too")
    args = parser.parse_args(argv)
    done = {} if args.again else read_results(args.results)
    try:
        cells = [cell for cell in selected(all_cells(), args.only) if cell not in done]
    except ValueError as error:
        parser.error(str(error))
    begun, num_bad = time.monotonic(), 0

    def keep(result: Result) -> None:
        nonlocal num_bad
        num_bad += not (result.is_nothing_lost or result.not_run)
        with args.results.open("a") as file:
            file.write(json.dumps(result.as_json()) + "\n")
        tell(f"{time.monotonic() - begun:6.0f} s  {summary(result)}")

    runnable = [cell for cell in cells if not why_not(cell)]
    for cell in cells:
        if why := why_not(cell):
            keep(Result(cell.target, cell.fault, cell.stage, not_run=why))
    is_complete = run_lanes(runnable, args.lanes, keep)
    if args.write is not None:
        write_page(args.write, read_results(args.results))
        tell(f"wrote {args.write}")
    return int(num_bad > 0 or not is_complete)


if __name__ == "__main__":
    sys.exit(main())
