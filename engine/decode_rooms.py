"""How large the rooms of decode steps are, and what they and their graphs may take. Numbers only."""

from __future__ import annotations

from engine.config import KV_BLOCK_SIZE, padded

MAX_ROWS = 512
"""With more rows the device takes longer for a step than the host."""

MAX_GRAPHS = 32
"""A rank keeps no more: steps of further sizes are launched."""

GRAPH_BYTES_A_LAYER = 1 << 19
"""Device memory of one layer's launches in a graph; measured: 4 MiB for five layers, scratch included."""

_LEAST_TOKENS = 16 * KV_BLOCK_SIZE


def room_rows(num_rows: int, most: int) -> int:
    """Rows of the smallest room for so many: few sizes, so that few graphs serve a job.

    ``most``: of the largest room.
    """
    unit = 32 if num_rows <= 128 else 128
    return min(-(-num_rows // unit) * unit, most)


def most_room_rows(max_num_seqs: int, max_num_rows: int) -> int:
    """Rows of the largest room, where a step has so many sequences at most, and so many rows of any kind.

    Whatever is sized by a step holds its rows and their padding, and no more.
    """
    return room_rows(min(max_num_seqs, max_num_rows, MAX_ROWS), padded(max_num_rows))


def room_tokens(num_tokens: int) -> int:
    """Tokens of the smallest room for a context of so many: a power of two."""
    return max(_LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())


def room_bytes(most_rows: int, max_tokens: int) -> int:
    """What ``DecodeBuffers`` can come to take: the largest room's facts, and block tables by context."""
    # A context's sizes are the least one, and each twice the one before.
    num_blocks = (2 * room_tokens(max_tokens) - _LEAST_TOKENS) // KV_BLOCK_SIZE
    return most_rows * (3 + num_blocks) * 8
