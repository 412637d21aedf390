"""Exact speculative decoding in ragged batches: token ids in, token ids out.

>>> from engine import LLM, SamplingParams
"""

from engine.config import EngineConfig
from engine.errors import DuplicateRequest, InvalidRequest, ModelError, PilotfishError, Unsupported
from engine.llm import LLM, Completion
from engine.types import FinishReason, Request, SamplingParams, SpeculationParams, TokenEvent

__all__ = [
    "LLM",
    "Completion",
    "DuplicateRequest",
    "EngineConfig",
    "FinishReason",
    "InvalidRequest",
    "ModelError",
    "PilotfishError",
    "Request",
    "SamplingParams",
    "SpeculationParams",
    "TokenEvent",
    "Unsupported",
]
