"""Indexer scores of packed rows against paged keys: checks, tile choice and launches.

Owns what is scored and where it goes; which entries are then selected is ``selection``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.indexer.kernel import (
    WEIGHT_SHIFT,
    relay_keys_kernel,
    score_listed_wide_kernel,
    score_rows_kernel,
    score_tiles_kernel,
    unpack_queries_kernel,
)
from kernels.indexer.listed import DIM, HEADS, KEYS, score_listed_kernel
from kernels.indexer.pages import KeyPages

SCALE_GROUP = 32
MAX_FOLD = 3
"""Folding keeps |value * 2| <= 12 * 2^3 in int8."""
MAX_SPAN = 8
"""A tile of rows from more sequences than this is scored row by row."""
ANY_SPAN = 1 << 30
MAX_RELAID_BYTES = 48 << 20
"""Keys that fit here are laid out anew once a launch, where many rows read them."""
LISTED_STRIP = 2048
"""Entries of a program of ``score_listed_kernel``, which is one warp."""
FEW_ROWS = 16
"""Launches up to this size are scored row by row."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One launch's tiles; ``group`` query tiles share an unpacked tile of keys."""

    rows: int
    entries: int
    group: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # 168 lets three programs of four warps share a multiprocessor


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Single rows: ``lanes`` programs a tile, ``strip`` entries a program, ``entries`` at a time."""

    rows: int
    entries: int
    strip: int
    lanes: int
    num_warps: int


def choose_tile_config(num_rows: int, max_entries: int, dim: int, *, is_packed: bool) -> TileConfig:
    """Tiles of ``score_tiles_kernel``: all choices give equal bytes, products of packed keys being exact.

    Unquantised products have one tile. A group grows while every multiprocessor still has work.
    """
    if not is_packed:
        return TileConfig(rows=64, entries=64, group=1, num_warps=4, num_stages=2)
    group = 8
    while group > 1 and -(-num_rows // (64 * group)) * -(-max_entries // 128) < 1584:
        group //= 2
    return TileConfig(rows=64, entries=128, group=group, num_warps=4, num_stages=3, max_registers=168)


def choose_row_config(num_rows: int, num_entries: int, *, is_listed: bool) -> RowConfig:
    """Tiles of ``score_rows_kernel``; a row's entries are reduced one by one in every choice."""
    strip = 2048
    while strip > 256 and num_rows * -(-num_entries // strip) < 1056:
        strip //= 2
    lanes = 64 if is_listed or num_rows <= 1024 else 8
    return RowConfig(rows=64, entries=128, strip=strip, lanes=lanes, num_warps=4)


class _Queries(NamedTuple):
    codes: Tensor  # [num_rows, H, D] int8, or the float queries
    scaled_weights: Tensor  # [num_rows, H] fp32
    exponents: Tensor | None  # [num_rows, H] int32, -1 = narrow
    is_wide: Tensor | None  # [num_rows] int32


def _expect(name: str, is_right: bool, got: object, expected: object) -> None:
    if not is_right:
        raise ValueError(f"{name}: {got}, expected {expected}")


def check_inputs(q: Tensor, head_weights: Tensor, pages: KeyPages) -> None:
    """Raise ``ValueError`` for what the kernels cannot read."""
    _expect(
        "q", q.dim() == 3 and q.is_contiguous(), tuple(q.shape), "contiguous [num_rows, num_heads, width]"
    )
    num_rows, num_heads, width = q.shape
    keys = pages.keys
    _expect(
        "keys", keys.dim() == 2 and keys.is_contiguous(), tuple(keys.shape), "contiguous [num_slots, width]"
    )
    _expect("keys", keys.shape[1] == width, f"width {keys.shape[1]}", f"q's width {width}")
    _expect("keys", keys.dtype == q.dtype, keys.dtype, f"q's dtype {q.dtype}")
    _expect(
        "q", q.dtype in (torch.uint8, torch.bfloat16, torch.float16, torch.float32), q.dtype, "uint8 or float"
    )
    dim = index_dim(q)
    _expect(
        "q",
        dim in (32, 64, 128, 256) and _width(dim, q.dtype) == width,
        f"width {width}",
        "a dim of 32 .. 256",
    )
    _expect("q", num_heads in (16, 32, 64, 128), f"{num_heads} heads", "16, 32, 64 or 128")
    _expect(
        "head_weights",
        head_weights.shape == (num_rows, num_heads)
        and head_weights.dtype == torch.float32
        and head_weights.is_contiguous(),
        (tuple(head_weights.shape), head_weights.dtype),
        ((num_rows, num_heads), torch.float32),
    )
    for name, tensor in (("sequences", pages.sequences), ("num_visible", pages.num_visible)):
        _expect(name, tensor.shape == (num_rows,), tuple(tensor.shape), (num_rows,))
        _expect(
            name, tensor.dtype == torch.int64 and tensor.is_contiguous(), tensor.dtype, "contiguous int64"
        )
    tables = pages.block_tables
    _expect("block_tables", tables.dim() == 2 and tables.dtype == torch.int64, tables.dtype, "[n, m] int64")
    _expect("block_tables", tables.stride(1) == 1, tables.stride(), "a dense last axis")
    _expect("max_entries", pages.max_entries >= 1, pages.max_entries, "at least 1")
    for name, tensor in (("head_weights", head_weights), *zip(pages._fields[:4], pages[:4], strict=True)):
        _expect(name, tensor.device == q.device, tensor.device, q.device)


def _width(dim: int, dtype: torch.dtype) -> int:
    return dim // 2 + dim // SCALE_GROUP if dtype == torch.uint8 else dim


def index_dim(q: Tensor) -> int:
    """Channels of an index vector: 32 of them take 17 packed bytes."""
    return q.shape[2] * 32 // 17 if q.dtype == torch.uint8 else q.shape[2]


def _unpack_queries(q: Tensor, head_weights: Tensor) -> _Queries:
    """Integers and scales of packed queries; weights come in the kernels' unit."""
    if q.dtype != torch.uint8:
        return _Queries(q, head_weights * WEIGHT_SHIFT, None, None)
    num_rows, num_heads, dim = q.shape[0], q.shape[1], index_dim(q)
    codes = torch.empty((num_rows, num_heads, dim), dtype=torch.int8, device=q.device)
    scaled = torch.empty_like(head_weights)
    exponents = torch.empty((num_rows, num_heads), dtype=torch.int32, device=q.device)
    is_wide = torch.empty((num_rows,), dtype=torch.int32, device=q.device)
    unpack_queries_kernel[(num_rows,)](
        q, head_weights, codes, scaled, exponents, is_wide, head_weights.stride(0),
        H=num_heads, D=dim, MAX_FOLD=MAX_FOLD, num_warps=4,
    )  # fmt: skip
    return _Queries(codes, scaled, exponents, is_wide)


def _launch_tiles(
    q: Tensor,
    queries: _Queries,
    pages: KeyPages,
    scores: Tensor | None,
    maxima: Tensor | None,
    run: int,
    *,
    max_span: int,
    fills: bool,
) -> None:
    num_rows, num_heads, dim = queries.codes.shape
    is_packed = q.dtype == torch.uint8
    config = choose_tile_config(num_rows, pages.max_entries, dim, is_packed=is_packed)
    descriptor = TensorDescriptor.from_tensor(
        queries.codes.view(num_rows, num_heads * dim), [config.rows, dim]
    )
    grid = (
        triton.cdiv(pages.max_entries, config.entries) * triton.cdiv(num_rows, config.rows * config.group),
    )
    # Tiles with a wide vector are left to the second launch, which ends at once where there are none.
    left = torch.zeros((1,), dtype=torch.int32, device=q.device)
    for is_wide in (False, True) if is_packed else (False,):
        score_tiles_kernel[grid](
            descriptor, q, queries.scaled_weights, queries.exponents, queries.is_wide,
            pages.keys, pages.block_tables, pages.sequences, pages.num_visible, scores, maxima, left,
            num_rows, pages.max_entries, pages.block_tables.stride(0),
            0 if scores is None else scores.stride(0), 0 if maxima is None else maxima.stride(0),
            FP4=is_packed, ENTRIES_PER_BLOCK=pages.entries_per_block, H=num_heads, D=dim,
            M=config.rows, N=config.entries, GROUP=config.group, FACTOR=run, MAX_FOLD=MAX_FOLD,
            MAX_SPAN=max_span, FILL=fills, WIDE=is_wide, NUM_STAGES=config.num_stages,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
        )  # fmt: skip


def _launch_rows(
    q: Tensor,
    queries: _Queries,
    pages: KeyPages,
    blocks: Tensor | None,
    scores: Tensor | None,
    maxima: Tensor | None,
    run: int,
    *,
    min_span: int,
    fills: bool,
) -> None:
    num_rows, num_heads, dim = queries.codes.shape
    num_entries = pages.max_entries if blocks is None else blocks.shape[1] * run
    config = choose_row_config(num_rows, num_entries, is_listed=blocks is not None)
    grid = (triton.cdiv(num_rows, config.rows) * config.lanes, triton.cdiv(num_entries, config.strip))
    score_rows_kernel[grid](
        queries.codes, q, queries.scaled_weights, queries.exponents, queries.is_wide,
        pages.keys, pages.block_tables, pages.sequences, pages.num_visible, blocks, scores, maxima,
        num_rows, num_entries, pages.block_tables.stride(0), 0 if blocks is None else blocks.stride(0),
        0 if scores is None else scores.stride(0), 0 if maxima is None else maxima.stride(0),
        FP4=q.dtype == torch.uint8, ENTRIES_PER_BLOCK=pages.entries_per_block, H=num_heads, D=dim,
        M=config.rows, N=config.entries, STRIP=config.strip, LANES=config.lanes, FACTOR=run,
        MAX_FOLD=MAX_FOLD, MAX_SPAN=min_span, FILL=fills, num_warps=config.num_warps,
    )  # fmt: skip


def relaid_bytes(q: Tensor, pages: KeyPages) -> int:
    """Scratch for relaid keys of a launch over listed blocks; 0 where each row reads them as they are stored.

    A function of shapes and the device. Rows of decode read different keys, or the same few.
    """
    num_sequences = pages.block_tables.shape[0]
    is_shape = q.dtype == torch.uint8 and q.shape[1] == HEADS.value and index_dim(q) == DIM.value
    if not (is_shape and q.is_cuda and q.shape[0] >= 16 * num_sequences):
        return 0
    num_bytes = num_sequences * (pages.max_entries * (DIM.value // 2 + 4) + 4)
    return num_bytes if num_bytes <= MAX_RELAID_BYTES else 0


def _launch_listed(
    q: Tensor, queries: _Queries, pages: KeyPages, blocks: Tensor, scores: Tensor, run: int
) -> None:
    """Listed blocks out of keys laid out anew, once for all rows."""
    num_rows, num_heads, dim = queries.codes.shape
    num_sequences, num_entries = pages.block_tables.shape[0], blocks.shape[1] * run
    codes = torch.empty((num_sequences, pages.max_entries, dim // 8), dtype=torch.int32, device=q.device)
    words = torch.empty((num_sequences, pages.max_entries), dtype=torch.int32, device=q.device)
    any_wide = torch.zeros((num_sequences,), dtype=torch.int32, device=q.device)
    stride_table = pages.block_tables.stride(0)
    relay_keys_kernel[(triton.cdiv(pages.max_entries, 64), num_sequences)](
        pages.keys, pages.block_tables, codes.view(torch.uint8), words, any_wide,
        pages.max_entries, stride_table,
        ENTRIES_PER_BLOCK=pages.entries_per_block, D=dim, N=64, MAX_FOLD=MAX_FOLD, num_warps=4,
    )  # fmt: skip
    grid = (num_rows, triton.cdiv(num_entries, LISTED_STRIP))
    score_listed_kernel[grid](
        queries.codes, queries.scaled_weights, queries.is_wide, codes, words,
        pages.sequences, pages.num_visible, blocks, scores,
        pages.max_entries, num_entries, blocks.stride(0), scores.stride(0),
        STRIP=LISTED_STRIP, FACTOR=run, IS_EVEN=num_entries % KEYS.value == 0, num_warps=1, maxnreg=128,
    )  # fmt: skip
    score_listed_wide_kernel[grid](
        queries.codes, q, queries.scaled_weights, queries.exponents, queries.is_wide, words, any_wide,
        pages.keys, pages.block_tables, pages.sequences, pages.num_visible, blocks, scores,
        pages.max_entries, num_entries, stride_table, blocks.stride(0), scores.stride(0),
        ENTRIES_PER_BLOCK=pages.entries_per_block, H=num_heads, D=dim, N=KEYS.value,
        STRIP=LISTED_STRIP, FACTOR=run, MAX_FOLD=MAX_FOLD, num_warps=1,
    )  # fmt: skip


def launch_scores(
    q: Tensor,
    head_weights: Tensor,
    pages: KeyPages,
    scores: Tensor | None,
    maxima: Tensor | None,
    run: int,
    fills: bool,
) -> None:
    """Write scores, or maxima over runs of entries, or both; without ``fills`` only what a row sees."""
    queries = _unpack_queries(q, head_weights)
    num_rows = q.shape[0]
    if q.dtype != torch.uint8:
        # Only exact products may be computed in two ways.
        _launch_tiles(q, queries, pages, scores, maxima, run, max_span=ANY_SPAN, fills=fills)
    elif num_rows <= FEW_ROWS:
        _launch_rows(q, queries, pages, None, scores, maxima, run, min_span=0, fills=fills)
    else:
        _launch_tiles(q, queries, pages, scores, maxima, run, max_span=MAX_SPAN, fills=fills)
        if pages.block_tables.shape[0] > MAX_SPAN:
            _launch_rows(q, queries, pages, None, scores, maxima, run, min_span=MAX_SPAN, fills=fills)


def index_scores(q: Tensor, head_weights: Tensor, pages: KeyPages, *, out: Tensor | None = None) -> Tensor:
    """``s_j = sum_h a_h relu(q_h . k_j)`` for the entries that each row sees: the model page's section 6.

    Args:
        q: [num_rows, num_heads, width] contiguous, in the format of ``pages.keys``.
        head_weights: [num_rows, num_heads] fp32 contiguous.
        pages: the keys, and the rows' sequences and limits.
        out: [num_rows, pages.max_entries] fp32, last axis dense.

    Returns:
        ``out``: fp32, -inf from ``num_visible`` on. Heads are added in ascending order, each rounded once.

    Raises:
        ValueError: shape, dtype, layout or device.
    """
    check_inputs(q, head_weights, pages)
    shape = (q.shape[0], pages.max_entries)
    out = torch.empty(shape, dtype=torch.float32, device=q.device) if out is None else out
    check_output("out", out, shape, q.device)
    if q.shape[0]:
        launch_scores(q, head_weights, pages, out, None, 1, fills=True)
    return out


def candidate_scores(
    q: Tensor,
    head_weights: Tensor,
    pages: KeyPages,
    blocks: Tensor,
    *,
    block_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """Scores of the entries of each row's kept blocks only.

    Args:
        q, head_weights, pages: as for ``index_scores``.
        blocks: [num_rows, num_blocks] int32 or int64, last axis dense: block b holds entries
            ``b * block_size`` and on; -1 is none.
        block_size: a power of two, at most 64.
        out: [num_rows, num_blocks * block_size] fp32, last axis dense.

    Returns:
        ``out``: fp32, -inf where a block is none or the row does not see the entry. Bytes equal
        ``index_scores``' for packed keys.

    Raises:
        ValueError: shape, dtype, layout or device.
    """
    check_inputs(q, head_weights, pages)
    _expect("block_size", block_size in (1, 2, 4, 8, 16, 32, 64), block_size, "a power of two up to 64")
    is_right = blocks.dim() == 2 and blocks.shape[0] == q.shape[0] and blocks.stride(1) == 1
    _expect("blocks", is_right, tuple(blocks.shape), f"[{q.shape[0]}, n], last axis dense")
    _expect("blocks", blocks.dtype in (torch.int32, torch.int64), blocks.dtype, "int32 or int64")
    shape = (q.shape[0], blocks.shape[1] * block_size)
    out = torch.empty(shape, dtype=torch.float32, device=q.device) if out is None else out
    check_output("out", out, shape, q.device)
    if q.shape[0]:
        queries = _unpack_queries(q, head_weights)
        if relaid_bytes(q, pages):
            _launch_listed(q, queries, pages, blocks, out, block_size)
        else:
            _launch_rows(q, queries, pages, blocks, out, None, block_size, min_span=0, fills=True)
    return out


def check_output(name: str, out: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ``ValueError`` unless ``out`` is fp32 of this shape with a dense last axis."""
    is_right = (
        out.shape == shape and out.dtype == torch.float32 and out.stride(1) == 1 and out.device == device
    )
    _expect(name, is_right, (tuple(out.shape), out.dtype, out.stride(), out.device), (shape, torch.float32))
