"""Counters that only rise, looked at from time to time: how fast they rise, and by how much they have. No clock."""

from collections import deque
from collections.abc import Collection, Sequence

from typing_extensions import override

Values = tuple[float, ...]


class Counters:
    """The last `span_s` of rows of counters, each under a key.

    A counter that falls began anew with its process: what was seen of the row before is forgotten.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._rows: dict[str, deque[tuple[float, Values]]] = {}

    @override
    def __repr__(self) -> str:
        return f"<Counters of {len(self._rows)} over {self._span_s:g} s>"

    def note(self, key: str, now: float, values: Sequence[float]) -> None:
        """Note a row as it is at `now`, which never falls. All rows of one key are of one length."""
        row, seen = self._rows.setdefault(key, deque()), tuple(values)
        if row and any(new < old for new, old in zip(seen, row[-1][1], strict=True)):
            row.clear()
        row.append((now, seen))
        # One at the beginning of the span, or before it, stays: the difference is to that.
        while len(row) > 1 and row[1][0] <= now - self._span_s:
            row.popleft()

    def keep(self, keys: Collection[str]) -> None:
        """Forget the rows of all other keys."""
        for key in self._rows.keys() - set(keys):
            del self._rows[key]

    def grown(self, key: str) -> Values:
        """Return by how much each counter of a row rose in the span; nothing of an unknown one."""
        row = self._rows.get(key)
        if not row:
            return ()
        return tuple(new - old for new, old in zip(row[-1][1], row[0][1], strict=True))

    def per_second(self, key: str) -> Values:
        """Return how fast each counter of a row rises."""
        row = self._rows.get(key)
        past_s = row[-1][0] - row[0][0] if row else 0.0
        return tuple(value / past_s if past_s else 0.0 for value in self.grown(key))
