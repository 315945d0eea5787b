"""The one switch between Triton kernels and their torch references: a table of public ops.

Layers call what the table holds and nothing else of ``kernels``' device code, so a whole engine can be
turned to references, and a fault bisected between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import kernels.cache_store as cache_store
import kernels.engram as engram
import kernels.hyper_connections as hyper_connections
import kernels.indexer as indexer
import kernels.linear as linear
import kernels.moe as moe
import kernels.number_formats as number_formats
import kernels.rms_norm as rms_norm
import kernels.rope as rope
import kernels.sparse_attention as sparse_attention
from kernels.float_pieces import split_float32
from kernels.hyper_connections import SiteInput
from kernels.indexer import SelectedEntries
from kernels.moe import ExpertWeight, Routes
from kernels.number_formats import QuantisedRows

KernelImpl = Literal["triton", "torch"]


@dataclass(frozen=True, slots=True)
class Ops:
    """Ops of one implementation; each field's signature is that of the public op of its name."""

    impl: KernelImpl
    rms_norm: Callable[..., Tensor]
    read_streams: Callable[..., SiteInput]
    update_streams: Callable[..., SiteInput]
    expand_streams: Callable[..., Tensor]
    collapse_norm: Callable[..., Tensor]
    engram_gather: Callable[..., Tensor]
    engram_gate: Callable[..., Tensor]
    store_window_kv: Callable[..., Tensor]
    compress_and_store: Callable[..., Tensor]
    store_index_keys: Callable[..., Any]
    copy_rows: Callable[..., Any]
    select_entries: Callable[..., SelectedEntries]
    selection_slots: Callable[..., Tensor]
    paged_sparse_attention: Callable[..., Tensor]
    rotate_queries: Callable[..., Tensor]
    pack_index_queries: Callable[..., Tensor]
    quantise_activations: Callable[..., QuantisedRows]
    linear: Callable[..., Tensor]
    fp8_linear: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    fp32_linear: Callable[..., Tensor]
    route_tokens: Callable[..., Routes]
    expert_mlp: Callable[..., Tensor]
    expert_mlp_at_homes: Callable[..., None]
    swiglu: Callable[..., Tensor]
    combine_experts: Callable[..., Tensor]

    @property
    def reads_quantised(self) -> bool:
        """Whether products read fp8 and mxfp4 weights as stored; else they are widened once, at load."""
        return self.impl == "triton"

    def mix_weight(self, fn: Tensor, dtype: torch.dtype) -> Tensor:
        """A hyper-connection's fp32 weight in the form that this implementation multiplies by."""
        return split_float32(fn) if self._splits_float32(dtype) else fn

    def gate_weight(self, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of a router's weight."""
        return moe.split_gate(gate) if self._splits_float32(dtype) else gate

    def expert_weights(
        self, w13: ExpertWeight, w2: ExpertWeight, dtype: torch.dtype
    ) -> tuple[ExpertWeight, ExpertWeight]:
        """A layer's routed experts in the form that this implementation multiplies by fastest."""
        return moe.fastest_experts(w13, w2, dtype) if self.impl == "triton" else (w13, w2)

    def _splits_float32(self, dtype: torch.dtype) -> bool:
        return self.impl == "triton" and dtype == torch.bfloat16


_MODULES = (
    rms_norm,
    hyper_connections,
    engram,
    cache_store,
    indexer,
    sparse_attention,
    rope,
    number_formats,
    linear,
    moe,
)


def build_ops(impl: KernelImpl) -> Ops:
    """The table of ``impl``: ``name`` of each op, or ``name_reference``."""
    suffix = "" if impl == "triton" else "_reference"
    found = {}
    for name in Ops.__dataclass_fields__:
        if name != "impl":
            found[name] = next(getattr(m, name + suffix) for m in _MODULES if hasattr(m, name + suffix))
    return Ops(impl=impl, **found)
