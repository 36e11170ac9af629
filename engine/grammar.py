"""Decides which tokens a grammar allows next: the grammar state of each request and the masks of a batch.

How a grammar interacts with the other stopping rules:

- End-of-sequence ids are allowed exactly where the text may end. One of them terminates the grammar. Only
  such ids are allowed after it, so `ignore_eos` generates nothing else up to the length limit.
- `stop_token_ids` that the grammar does not allow are never sampled; the others end generation early.
- The grammar overrides `min_new_tokens`: the text may end wherever the grammar allows it.
- A state in which no token of the vocabulary is allowed counts as the grammar's end.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import xgrammar

from tandem.engine.errors import GrammarViolated


class GrammarState:
    """The position of one request's text in its grammar. Any number of states may share a compiled grammar.

    Args:
        sent: Token ids generated so far, on any node and in any attempt.

    Attributes:
        is_terminated: Whether an end of sequence was accepted.

    Raises:
        GrammarViolated: `sent` does not follow the grammar.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, sent: Iterable[int] = ()) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = compiled.tokenizer_info.vocab_size
        self._eos_token_ids = frozenset(self.matcher.stop_token_ids)
        self._num_accepted = 0
        self._is_dead_end = False
        self.is_terminated = False
        for token in sent:
            self.accept(token)

    def accept(self, token_id: int) -> None:
        """Advance by one token. Must not be called while a mask of this state is being filled.

        Raises:
            GrammarViolated: The token is not allowed here.
        """
        if token_id in self._eos_token_ids:
            is_allowed = self.is_terminated or self.is_complete
            self.is_terminated = self.is_terminated or is_allowed
        else:
            is_allowed = not self.is_terminated and self.matcher.accept_token(token_id)
        if not is_allowed:
            raise GrammarViolated(token_id, self._num_accepted)
        self._num_accepted += 1

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        if not self._is_dead_end and not self.matcher.is_completed():
            # Filling the mask detects a dead end; during a replay no mask has been filled yet.
            self.fill(xgrammar.allocate_token_bitmask(1, self._vocab_size), 0)
        return self._is_dead_end or self.matcher.is_completed()

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Write the mask of the allowed tokens into one row of `masks`, int32 on the CPU."""
        if not self.is_terminated:
            self.matcher.fill_next_token_bitmask(masks, row)
        _clear_tail(masks[row : row + 1], self._vocab_size)
        self.settle(masks[row])

    def settle(self, mask: torch.Tensor) -> None:
        """Make a filled row allow only end-of-sequence ids if the grammar has ended or is at a dead end."""
        if not self.is_terminated:
            if mask.any():
                return
            self._is_dead_end = True
        mask.zero_()
        for token in self._eos_token_ids:
            mask.numpy().view(np.uint8)[token >> 3] |= 1 << (token & 7)


class GrammarMasks:
    """Fills the masks of a batch on its own thread while the forward runs."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # One call fills the whole batch on the library's threads; one call per row would reacquire
        # the GIL for each row.
        self._library = xgrammar.BatchGrammarMatcher()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def begin(self, states: Sequence[GrammarState | None]) -> Future[torch.Tensor] | None:
        """Start filling one row for each state; a state of None allows every token.

        The states must not change before the result is available.

        Returns:
            None if no row has a grammar; otherwise the masks in xgrammar's format, on the CPU.
        """
        if not any(state is not None for state in states):
            return None
        return self._thread.submit(self._fill, list(states))

    def _fill(self, states: list[GrammarState | None]) -> torch.Tensor:
        masks = xgrammar.allocate_token_bitmask(len(states), self._vocab_size)
        rows = [(row, state) for row, state in enumerate(states) if state is not None]
        live = [(row, state) for row, state in rows if not state.is_terminated]
        if live:
            self._library.batch_fill_next_token_bitmask(
                [state.matcher for _, state in live], masks, [row for row, _ in live]
            )
        _clear_tail(masks, self._vocab_size)
        is_empty = (masks == 0).all(dim=1).tolist()
        for row, state in rows:
            if state.is_terminated or is_empty[row]:
                state.settle(masks[row])
        return masks


def _clear_tail(masks: torch.Tensor, vocab_size: int) -> None:
    """Clear the bits beyond the vocabulary, which the library does not touch."""
    if vocab_size % 32:
        masks[:, -1] &= (1 << vocab_size % 32) - 1
