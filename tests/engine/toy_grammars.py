"""Grammars that allow every token, and whose masks arrive when a test lets them."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from tandem.engine.grammar.processes import Constraint, Mask
from tandem.wire.generation import Grammar
from tests.engine.toy_runner import VOCAB

ANY_TOKEN = np.full(-(-VOCAB // 32), -1, np.int32)
ANY_TEXT = Grammar(kind="regex", text=".*")


class ToyGrammars:
    """Grammars without processes, for `Engine`.

    Attributes:
        is_held: Whether masks arrive only with `release`.
        held: Masks that have not arrived, in order of request.
        num_woken: How often the engine was woken.
        num_requested: Number of masks that answers requested.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self._numbers = itertools.count()
        self.is_held = False
        self.held: dict[int, Future[Mask]] = {}
        self.num_woken = self.num_requested = 0

    def open(
        self, grammar: Grammar, token_ids: Sequence[int], on_mask: Callable[[], None]
    ) -> Constraint:
        del grammar

        def wake() -> None:
            self.num_woken += 1
            on_mask()

        return Constraint(self, token_ids, wake)

    def release(self, error: Exception | None = None) -> None:
        """Let the oldest held mask arrive, or fail."""
        number = next(iter(self.held))
        _settle(self.held.pop(number), error)

    # ── the interface of a process ───────────────────────────────────────────────────────────────

    def begin(self) -> int:
        return next(self._numbers)

    def end(self, number: int) -> None:
        self.held.pop(number, None)

    def advance(self, number: int, token_ids: Sequence[int]) -> Future[Mask]:
        del token_ids
        self.num_requested += 1
        mask: Future[Mask] = Future()
        if self.is_held:
            self.held[number] = mask
        else:
            _settle(mask, self._error)
        return mask


def _settle(mask: Future[Mask], error: Exception | None) -> None:
    if error is None:
        mask.set_result(ANY_TOKEN)
    else:
        mask.set_exception(error)
