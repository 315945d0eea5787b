"""The best entries and candidate blocks of packed rows, within a bounded scratch.

Query tiles are as large as the scratch allows. Nothing is sorted: the best k of a row lie in its best k
blocks (by their maxima, ties by number), so that most scores are written once and never read.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.indexer.op import candidate_scores, check_inputs, index_dim, launch_scores, relaid_bytes
from kernels.indexer.pages import KeyPages, SelectedEntries
from kernels.indexer.selection_kernel import run_maxima_kernel, select_kernel

RUN = 8
"""Values under one maximum."""
LEAST_SCRATCH_BYTES = 16 << 20


def _run_maxima(
    values: Tensor, limits: Tensor, limit_factor: int, run: int, *, is_twice: bool
) -> list[Tensor]:
    """The maxima over runs of values, and where asked those over runs of them."""
    num_rows, num_values = values.shape
    num_runs = -(-num_values // run)
    maxima = torch.empty((num_rows, num_runs), dtype=torch.float32, device=values.device)
    block = min(512, triton.next_power_of_2(num_runs))
    above = None
    if is_twice:
        above = torch.empty((num_rows, -(-num_runs // run)), dtype=torch.float32, device=values.device)
    run_maxima_kernel[(num_rows, triton.cdiv(num_runs, block))](
        values, limits, maxima, above,
        values.stride(0), maxima.stride(0), 0 if above is None else above.stride(0),
        LIMIT_FACTOR=limit_factor, FACTOR=run, BLOCK=block, IS_EVEN=num_values % run == 0, num_warps=4,
    )  # fmt: skip
    return [maxima] if above is None else [maxima, above]


def _select(
    values: Tensor,
    limits: Tensor,
    parents: Tensor | None,
    names: Tensor | None,
    out: Tensor,
    *,
    k: int,
    run: int,
    limit_factor: int,
    name_factor: int,
    pins_newest: bool,
) -> None:
    num_values = values.shape[1]
    groups = triton.next_power_of_2(k)
    if parents is None:
        width = max(triton.next_power_of_2(num_values), groups, 128)
    else:
        width = max(groups * run, 128)
        groups = width // run
    select_kernel[(values.shape[0],)](
        values, limits, parents, names, out,
        num_values, values.stride(0), 0 if parents is None else parents.stride(0),
        0 if names is None else names.stride(0), out.stride(0),
        K=k, WIDTH=width, GROUPS=groups, LIMIT_FACTOR=limit_factor, NAME_FACTOR=name_factor, PIN=pins_newest,
        IS_EVEN=num_values % run == 0, num_warps=min(max(width // 512, 4), 32), maxnreg=64,
    )  # fmt: skip


def select_topk(
    values: Tensor,
    limits: Tensor,
    *,
    k: int,
    limit_factor: int = 1,
    pins_newest: bool = False,
    names: Tensor | None = None,
    name_factor: int = 1,
    maxima: Tensor | None = None,
    run: int = RUN,
    out: Tensor | None = None,
) -> Tensor:
    """The k best values of each row, lowest number first on ties; only what is above -inf.

    Args:
        values: [num_rows, num_values] fp32, last axis dense.
        limits: [num_rows] int64; numbers from ``ceil(limit / limit_factor)`` on do not exist.
        k: how many.
        limit_factor: entries under one value.
        pins_newest: the last number that exists is chosen whatever its value.
        names: [num_rows, n] int32 or int64; number i is then called ``names[i // name_factor] *
            name_factor + i % name_factor``. Names are ascending.
        name_factor: numbers under one name.
        maxima: [num_rows, ceil(num_values / run)] fp32, last axis dense: the maxima over runs of values,
            where the caller has them.
        run: values under one maximum, a power of two.
        out: [num_rows, k] int32 or int64, last axis dense.

    Returns:
        ``out`` (int64 where not given): ascending, -1 behind.

    Raises:
        ValueError: shape, dtype or layout.
    """
    num_rows = values.shape[0]
    if values.dim() != 2 or values.dtype != torch.float32 or values.stride(1) != 1:
        raise ValueError(
            f"values: {tuple(values.shape)} {values.dtype}, expected [n, m] fp32 with a dense last axis"
        )
    if limits.shape != (num_rows,) or limits.dtype != torch.int64 or not limits.is_contiguous():
        raise ValueError(
            f"limits: {tuple(limits.shape)} {limits.dtype}, expected contiguous ({num_rows},) int64"
        )
    if not 1 <= k <= 4096:
        raise ValueError(f"k: {k}, expected 1 .. 4096")
    if names is not None and (names.shape[0] != num_rows or names.stride(1) != 1):
        raise ValueError(f"names: {tuple(names.shape)}, expected [{num_rows}, n] with a dense last axis")
    out = torch.empty((num_rows, k), dtype=torch.int64, device=values.device) if out is None else out
    if out.shape != (num_rows, k) or out.stride(1) != 1:
        raise ValueError(f"out: {tuple(out.shape)}, expected {(num_rows, k)} with a dense last axis")
    if num_rows == 0:
        return out
    levels = [(values, limit_factor)]
    if maxima is not None and values.shape[1] > num_values_at_once(k, run):
        levels.append((maxima, limit_factor * run))
    while levels[-1][0].shape[1] > num_values_at_once(k, run):
        below, factor = levels[-1]
        is_twice = -(-below.shape[1] // run) > num_values_at_once(k, run)
        for above in _run_maxima(below, limits, factor, run, is_twice=is_twice):
            factor *= run
            levels.append((above, factor))
    parents = None
    for number in reversed(range(len(levels))):
        level, factor = levels[number]
        chosen = out if number == 0 else torch.empty((num_rows, k), dtype=torch.int32, device=values.device)
        _select(
            level, limits, parents, names if number == 0 else None, chosen,
            k=k, run=run, limit_factor=factor, name_factor=name_factor, pins_newest=pins_newest,
        )  # fmt: skip
        parents = chosen
    return out


def num_values_at_once(k: int, run: int) -> int:
    """How many values of a row one program looks at: the runs of the k best maxima, and at least a few."""
    return max(run * k, 1024)


def default_scratch_bytes(num_rows: int, query_width: int) -> int:
    """Three fp32 copies of the queries: with the step's size, never with the context's."""
    return max(12 * num_rows * query_width, LEAST_SCRATCH_BYTES)


def rows_per_tile(num_bytes_per_row: int, scratch_bytes: int) -> int:
    """Query rows of one scoring launch: as many as the scratch holds, whole groups where it can."""
    rows = max(scratch_bytes // num_bytes_per_row, 1)
    return rows // 512 * 512 if rows >= 512 else rows // 64 * 64 if rows >= 64 else rows


def _num_bytes_of_levels(num_values: int, k: int, run: int) -> int:
    """Levels above the values of one row, and the selections on the way down."""
    total = 0
    while num_values > num_values_at_once(k, run):
        num_values = -(-num_values // run)
        total += 4 * (num_values + k)
    return total


def select_entries(
    q: Tensor,
    head_weights: Tensor,
    pages: KeyPages,
    *,
    k: int,
    block_size: int,
    num_blocks: int = 0,
    blocks: Tensor | None = None,
    scratch_bytes: int | None = None,
) -> SelectedEntries:
    """Score and select for every row: the model page's section 6.

    Args:
        q, head_weights, pages: as for ``index_scores``.
        k: entries to select.
        block_size: entries of a candidate block, a power of two.
        num_blocks: candidate blocks to keep as well (the newest is pinned); 0 for none.
        blocks: [num_rows, n] kept blocks, ascending, -1 behind: select among their entries only.
        scratch_bytes: the most this call allocates beside its results; ``default_scratch_bytes`` if None.

    Returns:
        Ties go to the lowest index; both are ascending with -1 behind.

    Raises:
        ValueError: shape, dtype, layout or device; ``num_blocks`` together with ``blocks``.
    """
    check_inputs(q, head_weights, pages)
    if blocks is not None and num_blocks:
        raise ValueError(f"num_blocks: {num_blocks}, expected 0 where blocks are given")
    num_rows, device = q.shape[0], q.device
    if scratch_bytes is None:
        scratch_bytes = default_scratch_bytes(num_rows, q.shape[1] * index_dim(q))
    entries = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    kept = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=device) if num_blocks else None
    dim = index_dim(q)
    num_query_bytes = q.shape[1] * (dim + 8) + 8
    num_maxima = -(-pages.max_entries // block_size)
    # Products of packed keys are exact and can be repeated; few entries are not worth it.
    is_long = (
        blocks is None
        and q.dtype == torch.uint8
        and pages.max_entries > 4 * num_values_at_once(k, block_size)
    )
    if blocks is None:
        num_values = k * block_size if is_long else pages.max_entries
        per_row = 4 * num_maxima + _num_bytes_of_levels(num_maxima, max(num_blocks, k), RUN)
        per_row += _num_bytes_of_levels(num_values, k, block_size)
        scratch_bytes -= relaid_bytes(q, pages) if is_long else 0
    else:
        num_values = blocks.shape[1] * block_size
        per_row = _num_bytes_of_levels(num_values, k, RUN)
        scratch_bytes -= relaid_bytes(q, pages)
    per_row += 4 * num_values
    step = rows_per_tile(per_row + num_query_bytes, scratch_bytes)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        tile = pages._replace(sequences=pages.sequences[rows], num_visible=pages.num_visible[rows])
        arguments = (q[rows], head_weights[rows], tile)
        if blocks is not None:
            _select_listed(*arguments, blocks[rows], entries[rows], k, block_size)
        elif is_long:
            _select_long(*arguments, entries[rows], None if kept is None else kept[rows], k, block_size)
        else:
            _select_dense(*arguments, entries[rows], None if kept is None else kept[rows], k, block_size)
    return SelectedEntries(entries, kept)


def _select_listed(
    q: Tensor, head_weights: Tensor, pages: KeyPages, blocks: Tensor, entries: Tensor, k: int, block_size: int
) -> None:
    """Among the entries of listed blocks. Their numbers ascend with the entries, so ties are the same."""
    scores = candidate_scores(q, head_weights, pages, blocks, block_size=block_size)
    everything = torch.full_like(pages.num_visible, scores.shape[1])
    select_topk(scores, everything, k=k, names=blocks, name_factor=block_size, out=entries)


def _select_long(
    q: Tensor,
    head_weights: Tensor,
    pages: KeyPages,
    entries: Tensor,
    kept: Tensor | None,
    k: int,
    block_size: int,
) -> None:
    """Block maxima only, no score matrix; then the best k blocks once more, entry by entry: equal bytes."""
    num_rows, num_blocks = q.shape[0], -(-pages.max_entries // block_size)
    maxima = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=q.device)
    launch_scores(q, head_weights, pages, None, maxima, block_size, fills=False)
    if kept is not None:
        _select_blocks(maxima, pages, kept, block_size)
    best = torch.empty((num_rows, k), dtype=torch.int32, device=q.device)
    select_topk(maxima, pages.num_visible, k=k, limit_factor=block_size, out=best)
    del maxima
    _select_listed(q, head_weights, pages, best, entries, k, block_size)


def _select_dense(
    q: Tensor,
    head_weights: Tensor,
    pages: KeyPages,
    entries: Tensor,
    kept: Tensor | None,
    k: int,
    block_size: int,
) -> None:
    """Over the scores of all entries, whose block maxima come from the same launch."""
    num_rows, num_blocks = q.shape[0], -(-pages.max_entries // block_size)
    scores = torch.empty((num_rows, pages.max_entries), dtype=torch.float32, device=q.device)
    maxima = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=q.device)
    launch_scores(q, head_weights, pages, scores, maxima, block_size, fills=False)
    select_topk(scores, pages.num_visible, k=k, maxima=maxima, run=block_size, out=entries)
    if kept is not None:
        _select_blocks(maxima, pages, kept, block_size)


def _select_blocks(maxima: Tensor, pages: KeyPages, kept: Tensor, block_size: int) -> None:
    k = kept.shape[1]
    select_topk(maxima, pages.num_visible, k=k, limit_factor=block_size, pins_newest=True, out=kept)
