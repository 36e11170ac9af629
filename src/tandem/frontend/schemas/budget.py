"""The work that the schemas of one request may cost."""

from typing import Final

# A step takes about a microsecond.
MAX_STEPS: Final = 700_000


class BudgetSpent(Exception):
    """The schemas of a request cost more than they may. `rewriting` names the place."""


class Budget:
    """Counts the steps of a request. Every loop whose length a client controls spends some, and so does each copy."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._num_left = steps

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            BudgetSpent: No steps are left.
        """
        self._num_left -= steps
        if self._num_left < 0:
            raise BudgetSpent
