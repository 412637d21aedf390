"""Every option of the engine, defined once: name, default, limits and help text.

The server derives its flags, environment variables and file options from these fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

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


AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME)]
ModelName = Annotated[str, AfterValidator(can_be_opened)]


class Bounds(BaseModel):
    """Upper bounds for one request; gRPC, HTTP and the offline API apply the same bounds.

    The limits of the model itself (its context, the width of its logits) are in `intake.Limits`.
    """

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


class EngineConfig(Bounds):
    """How to load and run a target and its draft, if there is one; and the upper bounds for one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: ModelName = Field(description="Target model: a local folder or a Hugging Face hub id.")
    draft: ModelName | None = Field(
        None,
        description="Draft model: a local folder or a Hugging Face hub id. Without one, drafts are found in the "
        "sequence's own text.",
    )
    revision: str | None = Field(None, description="Hub revision of the target; a commit pins it.")
    draft_revision: str | None = Field(None, description="Hub revision of the draft; a commit pins it.")
    device: Device = Field("auto", description="Device to compute on; auto uses cuda if there is one, else cpu.")
    dtype: DType = Field(
        "auto",
        description="Type of weights, activations and K/V. auto is the checkpoint's own type (bfloat16 for most), but "
        "float32 on a CPU whose bfloat16 results would depend on the other requests of a batch. float16 is "
        "for CUDA only.",
    )
    weights: Weights = Field(
        "native",
        description="native keeps the weights in dtype, and on a CPU the integers of a quantised checkpoint as they "
        "are; dequantised turns those into dtype too. int8 (CPU only) and int4 round matrices of floats to 8 or 4 "
        "bits at load (`pilotfish quality` measures what that changes), fp8 to 8-bit floats (for CUDA from Hopper "
        "on). "
        "On CUDA, int4 and fp8 need bfloat16.",
    )
    draft_weights: Weights | None = Field(
        None, description="Weights of the draft model, with the same choices; default: as for the target."
    )
    medusa: ModelName | None = Field(None, description="Medusa heads of the target: a local folder or a hub id.")
    medusa_revision: str | None = Field(None, description="Hub revision of the Medusa heads; a commit pins it.")
    eagle: ModelName | None = Field(
        None, description="EAGLE head of the target (EAGLE-1, 2, 3 or 3.1): a local folder or a hub id."
    )
    eagle_revision: str | None = Field(None, description="Hub revision of the EAGLE head; a commit pins it.")
    mtp: bool = Field(
        False, description="Draft with the multi-token prediction layers that the target's checkpoint ships with."
    )
    dflash: ModelName | None = Field(None, description="DFlash draft of the target: a local folder or a hub id.")
    dflash_revision: str | None = Field(None, description="Hub revision of the DFlash draft; a commit pins it.")
    uno: ModelName | None = Field(
        None, description="Low-rank adapter with which the target drafts for itself (Uno): a local folder or a hub id."
    )
    uno_revision: str | None = Field(None, description="Hub revision of the Uno adapter; a commit pins it.")
    adapter: dict[AdapterName, ModelName] = Field(
        default_factory=dict,
        description="Low-rank adapters of the target (LoRA, in the format of peft) that requests may name: "
        "NAME=FOLDER, once for each.",
    )
    self_layers: int | None = Field(
        None,
        ge=1,
        description="Number of the target's first layers that draft for it (proposer self); default a third of its "
        "layers.",
    )
    proposer: str | None = Field(
        None,
        description="Default proposer: auto, model, self, eagle, mtp, dflash, uno, medusa, suffix, ngram or none, as "
        "far as its model or heads are loaded; default auto with a draft model or head, else ngram.",
    )
    num_draft_tokens: int = Field(8, ge=0, le=MAX_NUM_DRAFT, description="Most drafts per sequence and step (K).")
    speculation: SpeculationMode = Field(SpeculationMode.AUTO, description="How K is chosen: auto, fixed or off.")
    verification: Verification = Field(
        Verification.COUPLED, description="Exact rule that accepts or rejects drafts: coupled or rejection."
    )
    max_model_len: int | None = Field(None, ge=2, description="Most tokens of prompt and output; default the model's.")
    max_batch_size: int = Field(64, ge=1, description="Most sequences in one step.")
    max_batch_tokens: int = Field(512, ge=1, description="Most tokens fed to the target in one step.")
    max_step_ms: float = Field(
        250.0,
        gt=0,
        description="Longest time of a step, in milliseconds, while a long prompt is read and other sequences decode; "
        "four times as long if no sequence decodes.",
    )
    kv_memory: float | None = Field(
        None,
        gt=0,
        description="Memory for keys and values of target and drafts, in GiB; default 2 on cpu, and on cuda what is "
        "free after loading the weights, less what passes need.",
    )
    engines_per_device: int = Field(
        1,
        ge=1,
        description="Number of engines that share a CUDA device which nothing else uses, such as servers of one "
        "machine: each takes its part of the memory, and is refused where kv_memory asks for more. A standby makes it "
        "twice as many.",
    )
    kv_cache_dtype: KVType = Field(
        "auto",
        description="Type of keys and values; auto is dtype. int8 rounds each key and value to 8 bits with a scale of "
        "its own: in the same memory about twice as many tokens, whose results differ a little.",
    )
    page_size: int | None = Field(
        None, ge=1, description="Tokens per K/V page; default 32, or one page per sequence without prefix cache."
    )
    prefix_cache: bool = Field(True, description="Keep K/V of past requests for those that begin with the same tokens.")
    attention: AttentionKind = Field(
        "auto",
        description="Attention implementation; native is our C kernel for CPUs, triton the one for CUDA, fixed is for "
        "reproducible.",
    )
    loop: Loop = Field(
        "auto",
        description="How sequences decode: in plain steps, or in rounds on the device. auto uses rounds on cuda where "
        "they can run. Both give the same tokens; sequences that rounds cannot decode run in plain steps.",
    )
    reproducible: bool = Field(
        False,
        description="A request gets the same bits whatever other requests are in its batch. Slower; with coupled "
        "verification only.",
    )
    warm_up_seconds: float = Field(
        4.0,
        ge=0,
        description="Time to measure the costs of steps, so that AUTO has a good cost model; 0 measures nothing. On a "
        "CPU the server measures while it is idle, an eighth of the time where an earlier start saved its results.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Most compute threads. On a CPU the engine uses as many of them as are fastest; default the cores "
        "that this process may use, divided among the ranks of this machine.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Number of processes that hold the target together, each with a shard of every layer on its own "
        "device; start them with torchrun. A draft model is not sharded: rank 0 holds it.",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; it must be at least max_batch_size "
                f"({self.max_batch_size}), so that every running sequence can take a step"
            )
        problems = [problem for stands, problem in self._problems_with_shards() if stands]
        if self.tensor_parallel_size > 1 and problems:
            raise ValueError(f"tensor_parallel_size is {self.tensor_parallel_size}; {'; '.join(problems)}")
        if self.reproducible and self.verification is not Verification.COUPLED:
            raise ValueError("reproducible needs verification to be coupled: under rejection the drafts decide, too")
        return self

    def _problems_with_shards(self) -> Iterator[tuple[bool, str]]:
        """Options that are impossible with a target in shards: whether each one is set, and its message."""
        yield self.loop == "rounds", "loop is rounds, and no other process hears of a round"
        yield (
            self.self_layers is not None,
            f"self_layers is {self.self_layers}, and no process has a whole layer to draft with",
        )
        yield self.proposer == "self", "proposer is self, and no process has a whole layer to draft with"
        yield bool(self.adapter), f"adapter is {self.adapter}, and adapters are not cut"
        yield self.uno is not None, f"uno is {self.uno!r}, and adapters are not cut"
