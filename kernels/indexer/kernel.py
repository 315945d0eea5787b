"""Device code of the indexer's scores. Everything is exact but the sum over heads, whose order is fixed.

FP4 values are small integers (in halves): a vector whose four group exponents lie within 3 of each
other is folded into int8, and a product of two such vectors is one exact integer sum. Other vectors
stay unfolded and are multiplied group by group; the two ways give equal bits where both apply, so a
tile may choose by its widest vector without a neighbour showing in a row's bits. Which sequence,
block or row exists is the caller's business.
"""

from __future__ import annotations

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Four packed bytes at once. The eight magnitudes are the bytes of two registers that prmt picks from; a
# sign picks the negated ones. Then each byte is doubled by bit 0 of its shift, and quadrupled by bit 1.
_UNPACK_ASM = tl.constexpr(
    """
{
.reg .b32 s, p, n, m, t, m0, m1;
and.b32 m0, $3, 0x01010101; mul.lo.u32 m0, m0, 0xFF;
shr.u32 m1, $3, 1; and.b32 m1, m1, 0x01010101; mul.lo.u32 m1, m1, 0xFF;
"""
    + "".join(
        f"""
shr.u32 s, $2, {4 * half}; and.b32 s, s, 0x0F0F0F0F; shr.u32 t, s, 4; or.b32 s, s, t;
prmt.b32 s, s, 0, 0x4420;
and.b32 t, s, 0x7777; prmt.b32 p, 0x03020100, 0x0C080604, t; prmt.b32 n, 0xFDFEFF00, 0xF4F8FAFC, t;
shr.u32 t, s, 3; and.b32 t, t, 0x1111; prmt.b32 m, 0x0000FF00, 0, t;
lop3.b32 p, m, n, p, 0xCA;
shl.b32 t, p, 1; and.b32 t, t, 0xFEFEFEFE; lop3.b32 p, m0, t, p, 0xCA;
shl.b32 t, p, 2; and.b32 t, t, 0xFCFCFCFC; lop3.b32 ${half}, m1, t, p, 0xCA;
"""
        for half in (0, 1)
    )
    + "}"
)


@triton.jit
def _fp4_in_halves(codes):
    """int32 e2m1 codes (0..15) -> int32 value * 2: 0 1 2 3 4 6 8 12, negative with bit 3."""
    low = codes & 7
    magnitude = tl.where(low < 2, low, (2 | (low & 1)) << (tl.maximum(low >> 1, 1) - 1))
    return tl.where((codes & 8) != 0, -magnitude, magnitude)


@triton.jit
def _unpack_bytes(packed, shift):
    """uint8 pairs of e2m1 codes, uint8 shifts 0..3 -> int8 (low, high) values in halves, shifted left."""
    if _IS_INTERPRETED:
        wide, by = packed.to(tl.int32), shift.to(tl.int32)
        low, high = _fp4_in_halves(wide & 15) << by, _fp4_in_halves(wide >> 4) << by
        return low.to(tl.int8), high.to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_ASM, "=r,=r,r,r", [packed, shift], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )


