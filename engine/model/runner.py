"""Runs a transformers model on ragged batches. Knows token ids and logits, and no request."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from engine.attention.registry import ATTENTION_NAME, Attend, Ragged
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed, RaggedBatch
from engine.machine.mapped import reading
from engine.model.checkpoint import (
    check_complete,
    check_weights,
    check_whole,
    end_tokens_of,
    named_type,
    positions,
    read_config,
    shape_of,
    told_as_model_error,
)
from engine.model.linear.int8 import matmul_shape
from engine.model.rope import install_tables


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
    """One transformers model with its arena."""

    def __init__(self, model: PreTrainedModel, arena: KVArena, attend: Attend) -> None:
        self.model, self.arena, self.attend = model.eval(), arena, attend
        install_tables(model)
        self.vocab_size = vocab_size(model)
        self.device = model.device

    @torch.inference_mode()
    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Run one pass of the model's own code over the ragged batch, with our attention."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, self.device)
        output: Any = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            ragged=Ragged(batch, self.arena, self.attend),
        )
        logits: Tensor = output.logits[0]
        return logits.float()


class Tap:
    """Keeps the hidden states of a model's last pass: the input of its output matrix, after the final norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.hidden: Tensor | None = None  # [T, hidden], one row per token of the ragged batch
        # A hook on the trunk, because the output matrix receives only the rows whose logits are wanted.
        model.get_decoder().register_forward_hook(self._keep)

    def _keep(self, _trunk: nn.Module, _inputs: object, output: Any) -> None:
        self.hidden = output[0][0]


def load_model(
    name: str, revision: str | None, dtype: torch.dtype | Literal["auto"], device: torch.device, shares: int = 1
) -> PreTrainedModel:
    """Load a causal language model from a local folder or the hub; safetensors only, without running its own code.

    With `auto` the weights keep the type that they are stored in, and on CPU stay mapped from their files. With
    `shares` above 1 this process loads its own shard, and all processes of a group of this size must load at the same
    time.

    Raises:
        ModelError: there is no loadable checkpoint, or it would need its own code.
    """
    logging.disable_progress_bar()  # it would write into the log of a server
    config = read_config(name, revision)
    check_weights(name)
    for path in sorted(Path(name).glob("*.safetensors")):
        check_whole(path)
    stays_mapped = device.type == "cpu" and dtype in ("auto", named_type(config))
    with told_as_model_error(name), nullcontext() if stays_mapped else _tensors_told():
        prepare(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            revision=revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` reports them in a clearer message
            distributed_config=DistributedConfig(tp_size=shares) if shares > 1 else None,
        )
    model, report = loaded
    check_complete(name, report)
    return model.to(device)  # type: ignore[no-any-return]


@contextmanager
def _tensors_told() -> Iterator[None]:
    """Report the tensors that transformers counts in its progress bar to the current `ReadProgress`, if any."""
    watcher, set_hook = reading(), getattr(logging, "set_tqdm_hook", None)
    if watcher is None or set_hook is None:
        yield
        return

    def counted(_make: object, args: tuple[Any, ...], _options: dict[str, Any]) -> Iterator[Any]:
        items = list(args[0])
        for done, item in enumerate(items):
            watcher.at(done, len(items))
            yield item

    before = set_hook(counted)
    try:
        yield
    finally:
        set_hook(before)


def prepare(config: PreTrainedConfig) -> None:
    """Change a config of any family so that the model can run ragged batches."""
    # Some embeddings treat the pad token specially and read its place on the host; a ragged batch has no padding.
    if config.pad_token_id is not None:
        config.pad_token_id = None


def kv_layout(config: PreTrainedConfig, dtype: torch.dtype) -> KVLayout:
    """Read the shape of K/V from a transformers config of any family."""
    heads = shape_of(config, "num_attention_heads")
    text = config.get_text_config()
    kv_heads: int = getattr(text, "num_key_value_heads", None) or heads
    head_dim: int = getattr(text, "head_dim", None) or shape_of(config, "hidden_size") // heads
    return KVLayout.uniform(shape_of(config, "num_hidden_layers"), kv_heads, head_dim, dtype)


def known_positions(config: PreTrainedConfig) -> int:
    """The number of positions that a model supports in a ragged batch."""
    return positions(config).limit


def vocab_size(model: PreTrainedModel) -> int:
    """Width of the logits. Every token id must be below it, even if the tokenizer knows larger ids."""
    head = model.get_output_embeddings()
    shape = matmul_shape(head)
    if shape is not None:
        return shape[1]
    if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
        raise ModelError(f"{type(model).__name__} has no output embedding: it is no causal language model")
    return head.weight.shape[0]


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens at which the model was trained to stop, from its generation config or its config."""
    return end_tokens_of(model.config, model.generation_config)
