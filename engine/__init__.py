"""Tokens in, tokens out. This public face imports no torch: ``engine.llm_engine`` does."""

from engine.api import (
    Completion,
    Engine,
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    output_digest,
)
from engine.auto_settings import needs_gpu
from engine.config import EngineConfig, ReplicaPlace, ResolvedConfig
from engine.errors import ConfigError, EngineDead, PeerLost, RequestRejected
from engine.memory import MemoryEstimate, check_settings, count_experts, estimate_memory

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "FinishReason",
    "MemoryEstimate",
    "PeerLost",
    "ReplicaPlace",
    "Request",
    "RequestOutput",
    "RequestRejected",
    "ResolvedConfig",
    "SamplingParams",
    "TokenLogprobs",
    "check_settings",
    "count_experts",
    "estimate_memory",
    "needs_gpu",
    "output_digest",
]
