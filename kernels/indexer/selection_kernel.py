# mypy: ignore-errors
"""Device code of the selection: the k best of a row, without sorting it.

Maxima over runs of a row, and over runs of those, bound where the best can be; a program then finds
the k-th best of a few thousand values by bisecting their bit patterns, and writes what is at or above
it in ascending order. Knows scores and numbers only, neither keys nor sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_maxima_kernel(
    values_ptr, limits_ptr, maxima_ptr, next_ptr, stride_values, stride_maxima, stride_next,
    LIMIT_FACTOR: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Maxima of BLOCK runs of FACTOR values of a row; values from the row's limit on count as -inf.

    ``next_ptr``: the maxima over runs of FACTOR of those go there.
    """
    row = tl.program_id(0).to(tl.int64)
    limit = tl.cdiv(tl.load(limits_ptr + row).to(tl.int32), LIMIT_FACTOR)
    first = tl.program_id(1) * BLOCK
    if first * FACTOR < limit:
        runs = first + tl.arange(0, BLOCK)
        columns = runs[:, None] * FACTOR + tl.arange(0, FACTOR)[None, :]
        source = values_ptr + row * stride_values + columns
        has_any = runs * FACTOR < limit
        # Whole runs are loaded where all exist in memory: a mask inside a run would make single loads of it.
        mask = has_any[:, None] & (IS_EVEN or columns < limit)
        values = tl.where(columns < limit, tl.load(source, mask=mask, other=float("-inf")), float("-inf"))
        maxima = tl.max(values, 1)
        tl.store(maxima_ptr + row * stride_maxima + runs, maxima, mask=has_any)
        if next_ptr is not None:
            next_runs = first // FACTOR + tl.arange(0, BLOCK // FACTOR)
            next_maxima = tl.max(maxima.reshape(BLOCK // FACTOR, FACTOR), 1)
            target = next_ptr + row * stride_next + next_runs
            tl.store(target, next_maxima, mask=next_runs * FACTOR * FACTOR < limit)


@triton.jit
def _write_numbers(target, place, number, names_ptr, is_chosen, NAME_FACTOR: tl.constexpr):
    """Chosen numbers, by name where there are names, to their places."""
    if names_ptr is not None:
        name = tl.load(names_ptr + number // NAME_FACTOR, mask=is_chosen, other=0)
        number = name.to(tl.int32) * NAME_FACTOR + number % NAME_FACTOR
    tl.store(target + place, number.to(target.dtype.element_ty), mask=is_chosen)


@triton.jit
def _choose_among_equals(
    target, order, number, threshold, names_ptr, K: tl.constexpr, NAME_FACTOR: tl.constexpr
):  # fmt: skip
    """What is above the threshold, then the first that equal it; -1 behind where there are too few."""
    above = order > threshold
    equal = (order == threshold) & (order > 0)
    num_above = tl.sum(above.to(tl.int32), 0)
    # One scan counts both: those above in the high half, the equal ones (at most WIDTH) in the low half.
    both = tl.cumsum((above.to(tl.int32) << 16) | equal.to(tl.int32), 0)
    above_before = (both >> 16) - above.to(tl.int32)
    equal_before = (both & 0xFFFF) - equal.to(tl.int32)
    room = K - num_above
    is_chosen = above | (equal & (equal_before < room))
    place = above_before + tl.minimum(equal_before, room)
    _write_numbers(target, place, number, names_ptr, is_chosen, NAME_FACTOR)
    num_chosen = num_above + tl.minimum(tl.sum(equal.to(tl.int32), 0), room)
    padding = tl.arange(0, triton.next_power_of_2(K))
    nothing = tl.full([triton.next_power_of_2(K)], -1, target.dtype.element_ty)
    tl.store(target + padding, nothing, mask=(padding >= num_chosen) & (padding < K))


@triton.jit
def select_kernel(
    values_ptr, limits_ptr, parents_ptr, names_ptr, selected_ptr,
    num_values, stride_values, stride_parents, stride_names, stride_selected,
    K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LIMIT_FACTOR: tl.constexpr,
    NAME_FACTOR: tl.constexpr, PIN: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """The K best of a row's candidates, lowest number first on ties, ascending, -1 behind.

    Candidates are numbers 0 .. num_values - 1, or with ``parents`` the children of each, of which there are
    WIDTH / GROUPS. A number's value is ``values[number]``; those from the row's limit (over LIMIT_FACTOR) on
    do not exist.
    PIN: the last that exists is best of all. What is written is the number, or with ``names`` child
    ``number % NAME_FACTOR`` of name ``number // NAME_FACTOR``.
    """
    row = tl.program_id(0).to(tl.int64)
    limit = tl.cdiv(tl.load(limits_ptr + row).to(tl.int32), LIMIT_FACTOR)
    # Candidates in groups, so that whole groups are loaded where they exist in memory; what is beyond the
    # row's limit there is nobody's.
    SPAN: tl.constexpr = WIDTH // GROUPS
    group, place_in_group = tl.arange(0, GROUPS), tl.arange(0, SPAN)
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + row * stride_parents + group, mask=group < K, other=-1)
        number = parent[:, None] * SPAN + place_in_group[None, :]
        exists = (parent >= 0)[:, None] & (number < limit)
        is_there = (parent >= 0)[:, None] & (IS_EVEN or number < limit)
    else:
        number = group[:, None] * SPAN + place_in_group[None, :]
        exists = number < tl.minimum(limit, num_values)
        is_there = number < num_values
    value = tl.load(values_ptr + row * stride_values + number, mask=is_there, other=float("-inf"))
    value = tl.where(exists, value, float("-inf"))
    if PIN:
        value = tl.where(number == limit - 1, float("inf"), value)
    # Order-preserving bits of a float, above 0 for what can be chosen; -0.0 becomes 0.0.
    value += 0.0
    bits = value.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    order = tl.where(value > float("-inf"), order, 0)
    # GROUPS >= K groups: K values are at or above the least of their maxima, and none is above the greatest.
    # The K-th best shares the bits that those two share; the search ends where exactly K are left.
    peaks = tl.max(order, 1)
    highest = tl.max(peaks, 0)
    spread = highest ^ tl.min(peaks, 0)
    spread |= spread >> 1
    spread |= spread >> 2
    spread |= spread >> 4
    spread |= spread >> 8
    spread |= spread >> 16
    order, number = order.reshape(WIDTH), number.reshape(WIDTH)
    threshold = highest & ~spread
    bit = spread ^ (spread >> 1)
    count = WIDTH + 1
    while (bit > 0) & (count != K):
        probe = threshold | bit
        num_at_least = tl.sum((order >= probe).to(tl.int32), 0)
        count = tl.where(num_at_least >= K, num_at_least, count)
        threshold = tl.where(num_at_least >= K, probe, threshold)
        bit = bit >> 1
    target = selected_ptr + row * stride_selected
    row_names_ptr = names_ptr
    if names_ptr is not None:
        row_names_ptr += row * stride_names
    if count == K:
        is_chosen = order >= threshold
        place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        _write_numbers(target, place, number, row_names_ptr, is_chosen, NAME_FACTOR)
    else:
        _choose_among_equals(target, order, number, threshold, row_names_ptr, K, NAME_FACTOR)
