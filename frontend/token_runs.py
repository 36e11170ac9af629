"""Ordinary tokens of several steps that arrived together, as one run for each stream. Pure."""

from collections.abc import Iterable, Iterator

from typing_extensions import override

Run = tuple[int, int, list[int]]
"""Stream, index of the first, ids."""


class Runs:
    """Ordinary tokens of several steps, one run for each stream."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}

    @override
    def __repr__(self) -> str:
        return f"<Runs of {len(self._runs)} streams>"

    def add(self, columns: Iterable[tuple[int, int, int]]) -> Iterator[Run]:
        """Take one step; yield the runs that it does not continue."""
        for number, index, token_id in columns:
            run = self._runs.get(number)
            if run is not None and run[1] + len(run[2]) == index:
                run[2].append(token_id)
            else:
                self._runs[number] = (number, index, [token_id])
                if run is not None:
                    yield run

    def take(self, number: int) -> Iterator[Run]:
        """Yield the run of one stream, if there is one, and forget it."""
        if (run := self._runs.pop(number, None)) is not None:
            yield run

    def take_all(self) -> Iterable[Run]:
        """Return every run."""
        return self._runs.values()