@triton.jit
def _power_of_two(exponents):
    """int32 biased exponents -> fp32 ``2^(e - 127)``; what is below the normal range gives 0."""
    return (tl.maximum(exponents, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_fp4(base, mask, R: tl.constexpr, D: tl.constexpr, MAX_FOLD: tl.constexpr):
    """Packed vectors at ``base`` [R] -> int8 [R, D], biased base exponents [R], is_wide [R].

    The value of a narrow vector is ``code / 2 * 2^(base - 127)``; a wide one's codes are unfolded, its
    base is its largest exponent and ``_group_scale`` gives what each group lacks.
    """
    G: tl.constexpr = D // 32
    groups = tl.arange(0, G)
    where = base[:, None] + D // 2 + groups[None, :]
    exponents = tl.load(where, mask=mask[:, None], other=127).to(tl.int32)
    lowest, highest = tl.min(exponents, 1), tl.max(exponents, 1)
    is_wide = highest - lowest > MAX_FOLD
    shift = tl.where(is_wide[:, None], 0, exponents - lowest[:, None])
    nibble = groups[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(base[:, None, None] + nibble[None], mask=mask[:, None, None], other=0)
    low, high = _unpack_bytes(packed, tl.broadcast_to(shift.to(tl.uint8)[:, :, None], packed.shape))
    codes = tl.join(low, high).reshape(R, D)
    return codes, tl.where(is_wide, highest, lowest), is_wide


@triton.jit
def _group_scale(base, mask, base_exponents, is_wide, group, D: tl.constexpr):
    """[R] fp32 ``2^(exponent - base)`` of one group of each vector; 1 where folded."""
    exponents = tl.load(base + D // 2 + group, mask=mask, other=127).to(tl.int32)
    return tl.where(is_wide, _power_of_two(exponents - base_exponents + 127), 1.0)


@triton.jit
def unpack_queries_kernel(
    q_ptr, weights_ptr, codes_ptr, scaled_ptr, exponents_ptr, wide_ptr,
    stride_weights,
    H: tl.constexpr, D: tl.constexpr, MAX_FOLD: tl.constexpr,
):  # fmt: skip
    """Packed queries [num_rows, H, D/2 + D/32] -> int8 codes, head weights with scales, base exponents.

    The scale holds a quarter for two vectors of halves. Base exponents are -1 for a narrow vector.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, H)
    base = q_ptr + (row * H + heads) * (D // 2 + D // 32)
    mask = heads < H
    codes, exponents, is_wide = _unpack_fp4(base, mask, H, D, MAX_FOLD)
    tl.store(codes_ptr + row * H * D + heads[:, None] * D + tl.arange(0, D)[None, :], codes)
    weights = tl.load(weights_ptr + row * stride_weights + heads)
    tl.store(scaled_ptr + row * H + heads, weights * (_power_of_two(exponents) * (0.25 * _WEIGHT_SHIFT)))
    tl.store(exponents_ptr + row * H + heads, tl.where(is_wide, exponents, -1))
    tl.store(wide_ptr + row, tl.max(is_wide.to(tl.int32), 0))


# An integer below 2^23 is, as the bits of a float, that integer times 2^-149: no conversion is needed where
# the weight makes up for it. Weights are stored times 2^104, so sums stand in units of 2^-45, far from
# both ends.
WEIGHT_SHIFT = 2.0**104
_WEIGHT_SHIFT = tl.constexpr(WEIGHT_SHIFT)
_SUM_UNIT = tl.constexpr(2.0**45)
_BITS_TO_VALUE = tl.constexpr(2.0**-149)


@triton.jit
def _add_integers(acc, products, weights):
    """``acc + weights * relu(products)`` for int32 products below 2^23."""
    return tl.fma(tl.maximum(products, 0).to(tl.float32, bitcast=True), weights, acc)


@triton.jit
def _add_floats(acc, products, weights):
    """The same for fp32 products: equal bytes where these are integers, as a power of two rounds nothing."""
    return tl.fma(tl.maximum(products, 0.0), weights * _BITS_TO_VALUE, acc)


@triton.jit
def _wide_products(
    a, b_t, a_base, a_mask, a_exponents, a_wide, b_base, b_mask, b_exponents, b_wide, D: tl.constexpr
):  # fmt: skip
    """Group by group: a [M, D] int8, b_t [D, N] int8 -> [M, N] fp32 in quarters of the base scales."""
    group_of = tl.arange(0, D) // 32
    total = tl.zeros([a.shape[0], b_t.shape[1]], tl.float32)
    even = total
    for group in tl.static_range(D // 32):
        part = tl.where((group_of == group)[None, :], a, 0).to(tl.int8)
        a_scale = _group_scale(a_base, a_mask, a_exponents, a_wide, group, D)
        b_scale = _group_scale(b_base, b_mask, b_exponents, b_wide, group, D)
        product = tl.dot(part, b_t, out_dtype=tl.int32).to(tl.float32) * a_scale[:, None] * b_scale[None, :]
        # (g0 + g1) + (g2 + g3). In a narrow pair all four are integers, and any order is exact.
        if group % 2 == 0:
            even = product
        else:
            total += even + product
    if D == 32:
        total = even
    return total


@triton.jit
def _key_bases(
    pool_ptr, table_ptr, entries, mask, ENTRIES_PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Addresses of a sequence's index keys by entry number."""
    block = tl.load(table_ptr + entries // ENTRIES_PER_BLOCK, mask=mask, other=0).to(tl.int64)
    slot = block * ENTRIES_PER_BLOCK + entries % ENTRIES_PER_BLOCK
    # Stated, for the compiler takes more from the runs of slots in a block: 17 bytes are 32 channels.
    return tl.multiple_of(pool_ptr + slot * WIDTH, WIDTH // 17 if WIDTH % 17 == 0 else 16)


@triton.jit
def _store_scores(
    scores_ptr, maxima_ptr, scores, rows, row_mask, first, num_entries, stride_scores, stride_maxima,
    M: tl.constexpr, N: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Scores of [M rows, N entries] and, where asked, their maxima over runs of FACTOR entries."""
    if scores_ptr is not None:
        columns = first + tl.arange(0, N)
        target = scores_ptr + rows.to(tl.int64)[:, None] * stride_scores + columns[None, :]
        tl.store(target, scores, mask=row_mask[:, None] & (columns < num_entries)[None, :])
    if maxima_ptr is not None:
        maxima = tl.max(scores.reshape(M, N // FACTOR, FACTOR), 2)
        runs = first // FACTOR + tl.arange(0, N // FACTOR)
        target = maxima_ptr + rows.to(tl.int64)[:, None] * stride_maxima + runs[None, :]
        tl.store(target, maxima, mask=row_mask[:, None] & (runs * FACTOR < num_entries)[None, :])


@triton.jit
def _score_tile(
    q_desc, q_ptr, scaled_ptr, exponents_ptr, wide_ptr, chunks_ptr, visible_ptr,
    keys_t, k_base, k_mask, k_exponents, k_wide, any_wide_key, chunk, row0, first,
    scores_ptr, maxima_ptr, left_ptr, num_rows, num_entries, stride_scores, stride_maxima,
    FP4: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FACTOR: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of one tile of M queries against N keys of one sequence, in the launch whose tile it is.

    The narrow launch notes in ``left`` that it left a tile to the wide one.
    """
    rows = row0 + tl.arange(0, M)
    in_range = rows < num_rows
    is_wide = any_wide_key
    if FP4:
        is_wide |= tl.max(tl.load(wide_ptr + rows, mask=in_range, other=0), 0) > 0
    if FP4 and not WIDE:
        tl.store(left_ptr, 1, mask=is_wide)
    if is_wide == WIDE:
        row_mask = in_range & (tl.load(chunks_ptr + rows, mask=in_range, other=-1) == chunk)
        visible = tl.load(visible_ptr + rows, mask=row_mask, other=0)
        acc = tl.zeros([M, N], tl.float32)
        if first < tl.max(visible, 0):
            for head in tl.range(0, H, num_stages=NUM_STAGES):
                q = q_desc.load([row0, head * D])
                weights = tl.load(scaled_ptr + rows * H + head, mask=in_range, other=0.0)
                if WIDE:
                    q_base = q_ptr + (rows.to(tl.int64) * H + head) * (D // 2 + D // 32)
                    q_exponents = tl.load(exponents_ptr + rows * H + head, mask=in_range, other=-1)
                    products = _wide_products(
                        q,
                        keys_t,
                        q_base,
                        in_range,
                        q_exponents,
                        q_exponents >= 0,
                        k_base,
                        k_mask,
                        k_exponents,
                        k_wide,
                        D,
                    )
                    acc = _add_floats(acc, products, weights[:, None])
                elif FP4:
                    products = tl.dot(q, keys_t, out_dtype=tl.int32)
                    acc = _add_integers(acc, products, weights[:, None])
                else:
                    products = tl.dot(q, keys_t, input_precision="ieee")
                    acc = _add_floats(acc, products, weights[:, None])
            if FP4:
                acc *= (_power_of_two(k_exponents) * _SUM_UNIT)[None, :]
            else:
                acc *= _SUM_UNIT
        acc = tl.where((first + tl.arange(0, N))[None, :] < visible[:, None], acc, float("-inf"))
        _store_scores(
            scores_ptr,
            maxima_ptr,
            acc,
            rows,
            row_mask,
            first,
            num_entries,
            stride_scores,
            stride_maxima,
            M,
            N,
            FACTOR,
        )


@triton.jit
def score_tiles_kernel(
    q_desc, q_ptr, scaled_ptr, exponents_ptr, wide_ptr, pool_ptr, tables_ptr, chunks_ptr, visible_ptr,
    scores_ptr, maxima_ptr, left_ptr,
    num_rows, num_entries, stride_table, stride_scores, stride_maxima,
    FP4: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, GROUP: tl.constexpr, FACTOR: tl.constexpr, MAX_FOLD: tl.constexpr,
    MAX_SPAN: tl.constexpr, FILL: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A program scores GROUP tiles of M queries against N entries; keys are unpacked once a sequence.

    Tiles that span more than MAX_SPAN sequences are ``score_rows_kernel``'s.
    """
    zero = tl.full([], 0, tl.int64)
    num_tiles = tl.cdiv(num_entries, N)
    first = (tl.program_id(0) % num_tiles) * N
    row0 = (tl.program_id(0) // num_tiles) * (M * GROUP)
    row_end = tl.minimum(row0 + M * GROUP, num_rows)
    group_rows = row0 + tl.arange(0, M * GROUP)
    most_visible = tl.max(tl.load(visible_ptr + group_rows, mask=group_rows < num_rows, other=0), 0)
    has_work = FILL or first < most_visible
    if WIDE:
        has_work = has_work and tl.load(left_ptr) > 0
    if has_work:
        entries = first + tl.arange(0, N)
        is_one = tl.load(chunks_ptr + row0) == tl.load(chunks_ptr + row_end - 1)
        # One sequence: unpack once. Several: once for each tile and sequence in it.
        step = tl.where(is_one, M * GROUP, M)
        for outer in range(row0, row_end, step):
            outer_end = tl.minimum(outer + step, row_end)
            first_chunk = tl.load(chunks_ptr + outer).to(tl.int32)
            last_chunk = tl.load(chunks_ptr + outer_end - 1).to(tl.int32)
            if last_chunk - first_chunk < MAX_SPAN:
                for chunk in range(first_chunk, last_chunk + 1):
                    rows = outer + tl.arange(0, M * GROUP)
                    is_mine = tl.load(chunks_ptr + rows, mask=rows < outer_end, other=-1) == chunk
                    limit = tl.max(tl.load(visible_ptr + rows, mask=is_mine, other=0), 0)
                    if FILL or first < limit:
                        k_mask = entries < limit
                        table = tables_ptr + (zero + chunk) * stride_table
                        if FP4:
                            k_base = _key_bases(
                                pool_ptr, table, entries, k_mask, ENTRIES_PER_BLOCK, D // 2 + D // 32
                            )
                            keys, k_exponents, k_wide = _unpack_fp4(k_base, k_mask, N, D, MAX_FOLD)
                            any_wide = tl.max(k_wide.to(tl.int32), 0) > 0
                        else:
                            k_base = _key_bases(pool_ptr, table, entries, k_mask, ENTRIES_PER_BLOCK, D)
                            keys = tl.load(
                                k_base[:, None] + tl.arange(0, D)[None, :], mask=k_mask[:, None], other=0.0
                            )
                            k_exponents, k_wide, any_wide = entries, k_mask, False
                        keys_t = keys.T
                        for tile in range(outer, outer_end, M):
                            _score_tile(
                                q_desc, q_ptr, scaled_ptr, exponents_ptr, wide_ptr, chunks_ptr, visible_ptr,
                                keys_t, k_base, k_mask, k_exponents, k_wide, any_wide, chunk, tile, first,
                                scores_ptr, maxima_ptr, left_ptr,
                                num_rows, num_entries, stride_scores, stride_maxima,
                                FP4, H, D, M, N, FACTOR, WIDE, NUM_STAGES,
                            )  # fmt: skip


@triton.jit
def _add_heads(acc, products, weights, N: tl.constexpr, H: tl.constexpr):
    """Heads 0 .. H - 1 in this order: products [N, H] int32 or fp32, weights [H], acc [N]."""
    if H == 1:
        if products.dtype == tl.int32:
            acc = _add_integers(acc, products.reshape(N), weights)
        else:
            acc = _add_floats(acc, products.reshape(N), weights)
    else:
        first, second = tl.split(products.reshape(N, 2, H // 2).permute(0, 2, 1))
        first_weights, second_weights = tl.split(weights.reshape(2, H // 2).permute(1, 0))
        acc = _add_heads(acc, first, first_weights, N, H // 2)
        acc = _add_heads(acc, second, second_weights, N, H // 2)
    return acc


@triton.jit
def score_rows_kernel(
    codes_ptr, q_ptr, scaled_ptr, exponents_ptr, wide_ptr, pool_ptr, tables_ptr, chunks_ptr, visible_ptr,
    blocks_ptr, scores_ptr, maxima_ptr,
    num_rows, num_entries, stride_table, stride_blocks, stride_scores, stride_maxima,
    FP4: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STRIP: tl.constexpr, LANES: tl.constexpr, FACTOR: tl.constexpr, MAX_FOLD: tl.constexpr,
    MAX_SPAN: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Scores of single rows, keys times heads: every LANES-th row of a tile of M, against STRIP entries.

    With ``blocks``, entry number i of a row is entry ``i % FACTOR`` of its i // FACTOR-th kept block.
    """
    row0 = (tl.program_id(0) // LANES) * M
    row_end = tl.minimum(row0 + M, num_rows)
    strip = tl.program_id(1) * STRIP
    span = tl.load(chunks_ptr + row_end - 1) - tl.load(chunks_ptr + row0)
    if span >= MAX_SPAN:
        for row in range(row0 + tl.program_id(0) % LANES, row_end, LANES):
            visible = tl.load(visible_ptr + row)
            table = tables_ptr + tl.load(chunks_ptr + row) * stride_table
            heads, dims = tl.arange(0, H), tl.arange(0, D)
            row64 = tl.full([], 0, tl.int64) + row
            weights = tl.load(scaled_ptr + row64 * H + heads)
            q_t = tl.load(codes_ptr + row64 * H * D + heads[None, :] * D + dims[:, None])
            if FP4:
                q_exponents = tl.load(exponents_ptr + row64 * H + heads)
                q_base = q_ptr + (row64 * H + heads) * (D // 2 + D // 32)
                wide_q = tl.load(wide_ptr + row) > 0
            end = tl.minimum(strip + STRIP, num_entries)
            if not FILL and blocks_ptr is None:
                end = tl.minimum(end, visible.to(tl.int32))
            for first in range(strip, end, N):
                numbers = first + tl.arange(0, N)
                mask = numbers < end
                entries = numbers
                if blocks_ptr is not None:
                    block = tl.load(
                        blocks_ptr + row64 * stride_blocks + numbers // FACTOR, mask=mask, other=-1
                    ).to(tl.int32)
                    entries = tl.maximum(block, 0) * FACTOR + numbers % FACTOR
                    mask &= block >= 0
                mask &= entries < visible
                if FP4:
                    k_base = _key_bases(pool_ptr, table, entries, mask, ENTRIES_PER_BLOCK, D // 2 + D // 32)
                    keys, k_exponents, k_wide = _unpack_fp4(k_base, mask, N, D, MAX_FOLD)
                    is_wide = wide_q | (tl.max(k_wide.to(tl.int32), 0) > 0)
                    scores = tl.zeros([N], tl.float32)
                    if is_wide:
                        by_group = _wide_products(
                            keys, q_t, k_base, mask, k_exponents, k_wide,
                            q_base, heads < H, q_exponents, q_exponents >= 0, D,
                        )  # fmt: skip
                        scores = _add_heads(scores, by_group, weights, N, H)
                    else:
                        integers = tl.dot(keys, q_t, out_dtype=tl.int32)
                        scores = _add_heads(scores, integers, weights, N, H)
                    scores *= _power_of_two(k_exponents) * _SUM_UNIT
                else:
                    k_base = _key_bases(pool_ptr, table, entries, mask, ENTRIES_PER_BLOCK, D)
                    keys = tl.load(k_base[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
                    products = tl.dot(keys, q_t, input_precision="ieee")
                    scores = _add_heads(tl.zeros([N], tl.float32), products, weights, N, H) * _SUM_UNIT
                scores = tl.where(mask, scores, float("-inf"))
                rows = tl.full([1], 0, tl.int32) + row
                _store_scores(
                    scores_ptr, maxima_ptr, scores[None, :], rows, rows < num_rows, first, num_entries,
                    stride_scores, stride_maxima, 1, N, FACTOR,
                )  # fmt: skip


@triton.jit
def relay_keys_kernel(
    pool_ptr, tables_ptr, codes_ptr, words_ptr, wide_ptr,
    num_entries, stride_table,
    ENTRIES_PER_BLOCK: tl.constexpr, D: tl.constexpr, N: tl.constexpr, MAX_FOLD: tl.constexpr,
):  # fmt: skip
    """Every entry of a sequence's table as ``score_listed_kernel`` reads it, and whether any is wide.

    Codes: bits 2 1 0 of a magnitude and its sign become bits 1 0 3 and 2; there is no negative zero. Words:
    the final scale, the sign set where wide, and two bits of shift a group in the lowest byte. Entries that
    nobody has stored yet give codes nobody reads; ``wide_ptr`` may then only be too careful.
    """
    sequence = tl.program_id(1).to(tl.int64)
    entries = tl.program_id(0) * N + tl.arange(0, N)
    mask = entries < num_entries
    base = _key_bases(
        pool_ptr, tables_ptr + sequence * stride_table, entries, mask, ENTRIES_PER_BLOCK, D // 2 + D // 32
    )
    groups = tl.arange(0, D // 32)
    where = base[:, None] + D // 2 + groups[None, :]
    exponents = tl.load(where, mask=mask[:, None], other=127).to(tl.int32)
    lowest, highest = tl.min(exponents, 1), tl.max(exponents, 1)
    is_wide = highest - lowest > MAX_FOLD
    shifts = tl.where(is_wide[:, None], 0, exponents - lowest[:, None])
    scale = _power_of_two(tl.where(is_wide, highest, lowest)) * _SUM_UNIT
    word = scale.to(tl.int32, bitcast=True) | tl.sum(shifts << (2 * groups[None, :]), 1)
    number = sequence * num_entries + entries
    tl.store(words_ptr + number, tl.where(is_wide, word | -2147483648, word), mask=mask)
    byte = tl.arange(0, D // 2)
    packed = tl.load(base[:, None] + byte[None, :], mask=mask[:, None], other=0).to(tl.int32)
    packed = tl.where((packed & 0x0F) == 0x08, packed & 0xF0, packed)
    packed = tl.where((packed & 0xF0) == 0x80, packed & 0x0F, packed)
    turned = ((packed >> 1) & 0x77) | ((packed << 3) & 0x88)
    tl.store(codes_ptr + number[:, None] * (D // 2) + byte[None, :], turned.to(tl.uint8), mask=mask[:, None])
    if tl.max((is_wide & mask).to(tl.int32), 0) > 0:
        tl.store(wide_ptr + sequence, 1)


@triton.jit
def score_listed_wide_kernel(
    q_codes_ptr, q_ptr, scaled_ptr, exponents_ptr, wide_q_ptr, k_words_ptr, wide_k_ptr,
    pool_ptr, tables_ptr, chunks_ptr, visible_ptr, blocks_ptr, scores_ptr,
    num_sequence_entries, num_entries, stride_table, stride_blocks, stride_scores,
    ENTRIES_PER_BLOCK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr, STRIP: tl.constexpr,
    FACTOR: tl.constexpr, MAX_FOLD: tl.constexpr,
):  # fmt: skip
    """What ``score_listed_kernel`` leaves: wide vectors among a row's entries, or all where the row is."""
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    strip = tl.program_id(1) * STRIP
    sequence = tl.load(chunks_ptr + row)
    wide_row = tl.load(wide_q_ptr + row)
    if wide_row + tl.load(wide_k_ptr + sequence) > 0:
        visible = tl.load(visible_ptr + row).to(tl.int32)
        heads, dims = tl.arange(0, H), tl.arange(0, D)
        weights = tl.load(scaled_ptr + row64 * H + heads)
        q_t = tl.load(q_codes_ptr + row64 * H * D + heads[None, :] * D + dims[:, None])
        q_exponents = tl.load(exponents_ptr + row64 * H + heads)
        q_base = q_ptr + (row64 * H + heads) * (D // 2 + D // 32)
        end = tl.minimum(strip + STRIP, num_entries)
        for first in range(strip, end, N):
            numbers = first + tl.arange(0, N)
            in_range = numbers < end
            block = tl.load(
                blocks_ptr + row64 * stride_blocks + numbers // FACTOR, mask=in_range, other=-1
            ).to(tl.int32)
            entries = block * FACTOR + numbers % FACTOR
            mask = (block >= 0) & (entries < visible)
            entries = tl.where(mask, entries, 0)
            word = tl.load(k_words_ptr + sequence * num_sequence_entries + entries)
            is_mine = mask & (word < 0)
            if wide_row + tl.sum(is_mine.to(tl.int32), 0) > 0:
                table = tables_ptr + sequence * stride_table
                k_base = _key_bases(pool_ptr, table, entries, mask, ENTRIES_PER_BLOCK, D // 2 + D // 32)
                keys, k_exponents, k_wide = _unpack_fp4(k_base, mask, N, D, MAX_FOLD)
                by_group = _wide_products(
                    keys, q_t, k_base, mask, k_exponents, k_wide,
                    q_base, heads < H, q_exponents, q_exponents >= 0, D,
                )  # fmt: skip
                scores = _add_heads(tl.zeros([N], tl.float32), by_group, weights, N, H)
                scores = tl.where(mask, scores * (_power_of_two(k_exponents) * _SUM_UNIT), float("-inf"))
                target = scores_ptr + row64 * stride_scores + numbers
                tl.store(target, scores, mask=in_range & (is_mine | (wide_row > 0)))
