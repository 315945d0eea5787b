"""Histograms of token counts that add up: fixed buckets, two to each doubling.

Owns the buckets' edges and the counting; it must not know what is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

_LARGEST_POWER = 24
EDGES: tuple[int, ...] = (
    0,
    1,
    2,
    *(edge for power in range(1, _LARGEST_POWER) for edge in (3 * 2 ** (power - 1), 2 ** (power + 1))),
)
"""Where each bucket begins: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ...; the last one has no end."""


def count_lengths(lengths: pa.Array | pa.ChunkedArray) -> dict[str, int]:
    """How many of ``lengths`` lie in each bucket, by the bucket's first length; no empty buckets."""
    values = np.asarray(lengths.drop_null().to_numpy(), dtype=np.int64)
    found, counts = np.unique(np.searchsorted(EDGES, values, side="right") - 1, return_counts=True)
    return {str(EDGES[bucket]): int(count) for bucket, count in zip(found, counts, strict=True)}


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The counts of both, by name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted({*one, *other})}
