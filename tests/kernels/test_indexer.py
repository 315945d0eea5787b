"""The indexer's ops through the contract, their arguments' checks, and their tile choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from kernels.indexer import KeyPages, candidate_scores, index_scores, select_entries, select_topk
from kernels.indexer.kernel import relay_keys_kernel
from kernels.indexer.op import MAX_FOLD, choose_row_config, choose_tile_config
from kernels.indexer.selection import default_scratch_bytes, rows_per_tile
from kernels.number_formats import unpack_fp4_index
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.indexer_cases import BLOCK_SIZE, CASES, ONE, build, index_vectors, pages_of


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


def small() -> tuple[torch.Tensor, torch.Tensor, KeyPages]:
    inputs = build(0, torch.device("cpu"), chunks=ONE, heads=16, dim=32, spread=1, dtype=torch.uint8)
    return inputs["q"], inputs["head_weights"], pages_of(inputs)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("q", lambda q, w, p: index_scores(q[:, :, :-1], w, p)),
        ("q", lambda q, w, p: index_scores(q[:, :9].contiguous(), w[:, :9].contiguous(), p)),
        ("head_weights", lambda q, w, p: index_scores(q, w.double(), p)),
        ("head_weights", lambda q, w, p: index_scores(q, w[1:], p)),
        ("keys", lambda q, w, p: index_scores(q, w, p._replace(keys=p.keys.float()))),
        ("keys", lambda q, w, p: index_scores(q, w, p._replace(keys=p.keys[:, 1:].contiguous()))),
        ("sequences", lambda q, w, p: index_scores(q, w, p._replace(sequences=p.sequences.int()))),
        ("num_visible", lambda q, w, p: index_scores(q, w, p._replace(num_visible=p.num_visible[1:]))),
        ("block_tables", lambda q, w, p: index_scores(q, w, p._replace(block_tables=p.block_tables.int()))),
        ("out", lambda q, w, p: index_scores(q, w, p, out=torch.empty(1, 1))),
        ("blocks", lambda q, w, p: candidate_scores(q, w, p, p.num_visible[:1, None], block_size=8)),
        ("block_size", lambda q, w, p: candidate_scores(q, w, p, p.num_visible[:, None], block_size=6)),
        ("num_blocks", lambda q, w, p: select_entries(
            q, w, p, k=4, block_size=8, num_blocks=2, blocks=p.num_visible[:, None])),
        ("values", lambda q, w, p: select_topk(w.double(), p.num_visible, k=3)),
        ("limits", lambda q, w, p: select_topk(w, p.num_visible.int(), k=3)),
        ("k", lambda q, w, p: select_topk(w, p.num_visible, k=0)),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .*expected"):
        call(*small())


def test_no_rows() -> None:
    q, weights, pages = small()
    none = pages._replace(sequences=pages.sequences[:0], num_visible=pages.num_visible[:0])
    assert index_scores(q[:0], weights[:0], none).shape == (0, pages.max_entries)
    assert select_entries(q[:0], weights[:0], none, k=4, block_size=BLOCK_SIZE).entries.shape == (0, 4)


def test_tile_choices() -> None:
    assert choose_tile_config(4096, 131_072, 128, is_packed=True).group == 8
    assert choose_tile_config(128, 4096, 128, is_packed=True).group == 1
    # Products that are not exact have one tile, whatever the launch.
    assert (
        len({choose_tile_config(t, n, 128, is_packed=False) for t in (1, 64, 4096) for n in (1, 131_072)})
        == 1
    )
    assert choose_row_config(64, 131_072, is_listed=False).strip == 2048
    assert choose_row_config(1, 131_072, is_listed=False).strip == 256


# What four bits of a relaid key mean: ``score_listed_kernel``'s tables.
RELAID_VALUES = torch.tensor([0, 2, 4, 8, 0, -2, -4, -8, 1, 3, 6, 12, -1, -3, -6, -12], dtype=torch.float64)


def test_relaid_keys_have_the_same_values() -> None:
    """Every code in every place, with all shifts, and wide vectors; entries come in the order of the table."""
    if contract_device().type == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("needs a GPU or the interpreter")
    g = torch.Generator().manual_seed(0)
    keys = index_vectors((64, 128), 5, g, torch.uint8)
    keys[:, :64] = torch.randint(0, 256, (64, 64), generator=g, dtype=torch.uint8)
    device = contract_device()
    codes = torch.empty((1, 64, 16), dtype=torch.int32, device=device)
    words = torch.empty((1, 64), dtype=torch.int32, device=device)
    any_wide = torch.zeros((1,), dtype=torch.int32, device=device)
    relay_keys_kernel[(1, 1)](
        keys.to(device), torch.tensor([[1, 0]], device=device), codes.view(torch.uint8), words, any_wide, 64, 2,
        ENTRIES_PER_BLOCK=32, D=128, N=64, MAX_FOLD=MAX_FOLD,
    )  # fmt: skip
    packed, word = codes.view(torch.uint8)[0].cpu().long(), words[0].cpu()
    numbers = RELAID_VALUES[torch.stack([packed & 15, packed >> 4], -1).flatten(1)]
    shifts = (word[:, None] >> (2 * torch.arange(4))) & 3
    scale = (word & 0x7F800000).view(torch.float32).double() * 2.0**-46  # the kernels' unit, and halves
    values = numbers * torch.exp2(shifts.double()).repeat_interleave(32, 1) * scale[:, None]
    expected = unpack_fp4_index(torch.cat([keys[32:], keys[:32]])).double()
    exponents = torch.cat([keys[32:, 64:], keys[:32, 64:]]).int()
    is_wide = exponents.amax(1) - exponents.amin(1) > MAX_FOLD
    assert 0 < is_wide.sum() < 64
    assert any_wide.item() == 1
    assert torch.equal(word < 0, is_wide)
    assert torch.equal(values[~is_wide], expected[~is_wide])


def test_scratch_bounds_a_tile() -> None:
    assert rows_per_tile(1 << 10, 192 << 20) % 512 == 0
    for num_bytes in (1, 1000, 98_000, 600_000, 1 << 30):
        assert 1 <= rows_per_tile(num_bytes, 192 << 20) <= max((192 << 20) // num_bytes, 1)
    # The release's queries: 32 heads of 128.
    assert default_scratch_bytes(4096, 32 * 128) == 192 << 20
    assert default_scratch_bytes(1, 32 * 128) == 16 << 20
