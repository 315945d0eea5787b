"""The plain-torch references: right against naive formulas, and a row's bits its own in any batch."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.compressor import pool_groups_reference
from kernels.engram import engram_gate_reference, engram_hash_reference
from kernels.hyper_connections import (
    collapse_streams_reference,
    expand_streams_reference,
    mix_streams_reference,
)
from kernels.indexer import (
    ascending_selection_reference,
    block_maxima_reference,
    index_scores_reference,
    merge_topk_reference,
)
from kernels.linear import linear_reference
from kernels.moe import (
    combine_experts_reference,
    expert_mlp_reference,
    route_tokens_reference,
    swiglu_reference,
)
from kernels.number_formats import (
    dequantise_activations,
    pack_fp4_entry,
    pack_fp4_index,
    pack_fp8,
    quantise_activations_reference,
)
from kernels.rms_norm import rms_norm_reference
from kernels.rope import YarnScaling, apply_rope_reference, rope_frequencies, rope_tables
from kernels.sparse_attention import sparse_attention_reference
from kernels.tree_sum import tree_sum

INF = float("inf")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Row invariance: an op is a function of a row's own inputs

K, HIDDEN, EXPERTS = 4, 96, 7
GATE, BIAS = normal(EXPERTS, HIDDEN, seed=1), normal(EXPERTS, seed=2)
W13, W2 = normal(EXPERTS, 2 * 64, HIDDEN, seed=3) / 8, normal(EXPERTS, HIDDEN, 64, seed=4) / 8
FN, BASE, SCALE = (
    normal(2 * K + K * K, K * HIDDEN, seed=5) / 16,
    normal(2 * K + K * K, seed=6),
    normal(3, seed=7),
)
KEYS = normal(1, 57, 32, seed=8)


def _rounded(x: Tensor) -> Tensor:
    return dequantise_activations(quantise_activations_reference(x, mode="release"), x.dtype)


def _experts(x: Tensor) -> Tensor:
    routes = route_tokens_reference(x, GATE.float(), BIAS, top_k=3, routed_scale=1.5)
    slots = expert_mlp_reference(x, routes, W13.to(x.dtype), W2.to(x.dtype), limit=1.5, mode="release")
    return combine_experts_reference(slots, x)


def _weights(x: Tensor) -> Tensor:
    return route_tokens_reference(x, GATE, BIAS, top_k=3, routed_scale=1.5).weights


def _mix(x: Tensor) -> Tensor:
    streams = x.unflatten(1, (K, HIDDEN))
    mix = mix_streams_reference(streams, FN, BASE, SCALE, num_iterations=20, eps=1e-6, norm_eps=1e-20)
    expanded = expand_streams_reference(streams[:, 0], streams, mix.post, mix.comb)
    return torch.cat([collapse_streams_reference(streams, mix.pre), expanded.flatten(1)], dim=1)


def _rope(x: Tensor) -> Tensor:
    # The position is a row's own as well: it is read from its first channel.
    positions = (x[:, 0].float().abs() * 1000).long()
    return apply_rope_reference(x, *rope_tables(positions, rope_frequencies(32, 10000.0, None)))


def _attend(x: Tensor) -> Tensor:
    keys = x[:, HIDDEN:].float().unflatten(1, (9, 32))
    valid = keys[..., 0] > -1
    return sparse_attention_reference(
        x[:, :HIDDEN].unflatten(1, (3, 32)), keys, valid, normal(3), scale=0.2
    ).flatten(1)


def _pool(x: Tensor) -> Tensor:
    rows = x.float().unflatten(1, (2, 2, HIDDEN)).flatten(0, 1)
    return pool_groups_reference(rows, torch.arange(len(rows)).view(-1, 2))


def _gate(x: Tensor) -> Tensor:
    streams, keys = (
        x[:, : 2 * HIDDEN].unflatten(1, (2, -1)),
        x[:, 2 * HIDDEN : 4 * HIDDEN].unflatten(1, (2, -1)),
    )
    weights = normal(2, HIDDEN, seed=9)
    return engram_gate_reference(streams, keys, x[:, 4 * HIDDEN :], weights, weights, eps=1e-20).flatten(1)


def _score(x: Tensor) -> Tensor:
    return index_scores_reference(x[:, :HIDDEN].float().unflatten(1, (3, 32)), x[:, HIDDEN:].float(), KEYS)


BOTH = (torch.float32, torch.bfloat16)
OPS: dict[str, tuple[int, Callable[[Tensor], Tensor], tuple[torch.dtype, ...]]] = {
    "linear": (HIDDEN, lambda x: linear_reference(x, W13[0].to(x.dtype)), BOTH),
    "long linear": (2048, lambda x: linear_reference(x, normal(24, 2048, seed=10).to(x.dtype)), BOTH),
    "rms norm": (HIDDEN, lambda x: rms_norm_reference(x, BASE.new_ones(HIDDEN), eps=1e-20), BOTH),
    "rope": (64, _rope, BOTH),
    "streams": (K * HIDDEN, _mix, BOTH),
    "experts": (HIDDEN, _experts, BOTH),
    "expert weights": (HIDDEN, _weights, BOTH),
    "shared expert": (2 * HIDDEN, lambda x: swiglu_reference(x, None, limit=1.5), BOTH),
    "attention": (HIDDEN + 9 * 32, _attend, BOTH),
    "pooling": (4 * HIDDEN, _pool, (torch.float32,)),
    "engram gate": (5 * HIDDEN, _gate, BOTH),
    "index scores": (HIDDEN + 3, _score, (torch.float32,)),
    "activations": (HIDDEN, _rounded, BOTH),
    "fp8 rows": (HIDDEN, pack_fp8, (torch.float32,)),
    "fp4 index rows": (HIDDEN, pack_fp4_index, (torch.float32,)),
    "fp4 entries": (HIDDEN, pack_fp4_entry, (torch.float32,)),
    "tree sum": (HIDDEN, lambda x: tree_sum(x)[:, None], BOTH),
}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}")
    for name, (_, _, dtypes) in OPS.items()
    for dtype in dtypes
]


def rows_in_batches(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every run of rows, of every count and offset, gives the bytes that the whole batch gave them."""
    whole = op(x)
    for count in (1, 2, 3, 5, 16, 17, 64):
        for offset in (0, 1, 7, 33, 36):
            part = op(x[offset : offset + count].contiguous())
            assert torch.equal(
                part.view(torch.uint8), whole[offset : offset + count].contiguous().view(torch.uint8)
            ), (
                count,
                offset,
            )


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_rows_bits_are_its_own(name: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    width, op, _ = OPS[name]
    rows_in_batches(op, normal(100, width, seed=11).to(dtype))


def test_a_row_that_depends_on_others_is_caught() -> None:
    """The negative control: a whole-batch mean leaks one row into another, and the check sees it."""
    with pytest.raises(AssertionError):
        rows_in_batches(lambda x: x - x.mean(0, keepdim=True), normal(100, 8))


# Values against naive formulas


def test_linear_is_the_product() -> None:
    x, weight = normal(45, 64), normal(33, 64, seed=1)
    assert (linear_reference(x, weight).double() - x.double() @ weight.double().T).abs().max() < 1e-4
    assert linear_reference(x[:0], weight).shape == (0, 33)
    with pytest.raises(ValueError, match="in_features"):
        linear_reference(x, weight[:, :32])
    with pytest.raises(ValueError, match="bfloat16"):
        linear_reference(x, weight.bfloat16())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 101])
