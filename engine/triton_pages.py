"""Triton kernels of what lies in pages: rows are written, e4m3 is read and written.

e4m3 goes through its bits, not through Triton's own type, which GPUs before Ada lack: a byte moved into
a float16 is the value divided by 256.
"""

# Arguments have no types: in a kernel's signature triton evaluates what it finds, and takes only its own.

import triton
from triton import language as tl

_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def from_e4m3(bits):
    """Return bytes of e4m3 as float16."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    # Exponents are biased by 7 there and by 15 here.
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _to_e4m3(value):
    """Round float32 to the nearest e4m3, ties to even; what is too large becomes ±448."""
    sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(value), _E4M3_MAX)
    bits = size.to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
    # Where a unit in the last place of 2^14 is e4m3's smallest value: the sum rounds for us.
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def write_rows(
    key,
    value,
    pool,
    write_pages,
    write_offsets,
    key_row,
    key_head,
    value_row,
    value_head,
    pool_page,
    pool_value,
    num_kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """Put K and V of one row into its page. Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(write_pages + row).to(tl.int64)
    offset = tl.load(write_offsets + row)
    heads = tl.arange(0, block_heads)[:, None]
    dims = tl.arange(0, block_dim)[None, :]
    is_real = (heads < num_kv_heads) & (dims < head_dim)
    k = tl.load(key + row * key_row + heads * key_head + dims, mask=is_real, other=0.0)
    v = tl.load(value + row * value_row + heads * value_head + dims, mask=is_real, other=0.0)
    target = pool + page * pool_page + (heads * page_size + offset) * head_dim + dims
    if is_fp8:
        tl.store(target, _to_e4m3(k.to(tl.float32)), mask=is_real)
        tl.store(target + pool_value, _to_e4m3(v.to(tl.float32)), mask=is_real)
    else:
        tl.store(target, k.to(pool.dtype.element_ty), mask=is_real)
        tl.store(target + pool_value, v.to(pool.dtype.element_ty), mask=is_real)
