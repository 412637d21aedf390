"""Exact speculative decoding in ragged batches: token ids in, token ids out.

>>> from pilotfish import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pilotfish.engine.errors import DuplicateRequest, InvalidRequest, ModelError, PilotfishError, Unsupported
from pilotfish.engine.params import SamplingParams, SpeculationParams
from pilotfish.engine.types import FinishReason, Request, TokenEvent

if TYPE_CHECKING:
    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.llm import LLM, CompletionOutput

__all__ = [
    "LLM", "CompletionOutput", "DuplicateRequest", "EngineConfig", "FinishReason", "InvalidRequest", "ModelError",
    "PilotfishError", "Request", "SamplingParams", "SpeculationParams", "TokenEvent", "Unsupported",
]  # fmt: skip


_LATE = {
    "LLM": "pilotfish.engine.llm",
    "CompletionOutput": "pilotfish.engine.llm",
    "EngineConfig": "pilotfish.engine.config",
}


def __getattr__(name: str) -> object:
    """Import lazily: `LLM` imports torch and transformers, which takes seconds that a client should not wait.

    `EngineConfig` imports pydantic, which a GPU machine that tests kernels may not have.
    """
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
