"""Some cells of the fault matrix, of every row and every column, on one cluster of real processes."""

import asyncio
import sys

import pytest

from tests.faults.cells import EMPTY, FAULTS, STAGES, TARGETS, Cell, all_cells
from tests.faults.matrix import run_cells, why_not
from tests.faults.results import summary
from tests.faults.streams import Verdict, compare
from tests.patience import PATIENCE_S

# As short as it is noticed all the same: the whole matrix is run by `python -m tests.faults.matrix`.
DURATIONS_S = {
    "SIGSTOP": 4.0,
    "network cut": 4.0,
    "delay and loss": 3.0,
    "disk full": 2.0,
    "out of pages": 3.0,
}
CELLS = [
    Cell("edge worker", "SIGKILL", "streaming"),
    Cell("edge worker", "SIGSTOP", "decoding"),
    Cell("router", "SIGKILL", "pushing"),
    Cell("router", "network cut", "streaming"),
    Cell("router", "disk full", "landed"),
    Cell("prefill", "SIGKILL", "prefilling"),
    Cell("prefill", "SIGSTOP", "pushing"),
    Cell("prefill", "network cut", "waiting"),
    Cell("prefill", "memory limit", "idle"),
    Cell("decode", "SIGKILL", "landed"),
    Cell("decode", "SIGTERM", "streaming"),
    Cell("decode", "restart", "pushing"),
    Cell("decode", "network cut", "pushing"),
    Cell("decode", "delay and loss", "decoding"),
    Cell("decode", "out of pages", "streaming"),
    Cell("engine process", "SIGKILL", "decoding"),
]
# 2 s of silence, and room for a machine that stands still: it is the page of the whole matrix that tells how
# long it takes.
NOTICED_WITHIN_MS = 1000 * PATIENCE_S


def run(cells, directory) -> list:
    results: list = []

    def keep(result) -> None:
        results.append(result)
        sys.stdout.write(f"{summary(result)}\n")

    asyncio.run(run_cells(iter(cells), directory, keep, DURATIONS_S))
    return results


def check(result) -> None:
    line = summary(result)
    assert not result.not_run, line
    assert result.is_nothing_lost, line
    assert result.num_right + result.broken == result.num_requests, line
    if Cell(result.target, result.fault, result.stage).must_be_noticed:
        assert result.noticed_ms is not None, line
        assert result.noticed_ms < NOTICED_WITHIN_MS, line


@pytest.mark.slow
def test_nothing_is_lost_whoever_is_hurt_however_and_at_whatever_stage(tmp_path, capsys):
    cells = [cell for cell in CELLS if not why_not(cell)]
    with capsys.disabled():
        for cell in set(CELLS) - set(cells):
            sys.stdout.write(f"\nnot run: {cell}: {why_not(cell)}")
        sys.stdout.write("\n")
        results = run(cells, tmp_path)
    for result in results:
        check(result)
    assert len(results) == len(cells)


def test_every_row_column_and_stage_is_in_the_selection():
    # Ranks are killed in tests/e2e/test_tensor_parallel.py: a second cluster of models for one cell costs a minute.
    assert {cell.target for cell in CELLS} == set(TARGETS) - {"TP rank"}
    assert {cell.fault for cell in CELLS} == set(FAULTS)
    assert {cell.stage for cell in CELLS} == set(STAGES)
    assert set(CELLS) <= set(all_cells())


def test_every_cell_is_run_or_says_why_it_is_empty():
    num_tried = len(list(all_cells()))
    assert num_tried + len(EMPTY) * len(STAGES) == len(TARGETS) * len(FAULTS) * len(STAGES)


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        ([1, 2, 3, 4, 5, 6], Verdict()),
        ([1, 2, 3, 4], Verdict(lost=2)),
        ([1, 2, 5, 6], Verdict(lost=2)),
        ([1, 2, 3, 2, 3, 4, 5, 6], Verdict(repeated=2)),
        ([1, 2, 3, 9, 8, 7], Verdict(wrong=3)),
        ([1, 2, 3, 4, 5, 6, 7], Verdict(wrong=1)),
    ],
)
def test_what_became_of_tokens_is_told_from_those_that_came(got, verdict):
    assert compare(got, [1, 2, 3, 4, 5, 6]) == verdict
