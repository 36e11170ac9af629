"""Which tokens the next forward computes. Pure.

Every decoding request gets its one token; what is left of the budget goes to prompts, first come
first served, so that a long prompt never makes the running requests wait longer than one chunk.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import ActiveRequest


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `num_tokens` uncomputed tokens of one request."""

    request: ActiveRequest
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the request's next token can be sampled after this."""
        return self.num_tokens == self.request.num_uncomputed


def next_batch(running: Iterable[ActiveRequest], prompt_budget: int) -> list[Slice]:
    """Choose the tokens of one forward.

    Args:
        running: Requests with pages, oldest first.
        prompt_budget: Prompt tokens at most. Decoding requests do not count towards it: they are
            bounded by `max_running_requests`.

    Returns:
        Slices with at least one token each, in the order given; empty when nothing is to do.
    """
    batch = []
    for request in running:
        wanted = request.num_uncomputed
        if wanted > 1 or request.num_computed < request.num_prompt:
            wanted = min(wanted, prompt_budget)
            prompt_budget -= wanted
        if wanted:
            batch.append(Slice(request, wanted))
    return batch
