"""Every option of the engine, defined once: name, default, limits and help text.

The server derives its flags, environment variables and file options from these fields.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from engine.choices import ADAPTER_NAME, AttentionKind, Device, DType, KVType, Loop, Weights
from engine.errors import shown
from engine.params import MAX_NUM_DRAFT, SpeculationMode, Verification

_NameT = TypeVar("_NameT", str, Path)


def can_be_opened(name: _NameT) -> _NameT:
    """Refuse a name that no file can have, and one below a folder that may not be read: no loader has to."""
    try:
        Path(name).exists()
    except OSError as error:
        raise ValueError(f"is {shown(str(name))}, which cannot be opened: {error.strerror}") from None
    return name


def _as_text(name: Any) -> Any:
    return os.fspath(name) if isinstance(name, os.PathLike) else name


def _as_tuple(value: Any) -> Any:
    """One name is a tuple of one, and None an empty tuple."""
    return () if value is None else (value,) if isinstance(value, str | os.PathLike) else value


AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME)]
ModelName = Annotated[str, BeforeValidator(_as_text), AfterValidator(can_be_opened)]
ModelNames = Annotated[tuple[ModelName, ...], BeforeValidator(_as_tuple)]


class Bounds(BaseModel):
    """Upper bounds for one request; gRPC, HTTP and the offline API apply the same bounds.

    The limits of the model itself (its context, the width of its logits) are in `intake.Limits`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens; default: what the context has room for."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Maximum max_tokens of a request; default: what the context has room for."""
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
    """Maximum number of texts in a guided choice."""


class EngineConfig(Bounds):
    """How to load and run a target and what drafts for it; and the upper bounds for one request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # The model and how it computes
    target: ModelName
    """Target model: a local folder, a GGUF file or a Hugging Face hub id."""
    revision: str | None = None
    """Hub revision of the target; a commit pins it."""
    adapter: dict[AdapterName, ModelName] = Field(default_factory=dict)
    """LoRA adapters of the target (PEFT format) that requests can name: NAME=FOLDER, once for each."""
    device: Device = "auto"
    """Compute device; auto: cuda if there is one, else cpu."""
    dtype: DType = "auto"
    """Type of weights, activations and K/V. auto: the checkpoint's type (usually bfloat16), but float32 on a CPU whose
    bfloat16 results would depend on the other requests of a batch. float16 needs CUDA."""
    weights: Weights = "native"
    """Weight format. native: dtype, and on a CPU the integers of a quantised checkpoint; dequantised: dtype for both;
    int8 (CPU only) and int4: float matrices are quantised at load (`pilotfish quality` measures the effect); fp8: 8-bit
    floats (CUDA, from Hopper on). On CUDA, int4 and fp8 need bfloat16."""
    attention: AttentionKind = "auto"
    """Attention implementation; native: the C kernel for CPUs, triton: the kernel for CUDA, fixed: the one of
    reproducible."""
    loop: Loop = "auto"
    """How sequences decode: in plain steps, or in rounds that stay on the device. auto: rounds on CUDA where they are
    supported. Tokens are the same; sequences that rounds do not support use plain steps."""
    reproducible: bool = False
    """Give a request the same bits whatever other requests are in its batch. Slower; needs coupled verification."""
    warm_up_seconds: float = Field(4.0, ge=0)
    """Seconds to measure the costs of steps, for speculation auto; 0 measures nothing. On a CPU the server measures
    while it is idle, an eighth of the time if an earlier start saved its results."""
    threads: int | None = Field(None, ge=1)
    """Maximum number of compute threads, of which a CPU engine uses as many as are fastest; default: the cores that
    this process may use, divided among the ranks of this machine."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of processes (started by torchrun), each with a shard of every layer of the target on its own device. A
    draft model is not sharded: rank 0 holds it."""

    # Drafting
    draft: ModelNames = ()
    """What drafts, once for each: a folder, GGUF file or hub id (@REVISION pins it) of a draft model, Medusa heads, an
    EAGLE head, a DFlash draft or a Uno adapter; or a part of the target: mtp (its multi-token prediction layer), self:N
    (its first N layers; self: a third). Default: drafts come from the text alone."""
    draft_weights: Weights | None = None
    """Weight format of the draft model; default: that of the target."""
    proposer: str | None = None
    """Default proposer: auto, model, self, eagle, mtp, dflash, uno or medusa (those that draft names), suffix, ngram or
    none; default: auto with a draft, else ngram."""
    num_draft_tokens: int = Field(8, ge=0, le=MAX_NUM_DRAFT)
    """Maximum number of drafts per sequence and step (K)."""
    speculation: SpeculationMode = SpeculationMode.AUTO
    """How K is chosen: auto, fixed or off."""
    verification: Verification = Verification.COUPLED
    """Exact rule that accepts or rejects drafts: coupled or rejection."""

    # Batching and memory
    max_model_len: int | None = Field(None, ge=2)
    """Maximum number of prompt and output tokens of a sequence; default: the model's."""
    max_batch_size: int = Field(64, ge=1)
    """Maximum number of sequences in one step."""
    max_batch_tokens: int = Field(512, ge=1)
    """Maximum number of tokens fed to the target in one step."""
    max_step_ms: float = Field(250.0, gt=0)
    """Maximum milliseconds of a step that feeds a part of a long prompt while other sequences decode; four times as
    many if none decodes."""
    kv_memory: float | None = Field(None, gt=0)
    """Memory for keys and values of target and drafts, in GiB; default: 2 on a CPU; on CUDA what is free after the
    weights are loaded, less what passes need."""
    engines_per_device: int = Field(1, ge=1)
    """Number of engines that share one CUDA device, such as servers of one machine: each uses an equal part of its
    memory; a kv_memory above that part is an error. standby doubles the number."""
    kv_cache_dtype: KVType = "auto"
    """Type of keys and values; auto: dtype. int8: each key and value in 8 bits with a scale of its own, about twice as
    many tokens in the same memory, with slightly different results."""
    page_size: int | None = Field(None, ge=1)
    """Tokens per K/V page; default: 32, or one page per sequence without prefix_cache."""
    prefix_cache: bool = True
    """Keep K/V of past requests for those that begin with the same tokens."""

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
