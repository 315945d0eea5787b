"""Hyper-connections: the contract, the fused pass against its parts, argument checks."""

from __future__ import annotations

import pytest
import torch

from kernels.float_pieces import split_float32
from kernels.hyper_connections import (
    choose_config,
    choose_part,
    collapse_norm,
    expand_streams,
    mix_streams,
    read_streams,
    update_streams,
)
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params, equal_bytes
from tests.kernels.hyper_connections_cases import CASES, OPTIONS, old_mix, stream_inputs


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(96, torch.float32), pytest.param(5120, torch.bfloat16, marks=pytest.mark.gpu)],
    ids=["small", "release"],
)
def test_the_fused_pass_gives_the_bytes_of_its_parts(width: int, dtype: torch.dtype) -> None:
    i = stream_inputs(3, contract_device(), 5, width, dtype)
    weights = (i["fn"], i["base"], i["scale"])
    fused = update_streams(i["y"], i["streams"], old_mix(i), i["pre"], i["norm_weight"], *weights, **OPTIONS)
    expanded = expand_streams(i["y"], i["streams"], i["post"], i["comb"])
    read = read_streams(expanded, i["pre"], i["norm_weight"], *weights, **OPTIONS)
    mix = mix_streams(expanded, *weights, **OPTIONS)
    assert equal_bytes(fused.streams, expanded)
    assert equal_bytes(fused.x, read.x)
    for ours, theirs, alone in zip(fused.mix, read.mix, mix, strict=True):
        assert equal_bytes(ours, theirs)
        assert equal_bytes(ours, alone)
    apart = collapse_norm(expanded, i["pre"], i["norm_weight"], eps=OPTIONS["norm_eps"])
    torch.testing.assert_close(apart.float(), read.x.float(), rtol=1e-2, atol=1e-5)


def test_parts_follow_from_the_width_alone() -> None:
    release = choose_config(5120)
    assert (release.product_rows, release.product_part, release.pass_block) == (128, 2048, 512)
    assert choose_config(96).product_part == 128
    assert [choose_part(width) for width in (5120, 352, 96, 80)] == [320, 320, 96, None]


@pytest.mark.gpu
@pytest.mark.parametrize("gap", [1, 8])
def test_rows_of_the_output_may_lie_apart(gap: int) -> None:
    i = stream_inputs(5, contract_device(), 70, 352, torch.bfloat16)
    weights = (i["fn"], i["base"], i["scale"])
    apart = torch.empty(70, 352 + gap, dtype=torch.bfloat16, device=i["y"].device)[:, :352]
    apart.copy_(i["y"])
    expected = expand_streams(i["y"], i["streams"], i["post"], i["comb"])
    got = update_streams(apart, i["streams"], old_mix(i), i["pre"], i["norm_weight"], *weights, **OPTIONS)
    assert equal_bytes(got.streams, expected)


def test_pieces_add_up_to_the_weight() -> None:
    fn = torch.randn(24, 100, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0]).repeat(
        50
    )
    pieces = split_float32(fn)
    assert pieces.dtype == torch.bfloat16
    assert equal_bytes(pieces[0].float() + pieces[1].float() + pieces[2].float(), fn)
    fn[3, 4] = float("nan")
    with pytest.raises(ValueError, match="expected finite values"):
        split_float32(fn)


def test_streams_may_be_updated_in_place() -> None:
    i = stream_inputs(4, contract_device(), 5, 96, torch.float32)
    expected = expand_streams(i["y"], i["streams"], i["post"], i["comb"])
    given = i["streams"].clone()
    assert expand_streams(i["y"], given, i["post"], i["comb"], out=given) is given
    assert equal_bytes(given, expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fn", lambda x: x[:, :-1]),
        ("base", lambda x: x.double()),
        ("streams", lambda x: x[:, :3].contiguous()),
    ],
)
def test_a_wrong_argument_is_named(name, change) -> None:  # type: ignore[no-untyped-def]
    i = stream_inputs(0, torch.device("cpu"), 3, 32, torch.float32)
    i[name] = change(i[name])
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        mix_streams(i["streams"], i["fn"], i["base"], i["scale"], **OPTIONS)
