"""Runs a model on ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.attention.registry import Attend, Ragged, running
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena, KVLayout
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.model.checkpoint import end_tokens_of
from pilotfish.engine.model.decoder.architecture import architecture_of
from pilotfish.engine.model.linear.grouped import matmul_shape
from pilotfish.engine.recurrent.arena import StateArena

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import Model


class Runner(Protocol):
    """The interface of a model that a step uses."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Run all `feeds` in one pass, writing their K/V; float32 logits `[R, vocab]`, R = sum of `num_logits`."""
        ...


class ModelRunner:
    """One model with its arena, its recurrent states, if any, and its adapters."""

    def __init__(
        self,
        model: Model,
        arena: KVArena,
        attend: Attend,
        during: Callable[[Seq[Feed]], AbstractContextManager[object]] = nullcontext,
        states: StateArena | None = None,
    ) -> None:
        """`during`: context for a pass over feeds that may have adapters."""
        self.model, self.arena, self.attend, self._during = model.eval(), arena, attend, during
        self.states = states
        self.vocab_size = vocab_size(model)
        self.device = model.device

    @torch.inference_mode()
    def forward(self, feeds: Seq[Feed]) -> Tensor:
        batch = RaggedBatch.of(feeds, self.arena.page_size, self.device)
        states = None if self.states is None else self.states.during(batch)
        ragged = Ragged(batch, self.arena, self.attend, states)
        with self._during(feeds):
            return logits_of(self.model, ragged).float()


def logits_of(model: Any, ragged: Ragged) -> Tensor:
    """Run a pass of a decoder or a transformers module: `[R, vocab]`."""
    batch = ragged.batch
    ids, positions = batch.input_ids[None], batch.position_ids[None]
    if architecture_of(model) is not None:
        return cast("Tensor", model(ids, positions, batch.logit_rows, ragged)[0])
    with running(ragged):
        made = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=batch.logit_rows)
    return cast("Tensor", made.logits[0])


def layout_of_model(model: Model) -> KVLayout:
    """The shape of K/V of a loaded model."""
    architecture = architecture_of(model)
    if architecture is not None:
        return KVLayout(architecture.kv[: len(model.model.layers)], model.dtype)  # a draft may have its first ones
    from pilotfish.engine.model.fallback import kv_layout

    return kv_layout(model.config, model.dtype)


def vocab_size(model: Model) -> int:
    """Width of the logits. Token ids must be less than this, even if the tokenizer has larger ones."""
    head = model.get_output_embeddings()
    shape = matmul_shape(head)
    if shape is not None:
        return shape[1]
    if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
        raise ModelError(f"{type(model).__name__} has no output embedding; expected a causal language model")
    return head.weight.shape[0]


def end_tokens(model: Model) -> frozenset[int]:
    """The end tokens of the model, from its generation config or its config."""
    return end_tokens_of(model.config, getattr(model.generation_config, "eos_token_id", None))