def test_tree_sum_is_the_sum(count: int) -> None:
    x = normal(5, count)
    assert torch.allclose(tree_sum(x).double(), x.double().sum(-1), atol=1e-5)
    assert tree_sum(x, keepdim=True).shape == (5, 1)


def test_rms_norm() -> None:
    x, weight = normal(6, 48).double(), normal(48, seed=1).double()
    expected = weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3)
    assert torch.allclose(
        rms_norm_reference(x.float(), weight.float(), eps=1e-3).double(), expected, atol=1e-5
    )


def test_rope_multiplies_by_complex_numbers() -> None:
    x, positions = normal(4, 3, 40), torch.tensor([0, 1, 77, 4095])
    frequencies = rope_frequencies(16, 10000.0, None)
    tables = rope_tables(positions, frequencies)
    rotated = apply_rope_reference(x, *tables)
    assert torch.equal(rotated[..., :24], x[..., :24])
    for row, position in enumerate(positions.tolist()):
        for i in range(8):
            even, odd = x[row, 1, 24 + 2 * i].item(), x[row, 1, 25 + 2 * i].item()
            turned = complex(even, odd) * cmath.exp(1j * position * 10000 ** (-2 * i / 16))
            assert abs(rotated[row, 1, 24 + 2 * i].item() - turned.real) < 2e-3
            assert abs(rotated[row, 1, 25 + 2 * i].item() - turned.imag) < 2e-3
    assert torch.allclose(apply_rope_reference(rotated, *tables, inverse=True), x, atol=1e-5)


