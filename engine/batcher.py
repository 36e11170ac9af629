"""Which prompt tokens the next forward computes. Pure.

Every decoding request gets its one token; what is computed of prompts is bounded, first come first
served, so that a long prompt never makes the running requests wait longer than one chunk.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.engine.request import ActiveRequest

# Rows of a prompt whose log-probabilities are wanted each give a row of logits over the vocabulary:
# of a vocabulary of 128k, 256 such rows are 128 MiB in float32.
MAX_LOGPROB_ROWS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` uncomputed tokens of one prompt.

    Attributes:
        is_last: Whether the request's next token can be sampled after it.
    """

    request: ActiveRequest
    num_tokens: int
    is_last: bool


def next_chunks(
    prompts: Iterable[ActiveRequest], budget: int, new_budget: int | None = None
) -> list[Chunk]:
    """Choose the prompt tokens of one forward.

    Args:
        prompts: Running requests whose prompt is not computed, first come first.
        budget: Tokens at most.
        new_budget: Of these, tokens at most of requests without an answer yet; None: all. One that was
            retracted in its answer has a client who already waits for the next token.

    Returns:
        Chunks with at least one token each, in the order given; empty when nothing is to do.
    """
    chunks = []
    new_budget = budget if new_budget is None else new_budget
    for request in prompts:
        is_new = len(request.token_ids) == request.num_prompt
        num_tokens = min(request.num_uncomputed, budget, new_budget if is_new else budget)
        wanted = request.request.logprobs
        if wanted is not None and wanted.prompt_start >= 0:
            num_tokens = min(num_tokens, MAX_LOGPROB_ROWS)
        if not num_tokens:
            continue
        chunks.append(Chunk(request, num_tokens, num_tokens == request.num_uncomputed))
        budget -= num_tokens
        new_budget -= num_tokens if is_new else 0
    return chunks
