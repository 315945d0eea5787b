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

__all__ = [
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "FinishReason",
    "Request",
    "RequestOutput",
    "RequestRejected",
    "ResolvedConfig",
    "SamplingParams",
    "TokenLogprobs",
    "output_digest",
]
