"""How large the rooms of decode steps are, and what they and their graphs may take. Numbers only."""

from __future__ import annotations

from engine.config import KV_BLOCK_SIZE

MAX_ROWS = 512
"""With more rows the device takes longer for a step than the host."""

MAX_GRAPHS = 32
"""A rank keeps no more: steps of further sizes are launched."""

GRAPH_BYTES_A_LAYER = 1 << 19
"""Device memory of one layer's launches in a graph; measured: 4 MiB for five layers, scratch included."""

_LEAST_TOKENS = 16 * KV_BLOCK_SIZE


def room_rows(num_rows: int, most: int) -> int:
    """Rows of the smallest room for so many: few sizes, so that few graphs serve a job.

    ``most``: of a step of any kind, padding included. Whatever is sized by a step holds no more.
    """
    unit = 32 if num_rows <= 128 else 128
    return min(-(-num_rows // unit) * unit, most)


def room_tokens(num_tokens: int) -> int:
    """Tokens of the smallest room for a context of so many: a power of two."""
    return max(_LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())


def room_bytes(max_rows: int, max_tokens: int) -> int:
    """Block tables of all rooms that steps of so many rows, in contexts up to so many tokens, can need."""
    rows = sum({room_rows(num_rows, MAX_ROWS) for num_rows in range(1, max_rows + 1)})
    # Each size of a context is half of the next one.
    return rows * 2 * (room_tokens(max_tokens) // KV_BLOCK_SIZE) * 8
