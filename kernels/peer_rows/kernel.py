"""Device code of rows that one rank stores into the memory of others: copies, no arithmetic on them.

A peer's memory is an address. Programs that lie beside each other write to different ranks, so that all links
and the own memory are busy at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rank"])
def send_rows_kernel(
    values_ptr, ids_ptr, weights_ptr, scales_ptr, inboxes_ptr, num_rows, most, rank,
    ids_at, weights_at, scales_at,
    SIZE: tl.constexpr, NUM_OWN: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr, BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    """One place of one rank's inbox: its expert ids, and the rest where one of them is that rank's."""
    target = tl.program_id(0) % SIZE
    row = (tl.program_id(0) // SIZE).to(tl.int64)
    place = tl.cast(rank, tl.int64) * most + row
    inbox = tl.load(inboxes_ptr + target)
    slot = tl.arange(0, BLOCK_K)
    is_slot = slot < TOP_K
    is_chosen = slot < tl.where(row < num_rows, TOP_K, 0)  # none behind the last row
    ids = tl.load(ids_ptr + row * TOP_K + slot, mask=is_chosen, other=-1) - target * NUM_OWN
    is_there = (ids >= 0) & (ids < NUM_OWN) & is_chosen
    ids_ptrs = (inbox + ids_at).to(tl.pointer_type(tl.int64)) + place * TOP_K + slot
    tl.store(ids_ptrs, tl.where(is_there, ids, -1), mask=is_slot)
    if tl.max(is_there.to(tl.int32), 0) > 0:
        weights = tl.load(weights_ptr + row * TOP_K + slot, mask=is_slot)
        weights_ptrs = (inbox + weights_at).to(tl.pointer_type(tl.float32)) + place * TOP_K + slot
        tl.store(weights_ptrs, weights, mask=is_slot)
        if SCALES > 0:
            part = tl.arange(0, BLOCK_SCALES)
            scales = tl.load(scales_ptr + row * SCALES + part, mask=part < SCALES)
            scales_ptrs = (inbox + scales_at).to(tl.pointer_type(tl.uint8)) + place * SCALES + part
            tl.store(scales_ptrs, scales, mask=part < SCALES)
        target_ptr = tl.multiple_of(inbox.to(tl.pointer_type(tl.int64)), 16) + place * WORDS
        for start in tl.static_range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            words = tl.load(values_ptr + row * WORDS + word, mask=word < WORDS)
            tl.store(target_ptr + word, words, mask=word < WORDS)
