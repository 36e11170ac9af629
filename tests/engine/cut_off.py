"""The tokens that top-k and top-p keep by definition."""

import numpy as np


def kept_by_definition(row: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Return the k largest tokens, limited to the mass p. Equal logits are kept together."""
    order = np.argsort(-row, kind="stable")
    size = len(row) if top_k <= 0 else min(top_k, len(row))
    weights = np.exp(row[order] - row.max()).astype(np.float64)
    weights = weights[:size] / weights[:size].sum()
    before = np.cumsum(weights) - weights
    count = max(1, int((before < top_p).sum()))
    return set(np.flatnonzero(row >= row[order[count - 1]]).tolist())
