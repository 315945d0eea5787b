"""Where prompts part from each other: what a prefix cache is told before it can see it.

Owns one pure function over token ids; it must not know rows, leases or what a cache does with the answer.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress, count, pairwise

from engine.config import KV_BLOCK_SIZE

MIN_SHARED_TOKENS = KV_BLOCK_SIZE
"""A shorter prefix fills no KV block, so nothing of it can be kept."""


def shared_prefix_ends(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each prompt, ascending, the lengths of what it shares with its nearest neighbours in sorted order.

    A prompt's longest common prefix with any other is the one with a neighbour. Of equal prompts the last
    token is not counted: a row has to run to be answered.
    """
    order = sorted(range(len(prompts)), key=lambda index: list(prompts[index]))
    ends: list[set[int]] = [set() for _ in prompts]
    for left, right in pairwise(order):
        length = common_length(prompts[left], prompts[right])
        if length == len(prompts[left]) == len(prompts[right]):
            length -= 1
        if length >= MIN_SHARED_TOKENS:
            ends[left].add(length)
            ends[right].add(length)
    return [tuple(sorted(found)) for found in ends]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts have in common from the start."""
    differs = map(operator.ne, a, b)
    return next(compress(count(), differs), min(len(a), len(b)))
