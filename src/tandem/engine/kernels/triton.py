"""Triton kernels: KV writes, attention, RMS norm, rotary embedding, gates, and sampling cutoffs and noise.

Both attention kernels read the pool in place, through a layer's view: [page][k, v][head][token][dim]. Scores
are in base 2 and sums in float32, as in FlashAttention-2 (Dao 2023). The keys of a decoding row are split over
programs, whose results are merged by log-sum-exp, as in Flash-Decoding. No key at or beyond a sequence's length
is loaded. A sink is an additional score of a head whose value is zero.

e4m3 is converted by bit operations, because Triton supports its e4m3 type only on Ada and later GPUs: a byte
shifted into a float16 is the value divided by 256.
"""

# Arguments have no annotations, because triton evaluates them and accepts only its own types.
# Kernels are long because triton has no structs. Both attention kernels share `_attend`.

import triton
from triton import language as tl

# Below every score. Finite, so that a row without keys so far does not yield NaN.
_MIN_SCORE = tl.constexpr(-1.0e30)
_E4M3_MAX = tl.constexpr(448.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Bits of the float32 infinity.
_INFINITY_BITS = tl.constexpr(0x7F800000)
# Triton's interpreter stores bfloat16 as integers and would multiply these.
_IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _from_e4m3(bits):
    """Convert e4m3 bytes to float16."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    # The exponent bias is 7 in e4m3 and 15 in float16, so the value must be scaled by 2^8.
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _to_e4m3(value):
    """Round float32 to the nearest e4m3, ties to even, and clamp to ±448."""
    sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(value), _E4M3_MAX)
    bits = size.to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
    # In float32, the unit in the last place of 2^14 is e4m3's smallest value, so this addition rounds to it.
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    return (tl.where(size < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _store_kv(target, values, mask, is_fp8: tl.constexpr):
    """Store values in the pool's type."""
    if is_fp8:
        tl.store(target, _to_e4m3(values.to(tl.float32)), mask=mask)
    else:
        tl.store(target, values.to(target.dtype.element_ty), mask=mask)


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
    """Write K and V of one row into its page. Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(write_pages + row).to(tl.int64)
    offset = tl.load(write_offsets + row)
    heads = tl.arange(0, block_heads)[:, None]
    dims = tl.arange(0, block_dim)[None, :]
    mask = (heads < num_kv_heads) & (dims < head_dim)
    k = tl.load(key + row * key_row + heads * key_head + dims, mask=mask, other=0.0)
    v = tl.load(value + row * value_row + heads * value_head + dims, mask=mask, other=0.0)
    target = pool + page * pool_page + (heads * page_size + offset) * head_dim + dims
    _store_kv(target, k, mask, is_fp8)
    _store_kv(target + pool_value, v, mask, is_fp8)


@triton.jit
def rotate_and_write(
    query,
    key,
    value,
    cos,
    sin,
    pool,
    write_pages,
    write_offsets,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    pool_page,
    pool_value,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """Rotate a block of heads of one row in place. For KV heads, also write K and V into the row's page.

    Grid (num_rows, blocks of query heads followed by blocks of KV heads).
    """
    row = tl.program_id(0).to(tl.int64)
    query_blocks: tl.constexpr = (num_heads + block_heads - 1) // block_heads
    block = tl.program_id(1)
    heads = tl.arange(0, block_heads)
    half: tl.constexpr = head_dim // 2
    dims = tl.arange(0, block_half)
    is_half = dims < half
    angles = row * head_dim + dims
    cos_left = tl.load(cos + angles, mask=is_half, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angles + half, mask=is_half, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angles, mask=is_half, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angles + half, mask=is_half, other=0.0).to(tl.float32)
    is_query = block < query_blocks
    if is_query:
        heads += block * block_heads
        at = query + row * query_row + heads[:, None] * query_head + dims[None, :]
        mask = (heads < num_heads)[:, None] & is_half[None, :]
    else:
        heads += (block - query_blocks) * block_heads
        at = key + row * key_row + heads[:, None] * key_head + dims[None, :]
        mask = (heads < num_kv_heads)[:, None] & is_half[None, :]
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    new_left = left * cos_left[None, :] - right * sin_left[None, :]
    new_right = right * cos_right[None, :] + left * sin_right[None, :]
    new_left = new_left.to(query.dtype.element_ty)
    new_right = new_right.to(query.dtype.element_ty)
    tl.store(at, new_left, mask=mask)
    tl.store(at + half, new_right, mask=mask)
    if not is_query:
        page = tl.load(write_pages + row).to(tl.int64)
        offset = tl.load(write_offsets + row)
        target = pool + page * pool_page
        target += (heads[:, None] * page_size + offset) * head_dim + dims[None, :]
        _store_kv(target, new_left, mask, is_fp8)
        _store_kv(target + half, new_right, mask, is_fp8)
        at = value + row * value_row + heads[:, None] * value_head + dims[None, :]
        target += pool_value
        _store_kv(target, tl.load(at, mask=mask, other=0.0), mask, is_fp8)
        _store_kv(target + half, tl.load(at + half, mask=mask, other=0.0), mask, is_fp8)


@triton.jit
def _dot(left, right, sums):
    if _IS_INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _attend(
    sums,
    highest,
    totals,
    query,
    positions,
    begin,
    end,
    pool,
    pages,
    pool_page,
    pool_value,
    scale,
    softcap,
    first_key,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_keys: tl.constexpr,
    has_first_key: tl.constexpr,
    has_softcap: tl.constexpr,
    is_masked: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """Continue the online softmax with the keys `begin` ... `end` - 1.

    Args:
        query: Shape (rows, block_dim).
        positions: Position of each row. Shape (rows,).
        first_key: First key visible to each row. Shape (rows,).
        pool: Pointer to the KV of this layer and head.
        pages: Pointer to the sequence's row of the page table.
        is_masked: False only if every row sees every key.

    Returns:
        The updated `sums` (rows, block_dim), maximum scores `highest` (rows,) and sums of weights `totals` (rows,).
    """
    dims = tl.arange(0, block_dim)
    for first in range(begin, end, block_keys):
        keys = first + tl.arange(0, block_keys)
        is_inside = keys < end
        page = tl.load(pages + keys // page_size, mask=is_inside, other=0).to(tl.int64)
        at = page * pool_page + (keys % page_size) * head_dim
        elements = pool + at[:, None] + dims[None, :]
        # Do not load beyond the end: stale elements may be NaN, which a weight of 0 does not cancel.
        mask = is_inside[:, None] & (dims < head_dim)[None, :]
        key = tl.load(elements, mask=mask, other=0)
        value = tl.load(elements + pool_value, mask=mask, other=0)
        if is_fp8:
            key = _from_e4m3(key)
            value = _from_e4m3(value)
        key = key.to(query.dtype)
        value = value.to(query.dtype)
        scores = tl.zeros([query.shape[0], block_keys], tl.float32)
        scores = _dot(query, tl.trans(key), scores) * scale
        if has_softcap:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores *= _LOG2_E
        if is_masked:
            is_visible = is_inside[None, :] & (keys[None, :] <= positions[:, None])
            if has_first_key:
                is_visible = is_visible & (keys[None, :] >= first_key[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        rescale = tl.exp2(highest - top)
        totals = totals * rescale + tl.sum(weights, 1)
        sums = _dot(weights.to(query.dtype), value, sums * rescale[:, None])
        highest = top
    return sums, highest, totals


@triton.jit
def _first_key(positions, window, chunk, has_window: tl.constexpr, has_chunk: tl.constexpr):
    """Return the first key visible at each position."""
    first_key = positions * 0
    if has_window:
        first_key = tl.maximum(first_key, positions - window + 1)
    if has_chunk:
        first_key = tl.maximum(first_key, positions // chunk * chunk)
    return first_key


# The width of the page table varies with every batch and must not trigger a recompilation.
@triton.jit(do_not_specialize=["table_row"])
def attend_prompts(
    query,
    pool,
    tiles,
    page_table,
    sinks,
    out,
    query_row,
    query_head,
    out_row,
    table_row,
    pool_page,
    pool_value,
    scale,
    softcap,
    window,
    chunk,
    group: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_keys: tl.constexpr,
    has_window: tl.constexpr,
    has_chunk: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """Compute attention for one tile of a chunk's rows and all heads of a group. Grid (num_tiles, num_kv_heads).

    Args:
        tiles: One line per tile: sequence, first row, number of rows, position of the first row.
    """
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    sequence = tl.load(tile).to(tl.int64)
    first_row = tl.load(tile + 1).to(tl.int64)
    num_rows = tl.load(tile + 2)
    position = tl.load(tile + 3)
    lines = tl.arange(0, block_rows)
    tokens = lines // group
    heads = kv_head * group + lines % group
    dims = tl.arange(0, block_dim)
    mask = (tokens < num_rows)[:, None] & (dims < head_dim)[None, :]
    from_row = (first_row + tokens) * query_row + heads * query_head
    rows = tl.load(query + from_row[:, None] + dims[None, :], mask=mask, other=0.0)
    sums = tl.zeros([block_rows, block_dim], tl.float32)
    highest = tl.full([block_rows], _MIN_SCORE, tl.float32)
    totals = tl.zeros([block_rows], tl.float32)
    pool += kv_head * (page_size * head_dim)
    pages = page_table + sequence * table_row
    end = position + num_rows
    first_key = _first_key(position + tokens, window, chunk, has_window, has_chunk)
    begin = _first_key(position, window, chunk, has_window, has_chunk) // block_keys * block_keys
    if not (has_window or has_chunk):
        # Keys visible to all rows of the tile need no mask.
        begin = (position + 1) // block_keys * block_keys
        sums, highest, totals = _attend(
            sums,
            highest,
            totals,
            rows,
            position + tokens,
            0,
            begin,
            pool,
            pages,
            pool_page,
            pool_value,
            scale,
            softcap,
            first_key,
            page_size,
            head_dim,
            block_dim,
            block_keys,
            False,
            has_softcap,
            False,
            is_fp8,
        )
    sums, highest, totals = _attend(
        sums,
        highest,
        totals,
        rows,
        position + tokens,
        begin,
        end,
        pool,
        pages,
        pool_page,
        pool_value,
        scale,
        softcap,
        first_key,
        page_size,
        head_dim,
        block_dim,
        block_keys,
        has_window or has_chunk,
        has_softcap,
        True,
        is_fp8,
    )
    if has_sinks:
        sink = tl.load(sinks + heads).to(tl.float32)
        totals += tl.exp2(sink * _LOG2_E - highest)
    result = sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
    to_row = (first_row + tokens) * out_row + heads * head_dim
    target = out + to_row[:, None] + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)


# The width of the page table varies with every batch and must not trigger a recompilation.
@triton.jit(do_not_specialize=["table_row"])
def attend_decodes(
    query,
    pool,
    splits,
    page_table,
    sinks,
    out,
    partial,
    sizes,
    query_row,
    query_head,
    out_row,
    table_row,
    pool_page,
    pool_value,
    scale,
    softcap,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """Compute attention for one row over one split of its keys and all heads of a group. Grid (num_programs, num_kv_heads).

    Rows with one split write their result to `out`. Other rows write each split's result to `partial`, float32, shape
    (num_programs, num_heads, block_dim), and its base-2 log-sum-exp to `sizes`, shape (num_programs, num_heads).

    Args:
        splits: Table from `Splits.table`.
    """
    program = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    sequence = tl.load(splits + program * 4).to(tl.int64)
    begin = tl.load(splits + program * 4 + 1)
    end = tl.load(splits + program * 4 + 2)
    num_splits = tl.load(splits + sequence * 4 + 7) - tl.load(splits + sequence * 4 + 3)
    lines = tl.arange(0, block_rows)
    heads = kv_head * group + lines
    dims = tl.arange(0, block_dim)
    is_head = lines < tl.where(begin < end, group, 0)  # programs without keys store nothing
    mask = is_head[:, None] & (dims < head_dim)[None, :]
    from_row = query + sequence * query_row
    rows = tl.load(from_row + (heads * query_head)[:, None] + dims[None, :], mask=mask, other=0.0)
    sums = tl.zeros([block_rows, block_dim], tl.float32)
    highest = tl.full([block_rows], _MIN_SCORE, tl.float32)
    totals = tl.zeros([block_rows], tl.float32)
    positions = lines * 0 + end - 1
    sums, highest, totals = _attend(
        sums,
        highest,
        totals,
        rows,
        positions,
        begin,
        end,
        pool + kv_head * (page_size * head_dim),
        page_table + sequence * table_row,
        pool_page,
        pool_value,
        scale,
        softcap,
        positions,  # unused: a split has only visible keys
        page_size,
        head_dim,
        block_dim,
        block_keys,
        False,
        has_softcap,
        True,
        is_fp8,
    )
    if has_sinks:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        # With several splits, `merge_splits` adds the sink.
        totals += tl.where(num_splits == 1, tl.exp2(sink * _LOG2_E - highest), 0.0)
    result = sums / totals[:, None]
    if num_splits == 1:
        target = out + sequence * out_row + (heads * head_dim)[:, None] + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)
    else:
        part = program * num_heads + heads
        tl.store(partial + part[:, None] * block_dim + dims[None, :], result, mask=mask)
        tl.store(sizes + part, highest + tl.log2(totals), mask=is_head)


@triton.jit
def merge_splits(
    partial,
    sizes,
    splits,
    sinks,
    out,
    out_row,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_splits: tl.constexpr,
    block_dim: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Merge the split results of `attend_decodes` for one row and head. Grid (num_decodes, num_heads)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(splits + sequence * 4 + 3)
    end = tl.load(splits + sequence * 4 + 7)
    if end - begin > 1:
        dims = tl.arange(0, block_dim)
        sums = tl.zeros([block_dim], tl.float32)
        highest = _MIN_SCORE
        total = 0.0
        for first in range(begin, end, block_splits):
            programs = first + tl.arange(0, block_splits)
            parts = programs.to(tl.int64) * num_heads + head
            is_split = programs < end
            size = tl.load(sizes + parts, mask=is_split, other=float("-inf"))
            mask = is_split[:, None] & (dims < head_dim)[None, :]
            results = partial + parts[:, None] * block_dim + dims[None, :]
            result = tl.load(results, mask=mask, other=0.0)
            top = tl.maximum(highest, tl.max(size, 0))
            weights = tl.exp2(size - top)
            rescale = tl.exp2(highest - top)
            total = total * rescale + tl.sum(weights, 0)
            sums = sums * rescale + tl.sum(result * weights[:, None], 0)
            highest = top
        if has_sinks:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - highest)
        target = out + sequence * out_row + head * head_dim + dims
        tl.store(target, (sums / total).to(out.dtype.element_ty), mask=dims < head_dim)


@triton.jit
def add_norm(
    rows,
    delta,
    weight,
    out,
    eps,
    width: tl.constexpr,
    has_delta: tl.constexpr,
    block: tl.constexpr,
):
    """Add a row of `delta` to `rows` in place and write its RMS norm times `weight` to `out`. Grid (num_rows,)."""
    begin = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, block)
    mask = columns < width
    row = tl.load(rows + begin + columns, mask=mask, other=0.0).to(tl.float32)
    if has_delta:
        row += tl.load(delta + begin + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = row.to(rows.dtype.element_ty)
        tl.store(rows + begin + columns, rounded, mask=mask)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    result = row * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + begin + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate_up, out, width: tl.constexpr, block: tl.constexpr):
    """Write silu(gate) * up for one block of a row's columns. Grid (num_rows, width / block)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    at = gate_up + row * (2 * width) + columns
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _count_nearer(logits, distance, vocab_size, block: tl.constexpr):
    """Return the number of logits with an absolute value below `distance`, in float32 bits, and the sum of their exp."""
    count = tl.zeros([block], tl.int32)
    mass = tl.zeros([block], tl.float64)
    for first in range(0, vocab_size, block):
        token = first + tl.arange(0, block)
        logit = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        # Non-negative floats have the same order as their bits.
        is_nearer = tl.abs(logit).to(tl.int32, bitcast=True) < distance
        count += is_nearer.to(tl.int32)
        mass += tl.where(is_nearer, tl.exp(logit), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def cutoff_logits(logits, cutoffs, top_k, top_p, vocab_size, block: tl.constexpr):
    """Find the smallest logit of a row that top-k and top-p keep. Grid (num_rows,).

    The largest logit must be 0. Instead of sorting, a binary search over the bits of the logit reads the row once
    per bit; the row stays in the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    zero = tl.load(top_k + row).to(tl.int32) * 0
    far = zero + _INFINITY_BITS
    count, total_mass = _count_nearer(logits, far, vocab_size, block)
    if k < vocab_size:
        near = zero  # the k-th logit lies between `near` and `far`
        for _ in range(31):
            middle = near + (far - near) // 2
            count, total_mass = _count_nearer(logits, middle + 1, vocab_size, block)
            is_enough = count >= k
            near = tl.where(is_enough, near, tl.minimum(middle + 1, far))
            far = tl.where(is_enough, middle, far)
        count, total_mass = _count_nearer(logits, far, vocab_size, block)
        # Of the logits equal to the k-th, count only as many as top-k includes.
        total_mass += (k - count) * tl.exp(-far.to(tl.float32, bitcast=True)).to(tl.float64)
    if p < 1:
        near = zero  # the mass of the logits before `near` is less than p
        for _ in range(31):
            middle = near + (far - near + 1) // 2
            count, mass = _count_nearer(logits, middle, vocab_size, block)
            is_kept = mass < p * total_mass
            near = tl.where(is_kept, middle, near)
            far = tl.where(is_kept, far, tl.maximum(middle - 1, near))
        far = near
    tl.store(cutoffs + row, -far.to(tl.float32, bitcast=True))


@triton.jit
def _add_noise(logits, scores, token, vocab_size, word, temperature):
    mask = token < vocab_size
    number = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # This is -log(1 - number). For small numbers the subtraction would lose bits, so a series is used.
    series = 1 + number * (0.5 + number * (0.33333333 + number * (0.25 + number * 0.2)))
    exponential = tl.where(number < 0.015625, number * series, -tl.log(1 - number))
    logit = tl.load(logits + token, mask=mask, other=0.0)
    tl.store(scores + token, logit - temperature * tl.log(exponential), mask=mask)


@triton.jit
def add_noise(logits, scores, temperatures, seeds, indexes, vocab_size, num_blocks: tl.constexpr):
    """Add the noise of `sampler.gumbels` to a block of a row's logits. Grid (num_rows, vocab_size / 8 / num_blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * num_blocks + tl.arange(0, num_blocks).to(tl.int64)
    zero = block * 0
    index = tl.load(indexes + row) + zero
    # numpy increments the counter before each block.
    words = tl.philox(tl.load(seeds + row), block + 1, zero, index, zero)
    temperature = tl.load(temperatures + row)
    logits += row * vocab_size
    scores += row * vocab_size
    for lane in tl.static_range(4):
        token = block * 8 + 2 * lane
        low, high = words[lane] & 0xFFFFFFFF, words[lane] >> 32
        _add_noise(logits, scores, token, vocab_size, low, temperature)
        _add_noise(logits, scores, token + 1, vocab_size, high, temperature)
