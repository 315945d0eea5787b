"""Routing and experts: the contract, the plan of slots, exact pieces, argument checks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.moe import (
    ExpertWeight,
    Mxfp4Weight,
    Routes,
    SlotHomes,
    can_prepare,
    combine_experts,
    expert_mlp,
    expert_mlp_at_homes,
    expert_mlp_at_homes_reference,
    expert_mlp_reference,
    fastest_experts,
    prepare_experts,
    restore_experts,
    route_tokens,
    split_gate,
    swiglu,
)
from kernels.moe.hopper_op import Plans, SortedRows, choose_box, product
from kernels.moe.op import choose_config
from kernels.moe.routing import choose_gate_config, plan_slots
from kernels.number_formats import (
    ActivationMode,
    dequantise_activations,
    dequantise_mxfp4_weight,
    quantise_activations,
    quantise_activations_reference,
)
from tests.kernels.contract import Gate, OpCase, contract_device, contract_params, equal_bytes, errors_of
from tests.kernels.moe_cases import (
    CASES,
    SMALL,
    TILED,
    expert_inputs,
    expert_weight,
    random_mxfp4,
    uneven_ids,
)


@pytest.mark.parametrize(("case", "gate"), contract_params(CASES))
def test_contract(case: OpCase, gate: Gate) -> None:
    gate(case, contract_device())


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "tile", "extra"),
    [(1, 1, 4, 16, 0), (1, 1, 4, 16, 8), (70, 2, 5, 16, 0), (70, 2, 5, 16, 5), (90, 2, 33, 64, 8)],
)
def test_slots_are_sorted_stably_and_cut_into_tiles(
    num_rows: int, top_k: int, num_experts: int, tile: int, extra: int
) -> None:
    device = contract_device()
    ids = uneven_ids(torch.Generator(device).manual_seed(num_rows), num_rows, top_k, num_experts)
    plan = plan_slots(ids, num_experts, tile, extra=extra)
    order = torch.argsort(ids.flatten(), stable=True)
    assert plan.order.tolist() == order.tolist()
    assert order[plan.position.long()].tolist() == list(range(num_rows * top_k))
    wanted, start = [], 0
    for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=num_experts).tolist()):
        tiles = [[expert, first, first + tile] for first in range(start, start + count, tile)]
        if len(tiles) > 1 and start + count - tiles[-1][1] <= extra:
            del tiles[-1]
        start += count
        if tiles:
            tiles[-1][2] = start
        wanted += tiles
    assert plan.tiles[: len(wanted)].tolist() == wanted
    assert (plan.tiles[len(wanted) :, 0] == -1).all()
    assert len(plan.tiles) % 16 == 0


@pytest.mark.parametrize("num_absent", [1, 77, 140])
def test_slots_without_an_expert_have_no_position(num_absent: int) -> None:
    device = contract_device()
    g = torch.Generator(device).manual_seed(num_absent)
    ids = uneven_ids(g, 70, 2, 5).flatten()
    ids[torch.randperm(140, generator=g, device=device)[:num_absent]] = -1
    plan = plan_slots(ids.view(70, 2), 5, 16)
    order = torch.argsort(ids, stable=True)[num_absent:]
    assert plan.order[: len(order)].tolist() == order.tolist()
    assert plan.position[order].tolist() == list(range(len(order)))
    assert (plan.position[ids < 0] == -1).all()
    tiles = plan.tiles[plan.tiles[:, 0] >= 0]
    assert (tiles[:, 2] - tiles[:, 1]).sum() == len(order)


@pytest.mark.parametrize("mode", ["release", "row", "none"])
@pytest.mark.parametrize("is_reference", [False, True], ids=["op", "reference"])
def test_experts_in_parts_give_the_bytes_of_all_of_them(mode: ActivationMode, is_reference: bool) -> None:
    device = contract_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    i = expert_inputs(5, device, **{**SMALL, "num_rows": 37}, dtype=dtype, is_fp4=True)
    mlp = expert_mlp_reference if is_reference else expert_mlp
    quantise = quantise_activations_reference if is_reference else quantise_activations
    w13, w2 = (expert_weight(i, name) for name in ("w13", "w2"))
    whole = mlp(i["x"], Routes(i["ids"], i["weights"]), w13, w2, limit=1.0, mode=mode)
    rows = i["x"] if mode == "none" else quantise(i["x"], mode=mode)
    num_experts = len(w13.values)
    found = torch.full_like(whole, torch.nan)
    for first, end in [(0, 2), (2, 3), (3, num_experts)]:
        is_here = (i["ids"] >= first) & (i["ids"] < end)
        routes = Routes(torch.where(is_here, i["ids"] - first, -1), i["weights"])
        part = [Mxfp4Weight(*(field[first:end] for field in weight)) for weight in (w13, w2)]
        slots = mlp(rows, routes, *part, limit=1.0, mode=mode, dtype=dtype)
        found = torch.where(is_here[..., None], slots, found)
    assert equal_bytes(found, whole)
    nowhere = Routes(torch.full_like(i["ids"], -1), i["weights"])
    assert mlp(rows, nowhere, w13, w2, limit=1.0, mode=mode, dtype=dtype).shape == whole.shape


def at_homes(
    write: Callable[..., None], x: Tensor, routes: Routes, w13: ExpertWeight, w2: ExpertWeight, *,
    num_homes: int, mode: ActivationMode, poison: int,
) -> Tensor:  # fmt: skip
    """All homes one behind the other, without the two rows behind the last of each: these stay as they were."""
    num_rows, top_k = routes.expert_ids.shape
    most = num_rows // num_homes
    shape = (num_homes, most + 2, top_k, x.shape[1])
    memory = torch.full((math.prod(shape) * x.element_size(),), poison, dtype=torch.uint8, device=x.device)
    homes = memory.view(x.dtype).view(shape)
    write(x, routes, w13, w2, SlotHomes.of(list(homes), x.device), limit=1.0, mode=mode, dtype=x.dtype)
    assert bool((homes[:, most:].contiguous().view(torch.uint8) == poison).all()), "rows that are nobody's"
    return homes[:, :most].reshape(num_rows, top_k, -1)


@pytest.mark.parametrize("num_homes", [1, 2, 4])
@pytest.mark.parametrize("mode", ["release", "row", "none"])
@pytest.mark.parametrize("kind", ["small", pytest.param("prepared", marks=pytest.mark.gpu)])
def test_slots_stored_at_their_homes_are_the_bytes_of_slots_kept_here(
    kind: str, mode: ActivationMode, num_homes: int
) -> None:
    device = contract_device()
    shapes = [{**SMALL, "num_rows": 12}]
    if kind == "prepared":
        needs_hopper()
        shapes = [{**TILED, "num_rows": 12}, {**TILED, "num_rows": 700}]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for shape in shapes:
        i = expert_inputs(6, device, **shape, dtype=dtype, is_fp4=True, spread=30)
        weights = [expert_weight(i, name) for name in ("w13", "w2")]
        if kind == "prepared":
            weights = [prepare_experts(w, is_gated=n == 0) for n, w in enumerate(weights)]
        ids = torch.where(i["ids"] % 3 == 1, -1, i["ids"])  # held elsewhere
        routes = Routes(ids, i["weights"])
        options = {"num_homes": num_homes, "mode": mode}
        for poison in (0xFF, 0xA5):
            kept = torch.full((*ids.shape, shape["hidden"]), 0, dtype=dtype, device=device)
            kept.view(torch.uint8).fill_(poison)
            expert_mlp(i["x"], routes, *weights, limit=1.0, mode=mode, out=kept)
            found = at_homes(expert_mlp_at_homes, i["x"], routes, *weights, **options, poison=poison)
            assert equal_bytes(found, kept)
        wanted = expert_mlp_reference(i["x"], routes, *weights, limit=1.0, mode=mode)
        found = at_homes(expert_mlp_at_homes_reference, i["x"], routes, *weights, **options, poison=1)
        assert equal_bytes(found[ids >= 0], wanted[ids >= 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda homes: homes[:, :3], r"expected memory for 4 rows, got 3"),
        (lambda homes: homes.repeat(2, 1, 1, 1)[:3], r"expected as many rows of each of 3 ranks, got 8"),
        (lambda homes: homes.bfloat16(), r"memories: expected dtype"),
        (lambda homes: homes[..., :64], r"memories: expected shape"),
    ],
)
def test_homes_that_do_not_fit_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    i = expert_inputs(0, torch.device("cpu"), **{**SMALL, "num_rows": 8}, dtype=torch.float32, is_fp4=True)
    homes = SlotHomes.of(list(change(torch.zeros(2, 4, 2, 96)).contiguous()), torch.device("cpu"))
    routes = Routes(i["ids"], i["weights"])
    weights = [expert_weight(i, name) for name in ("w13", "w2")]
    with pytest.raises(ValueError, match=f"^homes.*{message}"):
        expert_mlp_at_homes(i["x"], routes, *weights, homes, limit=1.0, mode="row")


def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [5, 30])
@pytest.mark.parametrize("mode", ["release", "row"])
def test_rows_rounded_before_give_the_bytes_of_rows_rounded_here(mode: ActivationMode, spread: int) -> None:
    needs_hopper()
    shape = {**TILED, "num_rows": 90}
    i = expert_inputs(3, torch.device("cuda"), **shape, dtype=torch.bfloat16, is_fp4=True, spread=spread)
    w13, w2 = (prepare_experts(expert_weight(i, name), is_gated=name == "w13") for name in ("w13", "w2"))
    routes = Routes(i["ids"], i["weights"])
    rounded = quantise_activations(i["x"], mode=mode)
    found = expert_mlp(rounded, routes, w13, w2, limit=1.0, mode=mode, dtype=torch.bfloat16)
    assert equal_bytes(found, expert_mlp(i["x"], routes, w13, w2, limit=1.0, mode=mode))


@pytest.mark.gpu
def test_sums_of_one_sign_keep_their_size() -> None:
    """No product of a long sum is lost beside what was added before, in tiles of every height."""
    needs_hopper()
    g = torch.Generator("cuda").manual_seed(2)
    num_rows, depth, width = 700, 5120, 256
    values, scales = random_mxfp4(g, (3, width, depth))
    values &= 0x77
    weight = prepare_experts(Mxfp4Weight(values, scales), is_gated=False)
    x = torch.randn(num_rows, depth, generator=g, device="cuda").abs().bfloat16()
    ids = torch.randint(0, 3, (num_rows, 1), generator=g, device="cuda")
    routes = Routes(ids, torch.ones(num_rows, 1, device="cuda"))
    found = []
    for box in (16, 64):
        plans = Plans(ids, 3, box, "row", has_wide=False)
        # With one slot a row they are read in the order of experts.
        rows = SortedRows(x[plans.order.long()], plans.position, 1, "row", has_wide=False)
        found.append(torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda"))
        product(rows, weight, plans, routes, found[-1], 1.0, box)
    rounded = dequantise_activations(quantise_activations(x, mode="row"), torch.float64)
    matrices = dequantise_mxfp4_weight(values, scales).double()
    expected = torch.stack(
        [row @ matrices[e].T for row, e in zip(rounded, ids.flatten().tolist(), strict=True)]
    )
    assert errors_of(found[0], expected)[0] < 4e-3
    assert equal_bytes(found[0], found[1])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["row", "release"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_tiles_of_every_height_give_equal_bytes(is_gated: bool, mode: ActivationMode) -> None:
    """Experts that just fill a tile, that have one row more, and whose tiles are largest."""
    needs_hopper()
    g = torch.Generator("cuda").manual_seed(3)
    counts = [1, 64, 65, 128, 129, 192, 193, 256, 257, 288, 289, 544, 545]
    depth, width = 256, 256
    values, scales = random_mxfp4(g, (len(counts), width, depth))
    weight = prepare_experts(Mxfp4Weight(values, scales), is_gated=is_gated)
    ids = torch.arange(len(counts), device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
    ids = ids[torch.randperm(len(ids), generator=g, device="cuda")][:, None]
    x = torch.randn(len(ids), depth, generator=g, device="cuda").bfloat16()
    routes = Routes(ids, torch.rand(len(ids), 1, generator=g, device="cuda"))
    found = []
    for box in (16, 64):
        plans = Plans(ids, len(counts), box, mode, has_wide=weight.has_wide)
        rows = SortedRows(x[plans.order.long()], plans.position, 1, mode, has_wide=weight.has_wide)
        out_width = width // 2 if is_gated else width
        found.append(torch.full((len(ids), out_width), torch.nan, dtype=torch.bfloat16, device="cuda"))
        product(rows, weight, plans, routes, found[-1], 1.0, box)
    assert bool(found[0].isfinite().all())
    assert equal_bytes(found[0], found[1])


def test_equal_scores_go_to_the_lowest_ids() -> None:
    x = torch.zeros(3, 32, device=contract_device())
    gate, bias = x.new_ones(9, 32), x.new_zeros(9)
    bias[[4, 7]] = 1.0
    routes = route_tokens(x, gate, bias, top_k=4, routed_scale=1.0)
    assert routes.expert_ids.tolist() == [[4, 7, 0, 1]] * 3


def test_pieces_add_up_to_the_gate() -> None:
    gate = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    pieces = split_gate(gate)
    assert pieces.dtype == torch.bfloat16
    assert equal_bytes(pieces.float().flip(0).cumsum(0)[-1], gate)
    assert split_gate(gate.bfloat16().float()).shape == (1, 5, 64)
    assert split_gate(gate.zero_()).shape == (1, 5, 64)


@pytest.mark.timeout(30)  # a gate that cannot be split must not be tried for ever
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gate_that_is_not_finite_is_refused(value: float) -> None:
    gate = torch.ones(5, 64)
    gate[3, 4] = value
    with pytest.raises(ValueError, match="expected finite values"):
        split_gate(gate)
    gate[3, 4] = 1e-45  # less than a piece can hold
    assert split_gate(gate).shape == (1, 5, 64)


def test_tiles_follow_from_shapes_alone() -> None:
    assert [choose_box(n) for n in (1, 64, 65, 4096)] == [16, 16, 64, 64]
    assert choose_config(5120, 2304, torch.bfloat16).rows == 64
    assert choose_config(96, 32, torch.float32) == (16, 32, 32, 4, 1)
    assert choose_gate_config(384, 5120, torch.bfloat16) == (64, 128, 128, 1024)


def test_no_rows_give_empty_outputs() -> None:
    device = contract_device()
    i = expert_inputs(0, device, **{**SMALL, "num_rows": 1}, dtype=torch.float32, is_fp4=True)
    x, routes = i["x"][:0], Routes(i["ids"][:0], i["weights"][:0])
    slots = expert_mlp(x, routes, expert_weight(i, "w13"), expert_weight(i, "w2"), limit=1.0, mode="row")
    assert slots.shape == (0, 2, 96)
    assert combine_experts(slots, x).shape == (0, 96)
    assert swiglu(x, None, limit=1.0).shape == (0, 48)
    gate = x.new_zeros(5, 96)
    assert route_tokens(x, gate, gate[:, 0].contiguous(), top_k=3, routed_scale=1.0).weights.shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w2_values", lambda x: x[:, :-1]),
        ("w13_scales", lambda x: x.float()),
        ("ids", lambda x: x.int()),
        ("weights", lambda x: x[:, :1].contiguous()),
    ],
)
def test_a_wrong_argument_is_named(name, change) -> None:  # type: ignore[no-untyped-def]
    i = expert_inputs(0, torch.device("cpu"), **SMALL, dtype=torch.float32, is_fp4=True)
    i[name] = change(i[name])
    named = {"ids": "routes.expert_ids", "weights": "routes.weights"}.get(name, name.replace("_", "."))
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        expert_mlp(
            i["x"],
            Routes(i["ids"], i["weights"]),
            expert_weight(i, "w13"),
            expert_weight(i, "w2"),
            limit=1.0,
            mode="row",
        )


@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
def test_prepared_weights_are_the_same_numbers(is_gated: bool) -> None:
    g = torch.Generator().manual_seed(3)
    weight = random_mxfp4(g, (3, 256, 256))
    weight.values[1, 7, 16:32] = 0x80  # a group of zeros, whose scale means nothing
    weight.scales[1, 7, 1] = 2
    weight.scales[2, 200, 3] -= 20
    prepared = prepare_experts(weight, is_gated=is_gated)
    assert prepared.has_wide
    assert prepared.is_wide.sum() == 1
    assert prepared.is_wide[2, 1]
    for expert in range(3):
        restored = restore_experts(prepared, expert)
        assert equal_bytes(restored.values[0], weight.values[expert])
        got, wanted = (
            dequantise_mxfp4_weight(v, s)
            for v, s in (
                (restored.values[0], restored.scales[0]),
                (weight.values[expert], weight.scales[expert]),
            )
        )
        assert equal_bytes(got, wanted)


def test_only_whole_tiles_are_prepared() -> None:
    bf16, hopper = torch.bfloat16, (9, 0)
    assert can_prepare((96, 4608, 5120), bf16, hopper)
    assert can_prepare((96, 5120, 2304), bf16, hopper)
    assert not can_prepare((96, 5120, 2304), torch.float32, hopper)
    assert not can_prepare((96, 5120, 2304), bf16, (8, 0))
    assert not can_prepare((96, 5120, 2304), bf16, None)
    assert not can_prepare((4, 192, 256), bf16, hopper)
    assert not can_prepare((4, 256, 128), bf16, hopper)
    weight = random_mxfp4(torch.Generator().manual_seed(0), (1, 64, 256))
    assert fastest_experts(weight, weight, bf16) == (weight, weight)
    with pytest.raises(ValueError, match=r"^weight: expected whole tiles"):
        prepare_experts(weight, is_gated=False)
