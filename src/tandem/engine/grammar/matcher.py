"""The grammar state of each answer, and its mask of allowed tokens. Only grammar processes (`host.py`) use these.

Grammars interact with other stopping rules as follows:

- End-of-sequence ids are allowed exactly where the text may end. One of them terminates the grammar. After that
  only such ids are allowed, so `ignore_eos` generates nothing else up to the length limit.
- `stop_token_ids` that the grammar does not allow are never sampled; others end generation early.
- The grammar overrides `min_new_tokens`: the text may end wherever the grammar allows it.
- A state that allows no token of the vocabulary counts as the end of the grammar.
"""

import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xgrammar

from tandem.engine.errors import GrammarViolated

_MAX_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class GrammarState:
    """The position of a request's text in its grammar. States may share a compiled grammar.

    Args:
        token_ids: Token ids generated so far, on any node and in any attempt.

    Attributes:
        is_terminated: Whether an end-of-sequence token was accepted.

    Raises:
        GrammarViolated: `token_ids` does not follow the grammar.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, token_ids: Iterable[int] = ()) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = compiled.tokenizer_info.vocab_size
        self._eos_token_ids = frozenset(self.matcher.stop_token_ids)
        self._num_accepted = 0
        self._is_dead_end = False
        self.is_terminated = False
        for token in token_ids:
            self.accept(token)

    def accept(self, token_id: int) -> None:
        """Advance by one token. This must not be called while a mask of this state is being filled.

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
            # Filling a mask detects a dead end. During a replay no mask has been filled yet.
            self.fill(xgrammar.allocate_token_bitmask(1, self._vocab_size), 0)
        return self._is_dead_end or self.matcher.is_completed()

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Write the mask of allowed tokens to a row of `masks`, int32 on the CPU."""
        if not self.is_terminated:
            self.matcher.fill_next_token_bitmask(masks, row)
        _clear_tail(masks[row : row + 1], self._vocab_size)
        self.restrict_if_ended(masks[row])

    def restrict_if_ended(self, mask: torch.Tensor) -> None:
        """Let a filled row allow only end-of-sequence ids if the grammar has ended or is at a dead end."""
        if not self.is_terminated:
            if mask.any():
                return
            self._is_dead_end = True
        mask.zero_()
        for token in self._eos_token_ids:
            mask.numpy().view(np.uint8)[token >> 3] |= 1 << (token & 7)


class GrammarMasks:
    """Fills the masks of several states on the library's threads."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # By default the library starts a thread for every second core, whose stacks may exceed the memory limit.
        self._library = xgrammar.BatchGrammarMatcher(max_threads=_MAX_THREADS)

    def fill(self, states: Sequence[GrammarState]) -> torch.Tensor:
        """Return a row of allowed tokens for each state, in xgrammar's format, on the CPU."""
        masks = xgrammar.allocate_token_bitmask(len(states), self._vocab_size)
        live = [(row, state) for row, state in enumerate(states) if not state.is_terminated]
        if live:
            self._library.batch_fill_next_token_bitmask(
                [state.matcher for _, state in live], masks, [row for row, _ in live]
            )
        _clear_tail(masks, self._vocab_size)
        is_empty = (masks == 0).all(dim=1).tolist()
        for row, state in enumerate(states):
            if state.is_terminated or is_empty[row]:
                state.restrict_if_ended(masks[row])
        return masks


def _clear_tail(masks: torch.Tensor, vocab_size: int) -> None:
    """Clear the bits beyond the vocabulary, which the library does not touch."""
    if vocab_size % 32:
        masks[:, -1] &= (1 << vocab_size % 32) - 1
