"""The indexer's ops through the contract, their arguments' checks, and their tile choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.indexer import KeyPages, candidate_scores, index_scores, select_entries, select_topk
from kernels.indexer.op import choose_row_config, choose_tile_config
from kernels.indexer.selection import default_scratch_bytes, rows_per_tile
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params
from tests.kernels.indexer_cases import BLOCK_SIZE, CASES, ONE, build, pages_of


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


def test_scratch_bounds_a_tile() -> None:
    assert rows_per_tile(1 << 10, 192 << 20) % 512 == 0
    for num_bytes in (1, 1000, 98_000, 600_000, 1 << 30):
        assert 1 <= rows_per_tile(num_bytes, 192 << 20) <= max((192 << 20) // num_bytes, 1)
    # The release's queries: 32 heads of 128.
    assert default_scratch_bytes(4096, 32 * 128) == 192 << 20
    assert default_scratch_bytes(1, 32 * 128) == 16 << 20
