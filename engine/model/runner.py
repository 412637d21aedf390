"""Runs a transformers model on ragged batches. Knows token ids and logits, and no request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from engine.attention.registry import ATTENTION_NAME, Attend, CurrentPass, Ragged, register_hook
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout, LayerKV
from engine.kv.batch import Feed, RaggedBatch
from engine.kv.latent import latent_of
from engine.machine.mapped import reading
from engine.model.checkpoint import (
    check_complete,
    check_size,
    check_weights,
    check_whole,
    end_tokens_of,
    named_type,
    positions,
    read_config,
    shape_of,
    told_as_model_error,
)
from engine.model.decoder.architecture import architecture_of
from engine.model.linear.rows import matmul_shape
from engine.model.rope import install_tables
from engine.model.temperature import install_temperatures
from engine.model.text_part import names_in_whole, rest_untold
from engine.recurrent.arena import StateArena, StateLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Runner(Protocol):
    """The interface of a model that a step uses."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Run all `feeds` in one pass, writing their K/V; float32 logits `[R, vocab]`, R = sum of `num_logits`."""
        ...


class RowAdapters(Protocol):
    """The low-rank adapters of a model, of which each feed may have one (`adapters.store.Adapters`)."""

    def during(self, feeds: Seq[Feed]) -> AbstractContextManager[None]:
        """Within it the model runs a pass over `feeds`."""
        ...


class ModelRunner:
    """One transformers model with its arena; with states if its layers keep some, and adapters that rows may have."""

    def __init__(
        self,
        model: PreTrainedModel,
        arena: KVArena,
        attend: Attend,
        adapters: RowAdapters | None = None,
        states: StateArena | None = None,
    ) -> None:
        self.model, self.arena, self.attend, self._adapters = model.eval(), arena, attend, adapters
        self.states = states
        self._current = CurrentPass.of(model)
        if architecture_of(model) is None:
            install_tables(model)
            install_temperatures(model, self._current)
        self.vocab_size = vocab_size(model)
        self.device = model.device

    @torch.inference_mode()
    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Run one pass of the model's own code over the ragged batch, with our attention."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, self.device)
        states = None if self.states is None else self.states.during(batch)
        ragged = Ragged(batch, self.arena, self.attend, states)
        with self._current.runs(ragged), nullcontext() if self._adapters is None else self._adapters.during(feeds):
            output: Any = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                ragged=ragged,
                **({} if self.states is None else self.states.keywords(batch)),
            )
        logits: Tensor = output.logits[0]
        return logits.float()


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
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would write into the log of a server
    config = read_config(name, revision, of_transformers=True)
    check_weights(name)
    stored = sum(check_whole(path) for path in sorted(Path(name).glob("*.safetensors")))
    if stored:  # the files are on this machine
        with told_as_model_error(name), torch.device("meta"):
            check_size(name, AutoModelForCausalLM.from_config(copy.deepcopy(config)), stored)
    stays_mapped = device.type == "cpu" and dtype in ("auto", named_type(config))
    with told_as_model_error(name), rest_untold(config), nullcontext() if stays_mapped else _tensors_told():
        read = partial(
            AutoModelForCausalLM.from_pretrained,
            name,
            revision=revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` reports them in a clearer message
            key_mapping=names_in_whole(config),
            distributed_config=DistributedConfig(tp_size=shares) if shares > 1 else None,
        )
        model, report = _read(read, config)
    check_complete(name, report)
    return model.to(device)  # type: ignore[no-any-return]


def _read(read: Callable[..., Any], config: PreTrainedConfig) -> tuple[Any, Any]:
    """Read a model with our attention; one that has attention of its own or insists on a pad token as it is made."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    own = copy.deepcopy(config)
    try:
        prepare(config)
        model, report = read(config=config, attn_implementation=ATTENTION_NAME)
    except (KeyError, StrictDataclassFieldValidationError) as error:
        is_attention, is_pad = error.args == (ATTENTION_NAME,), "pad_token_id" in str(error)
        if not is_attention and not is_pad:
            raise
        return tuple(read(config=own))
    return model, report


@contextmanager
def _tensors_told() -> Iterator[None]:
    """Report the tensors that transformers counts in its progress bar to the current `ReadProgress`, if any."""
    from transformers.utils import logging

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
    """Change a config of any family so that the model can run ragged batches, and register our attention."""
    register_hook()
    # Some embeddings treat the pad token specially and read its place on the host; a ragged batch has no padding.
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = None


def kv_layout(config: PreTrainedConfig, dtype: torch.dtype, *, compressed: bool = False) -> KVLayout:
    """Read the shape of K/V, layer by layer, from a transformers config of any family.

    `compressed`: layers with latent attention keep latents (`latent.compress`), and not what they expand to.
    """
    text = config.get_text_config()
    depth = shape_of(config, "num_hidden_layers")
    own = (
        [text.per_layer_config[i] for i in range(depth)] if getattr(text, "is_heterogeneous", False) else [text] * depth
    )
    layers = [_layer_kv(config, compressed=compressed) for config in own]
    return KVLayout(tuple(replace(kv, source=s) for kv, s in zip(layers, _sources(text, depth), strict=True)), dtype)


def _layer_kv(config: PreTrainedConfig, *, compressed: bool) -> LayerKV:
    """The shape of K/V in a layer with this config."""
    heads, rank = shape_of(config, "num_attention_heads"), getattr(config, "kv_lora_rank", None)
    if rank and getattr(config, "qk_nope_head_dim", None):  # latent attention (MLA)
        if compressed:
            return LayerKV(1, rank + shape_of(config, "qk_rope_head_dim"), rank, is_latent=True)
        key_dim = shape_of(config, "qk_nope_head_dim") + shape_of(config, "qk_rope_head_dim")
        return LayerKV(heads, key_dim, shape_of(config, "v_head_dim"))
    kv_heads: int = (
        1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    )
    head_dim: int = getattr(config, "head_dim", None) or shape_of(config, "hidden_size") // heads
    return LayerKV(kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim)


def _sources(text: PreTrainedConfig, depth: int) -> list[int | None]:
    """The earlier layer whose K/V each layer reads: the last ones read those of the last layer of their kind before.

    Kinds s f s f | s f with two that share -> [None, None, None, None, 2, 3].
    """
    shared: int = getattr(text, "num_kv_shared_layers", None) or 0
    first, kinds = depth - shared, getattr(text, "layer_types", None) or ["full_attention"] * depth
    latest = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None if i < first else latest[kinds[i]] for i in range(depth)]


def layout_of_model(model: PreTrainedModel) -> KVLayout:
    """The shape of K/V of a loaded model. Of one whose layers keep states, a tiny pass shows which of them attend.

    Raises:
        ModelError: the model keeps a state in a way that we do not know.
    """
    architecture = architecture_of(model)
    if architecture is not None:
        return KVLayout(architecture.kv, model.dtype)
    states = StateLayout.of(model)
    if states is None:
        compressed = any(latent_of(module) for module in model.modules())
        return kv_layout(model.config, model.dtype, compressed=compressed)
    assert states.attends is not None, "the decoder knows it"
    depth = shape_of(model.config, "num_hidden_layers")
    return KVLayout(tuple(states.attends.get(layer) for layer in range(depth)), model.dtype)


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
    return end_tokens_of(model.config, getattr(model.generation_config, "eos_token_id", None))
