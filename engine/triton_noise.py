"""Triton kernel of the noise of draws: that of `tandem.engine.noise`, made where the logits are."""

# Arguments have no types: in a kernel's signature triton evaluates what it finds, and takes only its own.

import triton
from triton import language as tl


@triton.jit
def _add(logits, scores, token, vocab_size, word, temperature):
    is_real = token < vocab_size
    number = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - number); of small ones the difference would lose what makes noise large.
    series = 1 + number * (0.5 + number * (0.33333333 + number * (0.25 + number * 0.2)))
    exponential = tl.where(number < 0.015625, number * series, -tl.log(1 - number))
    logit = tl.load(logits + token, mask=is_real, other=0.0)
    tl.store(scores + token, logit - temperature * tl.log(exponential), mask=is_real)


@triton.jit
def add_noise(logits, scores, temperatures, seeds, indexes, vocab_size, num_blocks: tl.constexpr):
    """Add noise to some logits of one row. Grid (num_rows, vocab_size / 8 / num_blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * num_blocks + tl.arange(0, num_blocks).to(tl.int64)
    zero = block * 0
    index = tl.load(indexes + row) + zero
    # numpy counts before it makes a block.
    words = tl.philox(tl.load(seeds + row), block + 1, zero, index, zero)
    temperature = tl.load(temperatures + row)
    logits += row * vocab_size
    scores += row * vocab_size
    for lane in tl.static_range(4):
        token = block * 8 + 2 * lane
        low, high = words[lane] & 0xFFFFFFFF, words[lane] >> 32
        _add(logits, scores, token, vocab_size, low, temperature)
        _add(logits, scores, token + 1, vocab_size, high, temperature)
