"""Pools, rings and open groups: the bytes they take, what is read back, and moves between device and host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.block_manager import Move
from engine.config import KV_BLOCK_SIZE
from engine.kv_cache import CacheLayout, KVCache
from engine.models.deepseek_v41_config import DeepseekV41Config, parse_model_config
from kernels.number_formats import (
    pack_fp4_entry,
    pack_fp4_index,
    pack_fp8,
    unpack_fp4_entry,
    unpack_fp4_index,
    unpack_fp8,
)
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


@pytest.mark.parametrize("is_quantised", [True, False])
def test_what_is_written_is_read_back_in_the_models_rounding(is_quantised: bool) -> None:
    cache = build(is_quantised=is_quantised)
    entries, keys, window = torch.randn(5, 32), torch.randn(5, 32), torch.randn(5, 32)
    slots = torch.tensor([3, 40, 41, 100, 191])
    cache.write_entries(1, slots, entries, keys)
    packed = cache.pack_window(window)
    cache.write_window(2, torch.tensor([0, 1, 17, 40, 63]), packed)
    got = cache.read_entries(1, slots), cache.read_index_keys(1, slots), cache.unpack_window(packed)
    if is_quantised:
        wanted = (
            unpack_fp4_entry(pack_fp4_entry(entries)),
            unpack_fp4_index(pack_fp4_index(keys)),
            unpack_fp8(pack_fp8(window)),
        )
        assert torch.equal(cache.quantise_index_query(keys), wanted[1])
    else:
        wanted = (entries, keys, window)
        assert torch.equal(cache.quantise_index_query(keys), keys)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(cache.read_window(2, torch.tensor([17, 0])), packed[[2, 0]])
    # Another shape of slots, and another source, which nobody wrote.
    assert torch.equal(cache.read_entries(1, slots.view(5, 1))[:, 0], got[0])
    assert not cache.read_entries(3, slots).any()


def test_slot_minus_one_writes_nothing_that_is_read() -> None:
    cache = build(is_quantised=True)
    slots = torch.arange(6 * KV_BLOCK_SIZE // 2)
    cache.write_entries(1, slots, torch.ones(len(slots), 32), torch.ones(len(slots), 32))
    before = cache.read_entries(1, slots).clone()
    cache.write_entries(1, torch.full((3,), -1), torch.full((3, 32), 5.0), torch.full((3, 32), 5.0))
    assert torch.equal(cache.read_entries(1, slots), before)


def test_open_groups_are_kept_in_fp32() -> None:
    cache = build(is_quantised=True, dtype=torch.bfloat16)
    kept = torch.randn(2, 2, 32)
    cache.write_open_groups(1, torch.tensor([0, 3]), kept)
    assert torch.equal(cache.read_open_groups(1, torch.tensor([3, 0])), kept[[1, 0]])


def fill(cache: KVCache, block: int, state: int, seed: int) -> None:
    """Random content in one block of every source and one state of every layer."""
    generator = torch.Generator().manual_seed(seed)
    for source in CONFIG.kv_source_layer_ids:
        per_block = KV_BLOCK_SIZE // CONFIG.compress_ratios[source]
        slots = block * per_block + torch.arange(per_block)
        cache.write_entries(source, slots, *torch.randn(2, per_block, 32, generator=generator))
    for layer in range(CONFIG.num_hidden_layers):
        rows = state * CONFIG.sliding_window + torch.arange(CONFIG.sliding_window)
        cache.write_window(layer, rows, cache.pack_window(torch.randn(len(rows), 32, generator=generator)))
    cache.write_open_groups(1, torch.tensor([state]), torch.randn(1, 2, 32, generator=generator))


def content(cache: KVCache, block: int, state: int) -> list[torch.Tensor]:
    found = []
    for source in CONFIG.kv_source_layer_ids:
        per_block = KV_BLOCK_SIZE // CONFIG.compress_ratios[source]
        slots = block * per_block + torch.arange(per_block)
        found += [cache.read_entries(source, slots), cache.read_index_keys(source, slots)]
    for layer in range(CONFIG.num_hidden_layers):
        rows = state * CONFIG.sliding_window + torch.arange(CONFIG.sliding_window)
        found.append(cache.read_window(layer, rows))
    return [*found, cache.read_open_groups(1, torch.tensor([state]))]


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
