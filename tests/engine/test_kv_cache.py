"""Pools, rings and open groups: the bytes they take, and moves between device and host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.block_manager import Move
from engine.config import KV_BLOCK_SIZE
from engine.kv_cache import CacheLayout, KVCache
from engine.models.deepseek_v41_config import DeepseekV41Config, parse_model_config
from tests.random_model import RandomModel

CONFIG = parse_model_config(RandomModel().config(is_quantised=False))
CPU = torch.device("cpu")


def build(*, is_quantised: bool, dtype: torch.dtype = torch.float32) -> KVCache:
    layout = CacheLayout(CONFIG, is_quantised, dtype)
    return KVCache(layout, num_blocks=6, num_states=4, num_host_blocks=5, num_host_states=3, device=CPU)


def flash_config() -> DeepseekV41Config:
    return replace(
        CONFIG,
        num_hidden_layers=40,
        head_dim=512,
        index_head_dim=128,
        sliding_window=128,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20),
        kv_source_layer_ids=(2, 8, 14, 20),
    )


def test_the_release_takes_890_bytes_a_token() -> None:
    """The model page's section 14, quantised and in bf16."""
    packed = CacheLayout(flash_config(), is_quantised=True, dtype=torch.bfloat16)
    assert packed.num_bytes_per_block == 890 * KV_BLOCK_SIZE
    assert packed.num_bytes_per_state == 40 * 67_584 + 3 * 4096
    plain = CacheLayout(flash_config(), is_quantised=False, dtype=torch.bfloat16)
    assert plain.num_bytes_per_block == 3200 * KV_BLOCK_SIZE


def tensors(cache: KVCache, block: int, state: int) -> list[torch.Tensor]:
    """Views of one block of every source and one state of every layer."""
    found = []
    for source in CONFIG.kv_source_layer_ids:
        per_block = KV_BLOCK_SIZE // CONFIG.compress_ratios[source]
        rows = slice(block * per_block, (block + 1) * per_block)
        found += [cache.entries[source][rows], cache.index_keys[source][rows]]
    window = CONFIG.sliding_window
    found += [ring[state * window : (state + 1) * window] for ring in cache.windows]
    return [*found, cache.open_groups[1][state : state + 1]]


def fill(cache: KVCache, block: int, state: int, seed: int) -> None:
    """Random content in one block of every source and one state of every layer."""
    generator = torch.Generator().manual_seed(seed)
    for view in tensors(cache, block, state):
        view.copy_(torch.randint(0, 255, view.shape, generator=generator))


def content(cache: KVCache, block: int, state: int) -> list[torch.Tensor]:
    return [view.clone() for view in tensors(cache, block, state)]


def check_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("is_quantised", [True, False])
def test_offloading_and_coming_back_elsewhere_keeps_every_byte(is_quantised: bool) -> None:
    cache = build(is_quantised=is_quantised)
    fill(cache, block=2, state=1, seed=1)
    fill(cache, block=5, state=3, seed=2)
    first, second = content(cache, 2, 1), content(cache, 5, 3)
    cache.apply(
        [
            Move("block", "device", "host", 2, 4),
            Move("block", "device", "host", 5, 0),
            Move("state", "device", "host", 1, 2),
            Move("state", "device", "host", 3, 0),
        ]
    )
    fill(cache, block=2, state=1, seed=3)
    cache.apply([Move("block", "host", "device", 4, 0), Move("state", "host", "device", 2, 2)])
    check_equal(content(cache, 0, 2), first)
    check_equal(content(cache, 5, 3), second)


def test_moves_are_carried_out_in_order() -> None:
    """A slot given away and taken in one step: the old content leaves before the new one enters."""
    cache = build(is_quantised=True)
    fill(cache, block=1, state=0, seed=1)
    fill(cache, block=3, state=1, seed=2)
    first, second = content(cache, 1, 0), content(cache, 3, 1)
    cache.apply([Move("block", "device", "host", 3, 2), Move("state", "device", "host", 1, 1)])
    cache.apply(
        [
            Move("block", "device", "host", 1, 0),
            Move("block", "host", "device", 2, 1),
            Move("block", "host", "device", 0, 4),
            Move("state", "device", "host", 0, 0),
            Move("state", "host", "device", 1, 0),
            Move("state", "host", "device", 0, 3),
        ]
    )
    check_equal(content(cache, 1, 0), second)
    check_equal(content(cache, 4, 3), first)


def test_a_cache_without_host_memory_or_sources() -> None:
    layout = CacheLayout(replace(CONFIG, kv_source_layer_ids=()), True, torch.float32)
    assert layout.num_bytes_per_block == 0
    cache = KVCache(layout, num_blocks=2, num_states=1, num_host_blocks=0, num_host_states=0, device=CPU)
    cache.apply([])
