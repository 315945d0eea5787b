"""Tile choice of linear layers. The order of a sum is a function of the weight's shape alone; rows only
choose how much of it one program does. It knows no tensors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import triton

HOPPER = (9, 0)
Product = Literal["fp32", "bf16", "fp8"]
"""What the operands are when they are multiplied."""
SLICE = 32
FEW_ROWS = 64
"""Launches up to this size give each part of a sum a program of its own."""
NUM_PROGRAMS = 256
MIN_PART_SLICES = 16
MAX_SPLITS = 8


class SumOrder(NamedTuple):
    """How a sum over the inputs is cut: parts of ``split_slices`` slices of 32, added in order."""

    num_splits: int
    split_slices: int
    unroll: int


class LinearConfig(NamedTuple):
    """Tiles of one launch."""

    block_out: int
    block_rows: int
    num_warps: int
    num_stages: int
    band: int


def choose_sum_order(group_out: int, in_features: int, num_groups: int, product: Product) -> SumOrder:
    """Parts enough that few rows keep the device busy, each long enough to hide its start.

    Products of 64 outputs and more on tensor cores have one part: their tiles are enough.
    """
    slices = max(1, -(-in_features // SLICE))
    tiles = num_groups * -(-group_out // 64)
    num_splits = 1
    while (
        (product == "fp32" or group_out < 64)
        and num_splits < MAX_SPLITS
        and tiles * num_splits < NUM_PROGRAMS
        and slices % (2 * num_splits) == 0
        and slices // (2 * num_splits) >= MIN_PART_SLICES
    ):
        num_splits *= 2
    split_slices = slices // num_splits
    unroll = 1
    while product != "fp32" and unroll < 4 and split_slices % (2 * unroll) == 0:
        unroll *= 2
    return SumOrder(num_splits, split_slices, unroll)


def choose_config(group_out: int, num_rows: int, product: Product) -> LinearConfig:
    """Below 64 outputs the tile is narrower for all row counts: another instruction, but always the same."""
    narrow = max(16, triton.next_power_of_2(group_out))
    if product == "fp32":
        return LinearConfig(min(32, narrow), 32, 4, 2, 8)
    if num_rows <= FEW_ROWS or narrow < 64:
        return LinearConfig(min(64, narrow), 16 if num_rows <= 16 else 64, 4, 6, 8)
    return LinearConfig(min(128, narrow), 128, 8, 3, 8)


class HopperConfig(NamedTuple):
    """Tiles of one launch of the Hopper kernel."""

    block_out: int
    block_rows: int
    num_stages: int
    band: int
    per_processor: int
    """Programs that run side by side on a multiprocessor."""


def runs_on_hopper_kernel(
    group_out: int, in_features: int, num_groups: int, product: Product, capability: tuple[int, int]
) -> bool:
    """Whether the device has the instructions and the weight is made of whole tiles; nothing else decides."""
    width = {"fp32": 0, "bf16": 64, "fp8": 128}[product]
    whole_out = 64 if num_groups == 1 else 128
    return capability == HOPPER and width > 0 and in_features % width == 0 and group_out % whole_out == 0


class StepTime(NamedTuple):
    """Nanoseconds of one step of 128 inputs."""

    lone: int
    """Of one program by itself."""
    full: int
    """Of as many programs as run side by side."""


HOPPER_TILES = {
    HopperConfig(64, 16, 8, 8, 2): StepTime(220, 490),
    HopperConfig(64, 64, 6, 8, 2): StepTime(310, 570),
    HopperConfig(128, 128, 6, 8, 1): StepTime(500, 540),
    HopperConfig(128, 256, 4, 8, 1): StepTime(945, 965),
}
"""Tiles that give equal bytes, and what they cost on an H200 with an even weight."""


def choose_hopper_config(num_out: int, num_rows: int, num_processors: int) -> HopperConfig:
    """The tiles that are through first. None changes a sum: each output adds the same parts in one order."""

    def cost(config: HopperConfig) -> float:
        slots = num_processors * config.per_processor
        tiles = -(-num_out // config.block_out) * -(-num_rows // config.block_rows)
        rounds, rest = divmod(tiles, slots)
        time = HOPPER_TILES[config]
        return rounds * time.full + (max(time.lone, time.full * rest / slots) if rest else 0)

    # A tile of which most would be empty reads more than it saves.
    fitting = [config for config in HOPPER_TILES if config.block_rows < max(2 * num_rows, 32)]
    return min(fitting, key=cost)
