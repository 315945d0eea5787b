"""How large the rooms are in which decode steps run, and what graphs of them may take. Numbers only."""

from __future__ import annotations

from engine.config import KV_BLOCK_SIZE

MAX_ROWS = 512
"""With more rows the device takes longer for a step than the host."""

MAX_GRAPHS = 32
"""A rank keeps no more: steps of further sizes are launched."""

GRAPH_BYTES_A_LAYER = 1 << 19
"""Device memory of one layer's launches in a graph; measured: 4 MiB for five layers, scratch included."""

_LEAST_TOKENS = 16 * KV_BLOCK_SIZE


def room_rows(num_rows: int) -> int:
    """Rows of the smallest room for so many: few sizes, so that few graphs serve a job."""
    unit = 32 if num_rows <= 128 else 128
    return -(-num_rows // unit) * unit


def room_tokens(num_tokens: int) -> int:
    """Tokens of the smallest room for a context of so many: a power of two."""
    return max(_LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())
