"""Samples tokens from logits: temperature, top-k, top-p, min-p and seeded draws.

All rows of a batch go through the same few operations, which are queued on the device. Nothing here waits for a
GPU; the caller reads the sampled ids.

A draw uses one noise value per token of the vocabulary, which depends only on (seed, index, token). It picks the
token with the largest logit plus `temperature` times Gumbel noise, which samples from the softmax of
logits / temperature. Because no sum over the vocabulary is involved, a draw is the same in every batch, on every
node and in every attempt. Logits that differ in their last bits rarely change it.

Source: Gumbel 1954. The generator is Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3") as in numpy, with the key (seed, 0) and the counter (block, 0, index, 0). Each 64-bit word gives the noise
of two tokens, the low half that of the first.
"""

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.device import to_device
from tandem.engine.scheduling.forward import Ints, Slots

NEG_INF = float("-inf")
# At this temperature all tokens are equally likely, and the scaled noise is still finite.
_MAX_TEMPERATURE = np.float32(1e30)
# Philox blocks per GPU program; each block covers eight tokens.
_NUM_BLOCKS = 128
# Logits that a GPU program reads at a time when it finds cutoffs.
_CUTOFF_BLOCK = 4096
# The largest float32 below 1.
_BELOW_ONE = np.float32(1 - 2**-24)

Floats = npt.NDArray[np.float32]


@torch.inference_mode()
def sample(logits: torch.Tensor, slots: Slots, rows: Ints) -> torch.Tensor:
    """Sample a token for each row.

    Args:
        logits: Shape (n, vocab_size).
        rows: Slot with the parameters of each row. Shape (n,).

    Returns:
        Token ids on the device of `logits`. Shape (n,).
    """
    drawn = np.flatnonzero(slots.temperature[rows] > 0)
    if not len(drawn):
        return _argmax(logits)
    if len(drawn) == len(logits):
        return _draw(logits, slots, rows)
    tokens = _argmax(logits)
    lines = to_device(drawn, logits.device)
    tokens[lines] = _draw(logits[lines], slots, rows[drawn])
    return tokens


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.is_cuda:
        return logits.argmax(dim=-1)
    # For 32 rows of 49k bfloat16 on one core, torch takes 5.5 ms and numpy 0.3 ms.
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def _draw(logits: torch.Tensor, slots: Slots, rows: Ints) -> torch.Tensor:
    """Draw a token for each row of logits, shape (n, vocab_size). Returns shape (n,)."""
    logits = logits.float()
    vocab_size = logits.shape[1]
    has_top = (slots.top_k[rows] < vocab_size).any() or (slots.top_p[rows] < 1).any()
    if has_top or (slots.min_p[rows] > 0).any():
        logits = logits.masked_fill(_excluded(logits, slots, rows, has_top=bool(has_top)), NEG_INF)
    temperatures = np.minimum(slots.temperature[rows], _MAX_TEMPERATURE)
    return argmax_with_noise(logits, temperatures, slots.seed[rows], slots.next_index[rows])


def _excluded(logits: torch.Tensor, slots: Slots, rows: Ints, *, has_top: bool) -> torch.Tensor:
    """Return a mask of the tokens that top-k, top-p and min-p exclude. Shape (n, vocab_size), boolean."""

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(values, logits.device).unsqueeze(1)

    # The largest logit is subtracted first, so that the quotient does not overflow at low temperatures.
    min_temperature = np.finfo(np.float32).tiny
    temperature = column(np.maximum(slots.temperature[rows], min_temperature))
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    cut = scaled < column(slots.min_p[rows]).log()
    if has_top:
        top_k = column(np.minimum(slots.top_k[rows], logits.shape[1]))
        find = find_cutoffs if logits.is_cuda else _cutoffs
        cut |= scaled < find(scaled, top_k, column(slots.top_p[rows]))
    return cut


