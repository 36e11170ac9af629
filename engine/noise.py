"""The noise of draws: one number for each token of the vocabulary, a function of (seed, index, token) alone.

The token whose logit plus `temperature` times its Gumbel noise is the largest follows the softmax of the
logits over the temperature. No sum over the vocabulary takes part, so a draw is the same in every batch, on
every node and in every attempt, and logits that differ in their last bits hardly ever change it.

Source: Gumbel 1954; the generator is Philox4x64-10, Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3", as numpy has it, with the key (seed, 0) and the counter (block, 0, index, 0). Each 64-bit word is
the noise of two tokens, the low half of the first.
"""

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]

# Blocks of Philox that one program makes on a GPU, with eight tokens each.
_NUM_BLOCKS = 128
# The largest float32 below 1.
_BELOW_ONE = np.float32(1 - 2**-24)


def gumbels(seed: int, index: int, vocab_size: int) -> Floats:
    """Return the noise of one draw. Shape (vocab_size,)."""
    # As arrays: numpy reads lists of large integers as floats.
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, index, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(-(-vocab_size // 2))
    return gumbels_of(words.view(np.uint32)[:vocab_size])


def gumbels_of(words: npt.NDArray[np.uint32]) -> Floats:
    """Return random words as Gumbel noise, all of it finite."""
    # Small numbers, which make large noise, keep all of their 32 bits.
    noise = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    np.negative(np.minimum(noise, _BELOW_ONE, out=noise), out=noise)
    np.negative(np.log1p(noise, out=noise), out=noise)
    gumbel: Floats = np.negative(np.log(noise, out=noise), out=noise)
    return gumbel


def noisiest(
    logits: torch.Tensor,
    temperatures: Floats,
    seeds: npt.NDArray[np.uint64],
    indexes: npt.NDArray[np.int64],
) -> torch.Tensor:
    """Return for each row the token whose logit is the largest with its noise.

    Args:
        logits: Shape (n, vocab_size), float32.
        temperatures: What the noise is multiplied by; 0 for none. Shape (n,), as those that follow.
        seeds, indexes: Name the draw.

    Returns:
        Token ids on the device of `logits`. Shape (n,).
    """
    if logits.is_cuda:
        return with_noise(logits, temperatures, seeds, indexes).argmax(dim=-1)
    tokens = np.empty(len(logits), np.int64)
    # Row by row, so that each is computed as it is alone, and its noise stays in the processor's cache.
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
    indexes: npt.NDArray[np.int64],
) -> torch.Tensor:
    """Return the logits of `noisiest` with their noise, made on their device by Triton."""
    # Where a GPU is, torch brought it.
    from tandem.engine.triton_noise import add_noise

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device, non_blocking=True)

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
