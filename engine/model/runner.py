"""A transformers model that is fed ragged batches. Knows token ids and logits; knows no request."""

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
    """What a step needs of a model."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Run all `feeds` in one pass, writing their K/V; float32 logits `[R, vocab]`, R = sum of `num_logits`."""
        ...


class ModelRunner:
    """One transformers model, its arena, and the one method that the step calls."""

    def __init__(self, model: PreTrainedModel, arena: KVArena, attend: Attend) -> None:
        self.model, self.arena, self.attend = model.eval(), arena, attend
        install_tables(model)
        self.vocab_size = vocab_size(model)
        self.device = model.device

    @torch.inference_mode()
    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """One pass of the model's own code over the ragged batch; attention is ours."""
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
    """Keeps the hidden states of a model's last pass: what its output matrix reads, after the final norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.hidden: Tensor | None = None  # [T, hidden], one row per token of the ragged batch
        # The trunk, not the output matrix: that sees only the rows whose logits are asked for.
        model.get_decoder().register_forward_hook(self._keep)

    def _keep(self, _trunk: nn.Module, _inputs: object, output: Any) -> None:
        self.hidden = output[0][0]


def load_model(
    name: str, revision: str | None, dtype: torch.dtype | Literal["auto"], device: torch.device, shares: int = 1
) -> PreTrainedModel:
    """Load a causal language model from a local folder or the hub; safetensors only, no code of the checkpoint's.

    With `auto` its weights keep the type that they are stored in, and on CPU stay mapped from their files. Of several
    `shares` this process reads its own: there is a group of so many processes, and all of them load at the same time.

    Raises:
        ModelError: nothing loadable is there, or it would need code of its own.
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
            ignore_mismatched_sizes=True,  # `check_complete` tells them better
            distributed_config=DistributedConfig(tp_size=shares) if shares > 1 else None,
        )
    model, report = loaded
    check_complete(name, report)
    return model.to(device)  # type: ignore[no-any-return]


@contextmanager
def _tensors_told() -> Iterator[None]:
    """transformers counts the tensors that it reads in a bar: whoever watches is told of them."""
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
    """Set what a ragged batch needs of any config."""
    # Some embeddings treat the pad token apart and look at its place on the host; a ragged batch has no padding.
    if config.pad_token_id is not None:
        config.pad_token_id = None


def kv_layout(config: PreTrainedConfig, dtype: torch.dtype) -> KVLayout:
    """Read the shape of K/V off a transformers config of any family."""
    heads = shape_of(config, "num_attention_heads")
    text = config.get_text_config()
    kv_heads: int = getattr(text, "num_key_value_heads", None) or heads
    head_dim: int = getattr(text, "head_dim", None) or shape_of(config, "hidden_size") // heads
    return KVLayout(shape_of(config, "num_hidden_layers"), kv_heads, head_dim, dtype)


def known_positions(config: PreTrainedConfig) -> int:
    """How many positions a model knows in a ragged batch."""
    return positions(config).limit


def vocab_size(model: PreTrainedModel) -> int:
    """Width of the logits: what a token id must stay below, whatever the tokenizer believes."""
    head = model.get_output_embeddings()
    shape = matmul_shape(head)
    if shape is not None:
        return shape[1]
    if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
        raise ModelError(f"{type(model).__name__} has no output embedding: it is no causal language model")
    return head.weight.shape[0]


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens at which the model was taught to stop, from its generation config or its config."""
    return end_tokens_of(model.config, model.generation_config)