def test_yarn_keeps_fast_and_divides_slow_frequencies() -> None:
    """The release's numbers: the ramp runs from index 15 to 25 of 32."""
    yarn = YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
    plain, scaled = rope_frequencies(64, 160000.0, None), rope_frequencies(64, 160000.0, yarn)
    assert torch.equal(scaled[:16], plain[:16])
    assert torch.allclose(scaled[25:], plain[25:] / 16)
    assert torch.allclose(scaled[20], plain[20] * (0.5 + 0.5 / 16))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_streams_against_a_naive_sinkhorn(k: int) -> None:
    streams, fn = normal(5, k, 32), normal(2 * k + k * k, k * 32, seed=1) / 4
    base, scale, eps = normal(2 * k + k * k, seed=2), normal(3, seed=3), 1e-6
    mix = mix_streams_reference(streams, fn, base, scale, num_iterations=20, eps=eps, norm_eps=1e-20)
    for row in range(5):
        v = streams[row].double().flatten()
        z = fn.double() @ (v / torch.sqrt((v * v).mean()))
        a = torch.softmax((z[2 * k :] * scale[2] + base[2 * k :]).view(k, k), dim=1) + eps
        a = a / (a.sum(0) + eps)
        for _ in range(19):
            a = a / (a.sum(1, keepdim=True) + eps)
            a = a / (a.sum(0) + eps)
        assert torch.allclose(mix.comb[row].double(), a, atol=1e-5)
        assert torch.allclose(
            mix.pre[row].double(), torch.sigmoid(z[:k] * scale[0] + base[:k]) + eps, atol=1e-5
        )
        post = 2 * torch.sigmoid(z[k : 2 * k] * scale[1] + base[k : 2 * k])
        assert torch.allclose(mix.post[row].double(), post, atol=1e-5)
    y = normal(5, 32, seed=4)
    expanded = mix.post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", mix.comb, streams)
    assert torch.allclose(expand_streams_reference(y, streams, mix.post, mix.comb), expanded, atol=1e-5)
    collapsed = (mix.pre[..., None] * streams).sum(1)
    assert torch.allclose(collapse_streams_reference(streams, mix.pre), collapsed, atol=1e-5)


def test_attention_is_one_softmax_with_a_sink() -> None:
    q, keys = normal(6, 3, 32), normal(6, 11, 32, seed=1)
    is_valid = normal(6, 11, seed=2) > 0
    is_valid[3] = False
    sink = normal(3, seed=3)
    out = sparse_attention_reference(q, keys, is_valid, sink, scale=0.3)
    scores = torch.einsum("rhd,rkd->rhk", q, keys) * 0.3
    scores = torch.cat(
        [scores.masked_fill(~is_valid[:, None], -INF), sink.view(1, 3, 1).expand(6, 3, 1)], dim=2
    )
    expected = torch.softmax(scores.double(), -1)[..., :-1] @ keys.double()
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.equal(out[3], torch.zeros(3, 32))


def test_topk_over_tiles_is_a_stable_sort() -> None:
    """Many ties, cut anywhere into tiles: the lowest index wins, and -inf is never selected."""
    scores = (normal(20, 90) * 2).round()
    scores[scores == 0] = -INF
    for k, cut in [(8, 7), (8, 90), (64, 31), (100, 45)]:
        best = torch.full((20, k), -INF), torch.full((20, k), -1, dtype=torch.int64)
        for first in range(0, 90, cut):
            tile = scores[:, first : first + cut]
            best = merge_topk_reference(*best, tile, torch.arange(first, first + tile.shape[1]))
        selected = ascending_selection_reference(*best)
        for row in range(20):
            finite = [j for j in range(90) if scores[row, j] > -INF]
            wanted = sorted(sorted(finite, key=lambda j: (-scores[row, j].item(), j))[:k])
            assert selected[row].tolist() == wanted + [-1] * (k - len(wanted))


