"""Counter-based random numbers for a whole batch at once.

The number of token `index` of a request is a function of (seed, index) alone, so a draw does not
depend on the batch, the node or the attempt.

Source: Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)

Words = npt.NDArray[np.uint64]


def uniforms(seeds: Words, indexes: Words) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index), with 53 random bits.

    Args:
        seeds, indexes: Shape (n,).

    Returns:
        Shape (n,).
    """
    zeros = np.zeros_like(indexes)
    counter = (indexes & _LOW, indexes >> _HALF, zeros, zeros)
    first, second, _, _ = philox(counter, (seeds & _LOW, seeds >> _HALF))
    bits = ((first >> np.uint64(5)) << np.uint64(26)) | (second >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Return the block of four 32-bit words, in 64-bit lanes, of each counter under each key."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (right >> _HALF) ^ b ^ k0,
            right & _LOW,
            (left >> _HALF) ^ d ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d
