"""What "auto" is for a model on a kind of device, and which settings cannot be had there.

Owns the answers that a job's plan and an engine must agree on. Imports neither torch nor triton: a plan is
made without them.
"""

from __future__ import annotations

from typing import Literal

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.deepseek_v41_config import DeepseekV41Config

NUM_STREAMS, SCALE_BLOCK = 4, 32
"""Those of ``kernels.hyper_connections`` and ``kernels.number_formats``, which import torch."""


def needs_gpu(config: EngineConfig) -> str | None:
    """The setting that asks for a GPU, in words; None where a CPU will do."""
    if config.device == "cuda":
        return "engine.device is cuda"
    if config.device == "auto" and config.kernel_impl == "triton":
        return "engine.kernel_impl is triton"
    return None


def resolve_dtype(config: EngineConfig, model: DeepseekV41Config) -> Literal["float32", "bfloat16"]:
    """The asked dtype; "auto" is the model's. Raises ``ConfigError`` where no engine computes in that."""
    if config.dtype != "auto":
        return config.dtype
    if model.dtype == "float32":
        return "float32"
    if model.dtype == "bfloat16":
        return "bfloat16"
    raise ConfigError(f"the model's dtype is {model.dtype!r}: set engine.dtype to float32 or bfloat16")


def resolve_kernel_impl(
    config: EngineConfig, model: DeepseekV41Config, *, is_gpu: bool
) -> Literal["triton", "torch"]:
    """The asked implementation; "auto" is Triton where it can run. Raises ``ConfigError`` where it cannot."""
    if config.kernel_impl == "torch":
        return "torch"
    reason = _unsupported_shape(model) if is_gpu else "this rank has no GPU"
    if reason is None:
        return "triton"
    if config.kernel_impl == "triton":
        raise ConfigError(f"engine.kernel_impl is triton, but {reason}")
    return "torch"


def _unsupported_shape(model: DeepseekV41Config) -> str | None:
    """What no kernel serves, in words."""
    if model.hc_mult != NUM_STREAMS:
        return f"hc_mult is {model.hc_mult}, its kernels serve {NUM_STREAMS}"
    if model.index_n_heads not in (16, 32, 64, 128) or model.index_head_dim not in (32, 64, 128, 256):
        return f"no kernel serves {model.index_n_heads} index heads of {model.index_head_dim}"
    size = model.candidate_block_size
    if size & (size - 1) or size > 64:
        return f"candidate_block_size is {size}, its kernels serve powers of two up to 64"
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(model, name) % SCALE_BLOCK:
            return f"{name} is {getattr(model, name)}, expert products serve multiples of {SCALE_BLOCK}"
    return None
