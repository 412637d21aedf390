"""The most that one request may ask for, written once: gRPC, HTTP and the offline API refuse alike.

What the model itself allows (its context, the width of its logits) is in `intake.Limits`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Bounds(BaseModel):
    """Every bound on a request, each an option of the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Most tokens of a prompt; default what the context has room for."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="Most tokens of an output (max_tokens); default what the context has room for."
    )
    max_n: int = Field(64, ge=1, description="Most outputs of a request (n).")
    max_stops: int = Field(16, ge=0, description="Most stop strings of a request, and most stop tokens.")
    max_stop_length: int = Field(256, ge=1, description="Longest stop string, in characters.")
    max_logprobs: int = Field(20, ge=0, description="Most likeliest tokens reported beside a token (top_logprobs).")
    max_total_logprobs: int = Field(
        1 << 18, ge=0, description="Most log-probabilities of a request, over all its tokens and their likeliest ones."
    )
    max_logit_bias: int = Field(1024, ge=0, description="Most tokens of a logit_bias.")
    max_structure_bytes: int = Field(64 << 10, ge=1, description="Largest guided structure, in bytes of its source.")
    max_choices: int = Field(4096, ge=1, description="Most texts of a guided choice.")
