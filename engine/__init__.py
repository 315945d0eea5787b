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
from engine.config import EngineConfig, ResolvedConfig
from engine.errors import ConfigError, EngineDead, RequestRejected
from engine.memory import MemoryEstimate, estimate_memory

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "FinishReason",
    "MemoryEstimate",
    "Request",
    "RequestOutput",
    "RequestRejected",
    "ResolvedConfig",
    "SamplingParams",
    "TokenLogprobs",
    "estimate_memory",
    "output_digest",
]
