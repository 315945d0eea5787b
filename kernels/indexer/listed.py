"""Device code that scores entries of listed blocks: 32 heads of 128 channels, packed keys.

Keys are laid out anew once a launch and stay FP4 until they are in registers: every row reads other blocks,
so bytes out of the second-level cache are what such a launch is made of. A warp takes 32 entries at a time;
what a lane loads (32 channels that share an exponent) is, widened, what it multiplies, without shared memory.
Scores equal ``kernel.py``'s byte for byte: integer products are exact and heads are added in the same order.
Vectors that do not fit (wide ones, see there) are left to ``score_listed_wide_kernel``.
"""

# mypy: ignore-errors
# (The bodies of kernels are another language in Python's clothes.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

HEADS = gl.constexpr(32)
DIM = gl.constexpr(128)
KEYS = gl.constexpr(32)
SCALE_BITS = gl.constexpr(0x7F800000)
# A product starts from these bits, 1.5 * 2^23 as a float, and so ends as 1.5 * 2^23 + the integer.
START = gl.constexpr(0x4B400000)
FRACTION = gl.constexpr(2.0**-24)
WEIGHT_UNIT = gl.constexpr(2.0**-126)
# Lane 4 r + t holds group t of keys r, r + 8, r + 16 and r + 24; and of heads alike.
PACKED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [16, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[32, 16],
    )
)
# Key, group, word, and half a word's four channels.
WIDENED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0], [16, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[32, 4, 4, 4],
    )
)
QUERY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0], [16, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[32, 128],
    )
)
# A lane for a key, with all of its heads.
BY_KEY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[32, 32],
    )
)
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 4))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCT, 4))
LANE = gl.constexpr(gl.SliceLayout(1, BY_KEY))
KEY = gl.constexpr(gl.SliceLayout(1, PACKED))
WORD = gl.constexpr(gl.SliceLayout(3, WIDENED))
GROUP = gl.constexpr(gl.SliceLayout(2, WORD))

# Eight codes -> eight integers, in two registers. A code is a place (bits 0..2) in the first or the second
# (bit 3) table. prmt gives the sign of the byte at that place where bit 3 of its selector is set, so each
# table turns what the other one gives around where that is negative; the tables make up for it. (Four of
# each operand, because the result has four bytes: only the first is read.)
WIDEN = gl.constexpr("""
{
    .reg .b32 x, a, b;
    xor.b32 x, $2, 0x88888888;
    prmt.b32 a, $6, $10, $2;
    prmt.b32 b, $14, $18, x;
    xor.b32 $0, a, b;
    shr.u32 a, $2, 16;
    shr.u32 x, x, 16;
    prmt.b32 a, $6, $10, a;
    prmt.b32 b, $14, $18, x;
    xor.b32 $1, a, b;
}
""")


@gluon.jit
def _tables(shifts):
    """Both tables, of four bytes and four: 0 2 4 8 | (-0) -2 -4 -8 and 1 3 6 12 | -1 -3 -6 -12, shifted."""
    even = gl.full_like(shifts, 0x08040200) << shifts
    odd = gl.full_like(shifts, 0x0C060301) << shifts
    return even, even - 0x01010100, odd, (-2139062144 - odd) ^ -2139062144