def test_block_maxima_pin_the_newest_block() -> None:
    scores = torch.tensor([[1.0, 2, 0, -INF, -INF, -INF], [5.0, 4, 3, 2, 1, 0]])
    maxima = block_maxima_reference(scores, torch.tensor([11, -1]), first_block=10, block_size=2)
    assert maxima.tolist() == [[2.0, INF, -INF], [5.0, 3.0, 1.0]]


def test_index_scores() -> None:
    q, weights, keys = normal(4, 3, 32), normal(4, 3, seed=1), normal(4, 10, 32, seed=2)
    expected = torch.einsum("rh,rhk->rk", weights, torch.relu(torch.einsum("rhd,rkd->rhk", q, keys)))
    assert torch.allclose(index_scores_reference(q, weights, keys), expected, atol=1e-4)


def test_routes_are_chosen_with_the_bias_and_weighed_without() -> None:
    x = normal(30, HIDDEN)
    routes = route_tokens_reference(x, GATE, BIAS, top_k=3, routed_scale=1.5)
    scores = torch.sqrt(torch.log1p(torch.exp(x.double() @ GATE.double().T)))
    for row in range(30):
        biased = (scores[row] + BIAS).tolist()
        wanted = sorted(range(EXPERTS), key=lambda e: -biased[e])[:3]
        assert routes.expert_ids[row].tolist() == wanted
        weights = scores[row, wanted] / scores[row, wanted].sum() * 1.5
        assert torch.allclose(routes.weights[row].double(), weights, atol=1e-5)
    tied = route_tokens_reference(
        torch.zeros(2, HIDDEN), GATE, torch.zeros(EXPERTS), top_k=3, routed_scale=1.0
    )
    assert tied.expert_ids.tolist() == [[0, 1, 2]] * 2


def test_experts_are_clamped_weighed_and_summed_with_the_shared_one() -> None:
    x = normal(9, HIDDEN) * 3
    routes = route_tokens_reference(x, GATE, BIAS, top_k=3, routed_scale=1.5)
    slots = expert_mlp_reference(x, routes, W13, W2, limit=1.5, mode="none")
    for row in range(9):
        for slot in range(3):
            expert = int(routes.expert_ids[row, slot])
            gate, up = (W13[expert].double() @ x[row].double()).chunk(2)
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
            y = W2[expert].double() @ (gate * torch.sigmoid(gate) * up * routes.weights[row, slot])
            assert torch.allclose(slots[row, slot].double(), y, atol=1e-4)
    assert torch.allclose(combine_experts_reference(slots, x), slots.sum(1) + x, atol=1e-4)


def test_pooling_is_a_softmax_over_the_group_per_channel() -> None:
    rows = normal(12, 2, 32)
    groups = torch.tensor([[3, 7, 1, 0], [11, 2, 5, 9]])
    expected = (torch.softmax(rows[groups][:, :, 1], dim=1) * rows[groups][:, :, 0]).sum(1)
    assert torch.allclose(pool_groups_reference(rows, groups), expected, atol=1e-5)


def test_engram_hash_is_python_arithmetic() -> None:
    """On large multipliers, where the products use all 63 bits."""
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349])
    primes, offsets = (
        torch.tensor([[16000057, 16000079], [16000081, 16000109]]),
        torch.tensor([[0, 7], [11, 13]]),
    )
    classes = torch.randint(0, 99092, (20, 3), generator=torch.Generator().manual_seed(0))
    rows = engram_hash_reference(classes, multipliers, primes, offsets)
    for row, (a, b, c) in enumerate(classes.tolist()):
        first = a * int(multipliers[0]) ^ b * int(multipliers[1])
        second = first ^ c * int(multipliers[2])
        wanted = [first % 16000057, first % 16000079 + 7, second % 16000081 + 11, second % 16000109 + 13]
        assert rows[row].tolist() == wanted


def test_engram_gate() -> None:
    streams, keys, value = normal(5, 2, 32), normal(5, 2, 32, seed=1), normal(5, 32, seed=2)
    qw, kw = normal(2, 32, seed=3), normal(2, 32, seed=4)
    out = engram_gate_reference(streams, keys, value, qw, kw, eps=1e-20)
    for row in range(5):
        for k in range(2):
            s, key = streams[row, k].double(), keys[row, k].double()
            d = float((s * qw[k] * kw[k] * key).sum() / s.norm() / key.norm() * 32 / math.sqrt(32))
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
            assert torch.allclose(out[row, k].double(), s + gate * value[row], atol=1e-5)
