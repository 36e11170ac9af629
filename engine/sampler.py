"""From logits to tokens: penalties, bias, temperature, top-k, top-p, min-p, seeded draws.

Draws are counter-based: the random number of token `index` of a request is a function of
(seed, index) alone, so it does not depend on the batch, the node or the attempt.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.request import ActiveRequest

NEG_INF = float("-inf")


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) of one token.

    Source: Philox, Salmon et al. 2011, as numpy ships it.
    """
    key = seed & ((1 << 64) - 1)
    return float(np.random.Generator(np.random.Philox(key=key, counter=index)).random())


@torch.inference_mode()
def sample(
    logits: torch.Tensor, requests: Sequence[ActiveRequest], eos_token_ids: frozenset[int]
) -> list[int]:
    """Choose the next token of each request.

    Args:
        logits: Shape (num_requests, vocab_size). May be changed.
        requests: One for each row.
        eos_token_ids: Not chosen before `min_new_tokens`.

    Returns:
        One token id for each row.
    """
    logits = logits.float()
    for row, request in enumerate(requests):
        if _needs_adjusting(request):
            logits[row] = _adjusted(logits[row].clone(), request, eos_token_ids)
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, r in enumerate(requests) if r.request.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(logits[rows], [requests[row] for row in drawn])
    return tokens.tolist()


def _needs_adjusting(request: ActiveRequest) -> bool:
    p = request.request.sampling
    return bool(
        p.logit_bias
        or p.frequency_penalty
        or p.presence_penalty
        or p.repetition_penalty != 1.0
        or request.next_index < p.min_new_tokens
    )


def _adjusted(
    row: torch.Tensor, request: ActiveRequest, eos_token_ids: frozenset[int]
) -> torch.Tensor:
    """Apply penalties, bias and the ban on early ends to one row. Shape (vocab_size,)."""
    p = request.request.sampling
    if p.repetition_penalty != 1.0:  # over prompt and output, as in Keskar et al. 2019
        seen = torch.tensor(list(set(request.token_ids)), device=row.device)
        scores = row[seen]
        row[seen] = torch.where(
            scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty
        )
    if (p.frequency_penalty or p.presence_penalty) and request.output_ids:
        ids, counts = np.unique(np.asarray(request.output_ids), return_counts=True)
        penalty = p.frequency_penalty * counts + p.presence_penalty
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(penalty).to(row)
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if request.next_index < p.min_new_tokens:
        banned = eos_token_ids | set(p.stop_token_ids)
        row[[token for token in sorted(banned) if 0 <= token < len(row)]] = NEG_INF
    return row


def _draw(logits: torch.Tensor, requests: Sequence[ActiveRequest]) -> torch.Tensor:
    """Draw one token for each row by inverting the distribution's sum at `uniform(seed, index)`.

    Args:
        logits: Shape (num_rows, vocab_size).

    Returns:
        Token ids, shape (num_rows,).
    """
    params = [r.request.sampling for r in requests]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float64).unsqueeze(1)

    logits = logits / column([p.temperature for p in params]).float()
    if any(p.top_k > 0 for p in params) or any(p.top_p < 1 for p in params):
        vocab_size = logits.shape[1]
        top_k = column([p.top_k if p.top_k > 0 else vocab_size for p in params])
        logits = _keep_top(logits, top_k, column([p.top_p for p in params]))
    probs = logits.softmax(dim=-1)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]).float() * probs.max(dim=-1, keepdim=True).values
        probs = probs.where(probs >= floor, 0.0)
    # Summed in float64 and vocabulary order: equal draws whatever else is in the batch.
    sums = probs.double().cumsum(dim=-1)
    target = column([uniform(r.seed, r.next_index) for r in requests]) * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def _keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` largest, then all past a mass of `top_p`. Columns (num_rows, 1)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, NEG_INF)
    probs = ordered.softmax(dim=-1).double()
    mass_before = probs.cumsum(dim=-1) - probs
    ordered = ordered.masked_fill((mass_before >= top_p) & (rank > 0), NEG_INF)
    return torch.full_like(logits, NEG_INF).scatter_(1, order, ordered)