@gluon.jit
def _by_byte(x):
    """[32, 4] -> [32, 4, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 2), 3)


@gluon.jit
def _widen(packed, word):
    """Codes [32, 16] and the words that hold their shifts [32, 4] -> int8 [32, 128] as an operand."""
    group = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, GROUP)), 0)
    even, even_behind, odd, odd_behind = _tables((word >> (2 * group)) & 3)
    packed = gl.convert_layout(packed.reshape([KEYS, 4, 4]), WORD, assert_trivial=True)
    packed = gl.expand_dims(packed, 3) + gl.zeros([KEYS, 4, 4, 4], gl.int32, WIDENED)
    low, high = gl.inline_asm_elementwise(
        WIDEN,
        "=&r,=&r" + ",r" * 20,
        [packed, _by_byte(even), _by_byte(even_behind), _by_byte(odd), _by_byte(odd_behind)],
        (gl.int8, gl.int8),
        True,
        4,
    )
    # [key, group, word, channel, half]: a group's channels are 8 word + 4 half + channel.
    codes = gl.join(low, high).permute((0, 2, 4, 1, 3)).reshape([KEYS, DIM])
    return gl.convert_layout(codes, LEFT, assert_trivial=True)


@gluon.jit
def _load_query(codes_ptr):
    """int8 [128, 32] as an operand, its channels in the order of ``_widen``."""
    head = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY))
    channel = gl.arange(0, DIM, gl.SliceLayout(0, QUERY))
    codes = gl.load(codes_ptr + head[:, None] * DIM + channel[None, :])
    codes = codes.reshape([HEADS, 4, 4, 2, 4]).permute((2, 3, 1, 4, 0)).reshape([DIM, HEADS])
    return gl.convert_layout(codes, RIGHT, assert_trivial=True)


@gluon.jit
def _add_heads(acc, products, weights, N: gl.constexpr):
    """Heads in ascending order: products [32, N] int32, weights [32, N], acc [32].

    The terms are ``kernel.py``'s, by operations that do not wait for the pipe that widens codes: an integer
    times 2^-24, twice what is positive of it, and weights times 2^-126; a power of two rounds nothing.
    """
    if N == 1:
        value = gl.convert_layout(products.reshape([KEYS]), LANE, assert_trivial=True)
        value = gl.fma(
            value.to(gl.float32, bitcast=True), gl.full_like(acc, FRACTION), gl.full_like(acc, -0.75)
        )
        value = value + gl.abs(value)
        weight = gl.convert_layout(weights.reshape([KEYS]), LANE, assert_trivial=True)
        acc = gl.fma(value, weight, acc)
    else:
        first, second = gl.split(products.reshape([KEYS, 2, N // 2]).permute((0, 2, 1)))
        first_weights, second_weights = gl.split(weights.reshape([KEYS, 2, N // 2]).permute((0, 2, 1)))
        acc = _add_heads(acc, first, first_weights, N // 2)
        acc = _add_heads(acc, second, second_weights, N // 2)
    return acc


@gluon.jit
def _entries(blocks_ptr, first, end, FACTOR: gl.constexpr, IS_EVEN: gl.constexpr, layout: gl.constexpr):
    """Numbers of 32 listed entries from ``first`` on, below 0 where there is none."""
    lane = gl.arange(0, KEYS, layout)
    if IS_EVEN:
        first = gl.minimum(first, end - KEYS)
    if FACTOR <= KEYS:
        at, place = first // FACTOR + lane // FACTOR, lane % FACTOR
    else:
        at, place = (first + lane) // FACTOR, (first + lane) % FACTOR
    if IS_EVEN:
        block = gl.load(blocks_ptr + at)
    else:
        block = gl.load(blocks_ptr + at, mask=first + lane < end, other=-1)
    return block.to(gl.int32) * FACTOR + place


@gluon.jit
def _clamped(entry, visible):
    """An entry that may be read, whatever it is where there is none."""
    return gl.minimum(entry.to(gl.uint32, bitcast=True), (gl.maximum(visible, 1) - 1).to(gl.uint32)).to(
        gl.int32
    )


@gluon.jit
def _load_keys(entry, codes_ptr, words_ptr):
    """Packed codes [32, 16] words, and each key's word as every lane of its groups holds it [32, 4]."""
    number = gl.arange(0, DIM // 8, gl.SliceLayout(0, PACKED))
    packed = gl.load(codes_ptr + entry.to(gl.int64)[:, None] * (DIM // 8) + number[None, :])
    at_group = gl.convert_layout(entry, gl.SliceLayout(1, GROUP), assert_trivial=True)
    group = gl.arange(0, 4, gl.SliceLayout(0, GROUP))
    return packed, gl.load(words_ptr + at_group[:, None] + 0 * group[None, :])


@gluon.jit
def score_listed_kernel(
    q_codes_ptr, weights_ptr, wide_q_ptr, k_codes_ptr, k_words_ptr, chunks_ptr, visible_ptr, blocks_ptr,
    scores_ptr,
    num_sequence_entries, num_entries, stride_blocks, stride_scores,
    STRIP: gl.constexpr, FACTOR: gl.constexpr, IS_EVEN: gl.constexpr,
):  # fmt: skip
    """One row against STRIP entries of its listed blocks; scores of narrow vectors only are written.

    Keys come as codes [entries, 16] and words [entries]: the scale's sign (set where wide) and exponent, and
    in its lowest byte two bits a group, by which that group's integers are shifted.
    """
    row = gl.program_id(0).to(gl.int64)
    strip = gl.program_id(1) * STRIP
    first_key = gl.load(chunks_ptr + row) * num_sequence_entries
    codes_ptr = k_codes_ptr + first_key * (DIM // 8)
    words_ptr = k_words_ptr + first_key
    row_blocks_ptr = blocks_ptr + row * stride_blocks
    visible = gl.load(visible_ptr + row).to(gl.int32)
    is_narrow = gl.load(wide_q_ptr + row) == 0
    end = gl.minimum(strip + STRIP, num_entries)
    if is_narrow:
        q = _load_query(q_codes_ptr + row * (HEADS * DIM))
        head = gl.arange(0, HEADS, gl.SliceLayout(0, BY_KEY))
        weights = (gl.load(weights_ptr + row * HEADS + head) * WEIGHT_UNIT)[None, :]
        weights = weights + gl.zeros([KEYS, HEADS], gl.float32, BY_KEY)
        entry = _clamped(_entries(row_blocks_ptr, strip, end, FACTOR, IS_EVEN, KEY), visible)
        packed, word = _load_keys(entry, codes_ptr, words_ptr)
        next_entry = _entries(row_blocks_ptr, strip + KEYS, end, FACTOR, IS_EVEN, KEY)
        for first in range(strip, end, KEYS):
            # Keys are loaded one piece ahead, their numbers two.
            next_packed, next_word = _load_keys(_clamped(next_entry, visible), codes_ptr, words_ptr)
            next_entry = _entries(row_blocks_ptr, first + 2 * KEYS, end, FACTOR, IS_EVEN, KEY)
            lane_entry = _entries(row_blocks_ptr, first, end, FACTOR, IS_EVEN, LANE)
            exists = lane_entry.to(gl.uint32, bitcast=True) < visible.to(gl.uint32)
            own_word = gl.load(words_ptr + _clamped(lane_entry, visible))
            start = gl.full([KEYS, HEADS], START, gl.int32, PRODUCT)
            products = gl.convert_layout(mma_v2(_widen(packed, word), q, start), BY_KEY)
            total = _add_heads(gl.zeros([KEYS], gl.float32, LANE), products, weights, HEADS)
            score = total * (own_word & SCALE_BITS).to(gl.float32, bitcast=True)
            score = gl.where(exists, score, float("-inf"))
            is_mine = (own_word >= 0) | ~exists
            number = first + gl.arange(0, KEYS, LANE)
            if not IS_EVEN:
                is_mine = is_mine & (number < end)
            gl.store(scores_ptr + row * stride_scores + number, score, mask=is_mine)
            packed = next_packed
            word = next_word
