"""Whether a node fails what it is given. One that does so again and again is put aside for a while.

```
 in use ──3 failures in a row──▶ aside, 5 s ──▶ tried again ──one more──▶ aside, 10 s ... 60 s ──▶ ...
    ▲                               │               │
    └──────── a request that ends well ─────────────┘        (where no other node is left)
```

A node that fails at once has nothing to do, and by its load would be given every request.
"""

from typing_extensions import override

from tandem.wire.errors import EngineFailed, KVCorrupted, TandemError, TransferFailed

# Faults of a node, by their codes: not of a request, of the other node, or of a link that broke.
_FAULTS = frozenset({EngineFailed.code, TransferFailed.code, KVCorrupted.code})
# A request that breaks a step once, and its replay on the same node, are no reason.
_MOST_IN_A_ROW = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 5.0, 60.0


class Standing:
    """How one life of a node fares.

    Attributes:
        num_failed: Failures that were counted, ever.
        num_in_a_row: Since the last request that ended well.
        pause_s: For how long it was last put aside.
    """

    def __init__(self) -> None:
        self.num_failed = self.num_in_a_row = 0
        self.pause_s = 0.0
        self._aside_until_s = 0.0

    @override
    def __repr__(self) -> str:
        return f"Standing(num_in_a_row={self.num_in_a_row}, pause_s={self.pause_s})"

    def failed(self, error: TandemError, num_failed_before: int, now_s: float) -> bool:
        """Count a request that failed; return whether the node is put aside for that.

        Args:
            num_failed_before: `num_failed` when the request began. One that ran as another failed may have
                failed with it, in the same step, and is not counted.
        """
        if error.code not in _FAULTS or num_failed_before != self.num_failed:
            return False
        self.num_failed += 1
        self.num_in_a_row += 1
        if self.num_in_a_row < _MOST_IN_A_ROW:
            return False
        self.pause_s = min(max(2 * self.pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
        self._aside_until_s = now_s + self.pause_s
        return True

    def served(self) -> None:
        """Count a request that ended well."""
        self.num_in_a_row, self.pause_s = 0, 0.0

    def is_aside(self, now_s: float) -> bool:
        """Tell whether other nodes are to be preferred now."""
        return self.num_in_a_row >= _MOST_IN_A_ROW and now_s < self._aside_until_s