def _cutoffs(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit that top-k and top-p keep. `top_k`, `top_p` and the result have shape (n, 1).

    The caller keeps all logits that are not below it. So equal logits are kept or excluded together, whatever the
    sort order of the device.
    """
    vocab_size = logits.shape[1]
    # Sorting the whole vocabulary would dominate the time of a step.
    probs = logits.softmax(dim=-1)
    has_top_k = top_k < vocab_size
    # A row without top-k and top-p keeps all logits. If it took part in the sort for other rows' top-p, all of it would
    # be sorted, and rounding would cut its tail.
    keeps_all = ~has_top_k & (top_p >= 1)
    top_p = top_p.masked_fill(keeps_all, 0.0)
    top = logits.topk(_num_candidates(probs, top_k, top_p), dim=-1)
    rank = torch.arange(top.values.shape[1], device=logits.device)
    mass = probs.gather(1, top.indices).double().masked_fill(rank >= top_k, 0.0)
    # With top-k, the mass is renormalized over the kept tokens.
    total_mass = torch.where(has_top_k, mass.sum(dim=-1, keepdim=True), 1.0)
    mass_before = mass.cumsum(dim=-1) - mass
    is_kept = (mass_before < top_p * total_mass) & (rank < top_k) | (rank == 0)
    cutoffs = top.values.gather(1, is_kept.sum(dim=-1, keepdim=True) - 1)
    return cutoffs.masked_fill(keeps_all, NEG_INF)


def _num_candidates(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> int:
    """Return an upper bound on the number of tokens kept."""
    vocab_size = probs.shape[1]
    # All tokens below the floor together have a mass of less than 1 - top_p, so none is in the nucleus.
    floor = (1 - top_p) / vocab_size
    in_nucleus = (probs >= floor).sum(dim=-1, keepdim=True)
    return int(torch.where(top_k < vocab_size, top_k, in_nucleus).max().clamp(min=1))


def find_cutoffs(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Do the same as `_cutoffs` on a GPU, without sorting and without waiting for the device.

    Args:
        logits: Shape (n, vocab_size). The largest logit of each row must be 0.
    """
    # Imported here, because only CUDA builds of torch include triton.
    from tandem.engine.kernels.triton import cutoff_logits

    num_rows, vocab_size = logits.shape
    cutoffs = torch.empty((num_rows, 1), dtype=torch.float32, device=logits.device)
    block = _CUTOFF_BLOCK
    cutoff_logits[(num_rows,)](
        logits, cutoffs, top_k, top_p.double(), vocab_size, block, num_warps=16
    )
    return cutoffs


# ── noise ────────────────────────────────────────────────────────────────────────────────────────


def gumbels(seed: int, index: int, vocab_size: int) -> Floats:
    """Return the noise of one draw. Shape (vocab_size,)."""
    # These are arrays, because numpy converts lists of large integers to floats.
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, index, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(-(-vocab_size // 2))
    return to_gumbel(words.view(np.uint32)[:vocab_size])


def to_gumbel(words: npt.NDArray[np.uint32]) -> Floats:
    """Convert random words to Gumbel noise. All values are finite."""
    # Small numbers, which give large noise, keep all 32 bits.
    noise = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    np.negative(np.minimum(noise, _BELOW_ONE, out=noise), out=noise)
    np.negative(np.log1p(noise, out=noise), out=noise)
    gumbel: Floats = np.negative(np.log(noise, out=noise), out=noise)
    return gumbel


def argmax_with_noise(
    logits: torch.Tensor,
    temperatures: Floats,
    seeds: npt.NDArray[np.uint64],
    indexes: Ints,
) -> torch.Tensor:
    """Return the token with the largest sum of logit and noise for each row, on the logits' device.

    Args:
        temperatures: Factor of the noise; 0: no noise. Shape (n,).
        seeds, indexes: Seed and token index of each draw. Shape (n,).
    """
    if logits.is_cuda:
        return with_noise(logits, temperatures, seeds, indexes).argmax(dim=-1)
    tokens = np.empty(len(logits), np.int64)
    # Row by row, so that the result does not depend on the batch and the noise stays in the CPU's cache.
    for row, own in enumerate(logits.numpy()):
        scores = gumbels(int(seeds[row]), int(indexes[row]), len(own))
        scores *= temperatures[row]
        scores += own
        tokens[row] = scores.argmax()
    return torch.from_numpy(tokens)


def with_noise(
    logits: torch.Tensor,
    temperatures: Floats,
    seeds: npt.NDArray[np.uint64],
    indexes: Ints,
) -> torch.Tensor:
    """Return logits plus the noise of `argmax_with_noise`, computed on their device by a Triton kernel."""
    # Imported here, because only CUDA builds of torch include triton.
    from tandem.engine.kernels.triton import add_noise

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(values, logits.device)

    num_rows, vocab_size = logits.shape
    scores = torch.empty_like(logits, memory_format=torch.contiguous_format)
    add_noise[num_rows, -(-vocab_size // (8 * _NUM_BLOCKS))](
        logits.contiguous(),
        scores,
        column(temperatures),
        column(seeds.view(np.int64)),
        column(indexes),
        vocab_size,
        num_blocks=_NUM_BLOCKS,
    )
    return scores
