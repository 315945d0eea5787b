"""Do the goldens see each feature? One thing is broken at a time, and the comparison has to turn red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

import kernels.hyper_connections.reference
import kernels.indexer.reference
import kernels.sparse_attention.reference
import tests.engine.golden_harness as harness
from engine.batch import BatchInputs, CompressInputs
from engine.layers.linear import Linear, QuantisedLinear
from engine.layers.rotary import RotaryEmbedding
from engine.models.deepseek_v41 import DecoderLayer
from engine.models.deepseek_v41_config import load_model_config
from kernels.hyper_connections import expand_streams_reference
from kernels.indexer import block_maxima_reference
from kernels.moe import Routes, route_tokens_reference
from tests.engine.golden_harness import (
    MODEL_FOLDERS,
    PromptRun,
    load_goldens,
    load_model,
    logit_errors,
    run_prompts,
)

T = TypeVar("T", Linear, QuantisedLinear)

FOLDER = MODEL_FOLDERS["tiny"]
NUM_ROWS = 80  # of the longest prompt, that the golden keeps

CONFIG_FAULTS: dict[str, dict[str, object]] = {
    "one Sinkhorn iteration": {"hc_sinkhorn_iters": 1},
    "routed scale 1": {"routed_scaling_factor": 1.0},
    "no swiglu clamp": {"swiglu_limit": 1e9},
    "window 15": {"sliding_window": 15},
    "top-7": {"index_topk": 7},
    "no YaRN": {"yarn_factor": 1.0},
    "one expert fewer": {"num_experts_per_tok": 2},
    "one candidate block fewer": {"candidate_topk_blocks": 5},
}


def _zeroed(linear: T) -> T:
    return dataclasses.replace(linear, weight=torch.zeros_like(linear.weight))


def _no_sink(layer: DecoderLayer) -> None:
    layer._attn._sink = torch.full_like(layer._attn._sink, -1e9)


def _no_engram(layer: DecoderLayer) -> None:
    layer._engram = None


def _other_multipliers(layer: DecoderLayer) -> None:
    if layer._engram is not None:
        numbers = layer._engram._tables._tables[layer._engram._index]._hash._numbers
        numbers[0] = numbers[0] + 2


def _no_router_bias(layer: DecoderLayer) -> None:
    layer._moe._bias = torch.zeros_like(layer._moe._bias)


def _no_shared_expert(layer: DecoderLayer) -> None:
    layer._moe._shared_w2 = _zeroed(layer._moe._shared_w2)


def _mean_pooling(layer: DecoderLayer) -> None:
    compressor = layer._attn._compressor
    if compressor is not None and compressor._wkv is None:
        weight = compressor._pooled_weight
        compressor._pooled_weight = torch.cat(
            [weight[: len(weight) // 2], torch.zeros_like(weight[len(weight) // 2 :])]
        )


def _older_entries(layer: DecoderLayer) -> None:
    if layer._attn._kv_source == 4:
        layer._attn._kv_source = 2


def _no_reindex(layer: DecoderLayer) -> None:
    if layer._layer == 8:
        layer._attn._indexer = None


def _no_candidate_mask(layer: DecoderLayer) -> None:
    if layer._layer == 8:
        layer._attn._indexer._is_reindex = False


def _biased_weights(layer: DecoderLayer) -> None:
    def route(x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int, routed_scale: float) -> Routes:
        routes = route_tokens_reference(x, gate, bias, top_k=top_k, routed_scale=1.0)
        biased = routes.weights + bias[routes.expert_ids]
        return Routes(routes.expert_ids, biased / biased.sum(-1, keepdim=True) * routed_scale)

    layer._moe._ops = dataclasses.replace(layer._moe._ops, route_tokens=route)


LAYER_FAULTS: dict[str, Callable[[DecoderLayer], None]] = {
    "no sink": _no_sink,
    "no engram": _no_engram,
    "other hash multipliers": _other_multipliers,
    "router bias ignored": _no_router_bias,
    "no shared expert": _no_shared_expert,
    "biased expert weights": _biased_weights,
    "mean pooling": _mean_pooling,
    "layers 4 and 5 read layer 2's entries": _older_entries,
    "layer 8 reuses layer 6's selection": _no_reindex,
    "candidate mask ignored": _no_candidate_mask,
}


def _transposed_comb(patch: pytest.MonkeyPatch) -> None:
    def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return expand_streams_reference(y, streams, post, comb.transpose(1, 2))

    patch.setattr(kernels.hyper_connections.reference, "expand_streams_reference", expand)


def _no_inverse_rope(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        kernels.sparse_attention.reference, "apply_rope_reference", lambda x, cos, sin, *, inverse=False: x
    )


def _window_theta_everywhere(patch: pytest.MonkeyPatch) -> None:
    tables = RotaryEmbedding.tables
    patch.setattr(
        RotaryEmbedding, "tables", lambda self, p, *, is_compressing: tables(self, p, is_compressing=False)
    )


def _newest_block_not_pinned(patch: pytest.MonkeyPatch) -> None:
    def maxima(scores: Tensor, newest: Tensor, first: int, size: int) -> Tensor:
        return block_maxima_reference(scores, torch.full_like(newest, -1), first, size)

    patch.setattr(kernels.indexer.reference, "block_maxima_reference", maxima)


def _entries_at_their_last_token(patch: pytest.MonkeyPatch) -> None:
    original = BatchInputs.compress_inputs

    def compress_inputs(self: BatchInputs, layer: int, ratio: int) -> CompressInputs:
        inputs = original(self, layer, ratio)
        return dataclasses.replace(inputs, group_positions=inputs.group_positions + ratio - 1)

    patch.setattr(BatchInputs, "compress_inputs", compress_inputs)


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "combine matrix transposed": _transposed_comb,
    "no inverse rope": _no_inverse_rope,
    "window theta on compressing layers": _window_theta_everywhere,
    "newest block not pinned": _newest_block_not_pinned,
    "entries at their last token": _entries_at_their_last_token,
}


def num_wrong_rows(fault: str, patch: pytest.MonkeyPatch) -> int:
    """Rows of the longest golden prompt whose logits leave the tolerance under a fault."""
    golden = load_goldens("tiny", "noquant")[-1]
    assert len(golden.logit_rows) == NUM_ROWS
    config = dataclasses.replace(load_model_config(FOLDER), **CONFIG_FAULTS.get(fault, {}))
    patch.setattr(harness, "load_model_config", lambda folder: config)
    loaded = load_model(FOLDER)
    for layer in loaded.model._layers:
        LAYER_FAULTS.get(fault, lambda layer: None)(layer)
    PATCHES.get(fault, lambda patch: None)(patch)
    (run,) = run_prompts(loaded, [PromptRun(golden.prompt)], is_quantised=False)
    # "not within" and not "beyond": a NaN is wrong as well.
    return int((~(logit_errors(run, golden) < 1e-3)).sum())


@pytest.mark.parametrize("fault", [*CONFIG_FAULTS, *LAYER_FAULTS, *PATCHES])
def test_a_fault_turns_the_goldens_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_wrong_rows(fault, monkeypatch) > NUM_ROWS // 2


def test_without_a_fault_they_are_green(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_wrong_rows("none", monkeypatch) == 0
