"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one layer that makes the target's next feature.

EAGLE-2 (arXiv 2406.16858) has the same heads, and drafts trees with them, which we do not.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from engine.attention import Attend
from engine.attention.registry import ATTENTION_NAME, Ragged, register_hook
from engine.errors import ModelError
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.fallback import kv_layout
from engine.model.linear.rows import matmul_shape
from engine.model.tap import FINAL
from engine.proposers.heads.base import Head, HeadContext
from engine.proposers.heads.eagle3 import is_eagle3, load_eagle3
from engine.proposers.heads.fused import FusedLayers, FusedProjection, type_of
from engine.proposers.heads.proposer import HeadProposer
from engine.proposers.heads.speculators import KIND, flattened
from engine.proposers.heads.weights import fill, load_checkpoint

_PLACES = (FINAL,)


class EagleHead(nn.Module):
    """Keys as published for EAGLE-1: `fc.weight`, `fc.bias` perhaps, `layers.0.*`, `embed_tokens.weight` perhaps."""

    def __init__(self, config: LlamaConfig, keys: Seq[str], embedding: nn.Module) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias="fc.bias" in keys)
        layer: nn.Module = LlamaDecoderLayer(config, layer_idx=0)
        if "layers.0.input_layernorm.weight" not in keys:
            layer.input_layernorm = nn.Identity()  # the paper's head has none before its only attention
        if "layers.0.self_attn.o_proj.bias" not in keys:
            layer.get_submodule("self_attn.o_proj").register_parameter(
                "bias", None
            )  # some have biases on q, k and v alone
        self.layers = nn.ModuleList([layer])
        if "embed_tokens.weight" in keys:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self._embed = [self.embed_tokens if "embed_tokens.weight" in keys else embedding]  # in a list: not a part of us
        self.rotary = [LlamaRotaryEmbedding(config)]
        self.config = config

    def joined(self, tokens: Tensor, features: Tensor) -> Tensor:
        """`features` `[T, hidden]` of t and `tokens` `[T]` of t + 1 -> what `fc` reads, `[T, 2 hidden]`."""
        return torch.cat([self._embed[0](tokens).to(features.dtype), features], -1)

    def forward(self, batch: RaggedBatch, features: Tensor, ragged: Ragged) -> Tensor:
        """`features` `[T, hidden]` of t and the tokens of t + 1 -> features of t + 1, `[T, hidden]`."""
        x, positions = self.fc(self.joined(batch.input_ids, features))[None], batch.positions[None]
        rotary = self.rotary[0].to(x.device)(x, positions)
        made = self.layers[0](x, position_ids=positions, position_embeddings=rotary, ragged=ragged)
        return cast("Tensor", made[0])


def load_eagle(name: str, revision: str | None, target: PreTrainedModel) -> Head:
    """A head of a local folder or a hub id, on the target's device in the type of `type_of`; of EAGLE-3, if it is one.

    Raises:
        ModelError: it is no EAGLE head, is of a variant that is not served, or does not fit this target.
    """
    config, tensors = load_checkpoint(name, revision)
    if is_eagle3(config, tensors):
        return load_eagle3(name, config, tensors, target)
    config, tensors = _unwrapped(config, tensors, name)
    tensors.pop("layers.0.self_attn.rotary_emb.inv_freq", None)  # made from the config
    tensors.pop("lm_head.weight", None)  # a copy of the target's, where one was saved
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{name!r} has {config['num_hidden_layers']} layers; an EAGLE-1 head has 1")
    settings = _settings(config, tensors, name, target)
    head = EagleHead(settings, list(tensors), target.get_input_embeddings())
    fill(head, tensors, name)
    dtype = type_of(settings, target)
    head.to(target.device, dtype).eval()

    def proposer(context: HeadContext) -> HeadProposer:
        assert context.arena is not None, "it has a layout"
        chain = EagleRunner(head, target, context.arena, context.attend)
        return HeadProposer(chain, context.tap, _PLACES, context.prefill)

    return Head(_PLACES, kv_layout(settings, dtype), proposer)


def _unwrapped(
    config: dict[str, Any], tensors: dict[str, Tensor], name: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head of vLLM's `speculators` in the form of EAGLE's authors; any other as it is."""
    if KIND not in config:
        return config, tensors
    flat = flattened(config, name, "eagle")
    if flat.get("layernorms"):  # what they norm differs between that library and vLLM
        raise ModelError(f"{name!r}: layernorms is true; EAGLE-1 heads with norms of their own are not served")
    if flat["model_type"] != "llama":
        raise ModelError(f"{name!r}: model_type is {flat['model_type']!r}; of EAGLE-1 Llama's layer is served")
    names = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
    named = {
        next((new + key.removeprefix(old) for old, new in names.items() if key.startswith(old)), key): tensor
        for key, tensor in tensors.items()
    }
    return flat | {"num_hidden_layers": 1}, named  # there it is the target's number


def _settings(config: dict[str, Any], tensors: dict[str, Tensor], name: str, target: PreTrainedModel) -> LlamaConfig:
    """The head's config as a Llama's, which attends through us."""
    asked = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype", "bias")}
    try:
        settings = LlamaConfig(**(asked | {"attention_bias": "layers.0.self_attn.q_proj.bias" in tensors}))
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load {name!r}: its config is not like a Llama's: {error!r}") from error
    want = matmul_shape(target.get_output_embeddings())
    if (settings.hidden_size, settings.vocab_size) != want:
        found = f"{settings.hidden_size} features and {settings.vocab_size} tokens"
        raise ModelError(f"{name!r} is a head for {found}; the target has {want}")
    settings.pad_token_id = None
    register_hook()
    settings._attn_implementation = ATTENTION_NAME  # noqa: SLF001 - a config that is not loaded has no other way
    return settings


class EagleRunner:
    """The head over an arena of its own; in C where that can run its layer."""

    def __init__(self, head: EagleHead, target: PreTrainedModel, arena: KVArena, attend: Attend) -> None:
        self.arena, self._head, self._attend = arena, head, attend
        self._output, self._output_dtype = target.get_output_embeddings(), target.dtype
        self._device, self._dtype = arena.k[0].device, head.fc.weight.dtype
        self._fused = FusedLayers.of(list(head.layers), head.config, head.rotary[0], arena, attend)
        self._fc: Callable[[Tensor], Tensor] = head.fc
        if self._fused is not None:
            head.layers = nn.ModuleList()  # the packed copies are enough
            self._fc = FusedProjection.of(head.fc, ()) or head.fc

    def project(self, features: Tensor) -> Tensor:
        """The head takes the target's features as they are."""
        return features.to(self._dtype)

    def forward(self, feeds: Seq[Feed], features: Tensor) -> Tensor:
        """One pass, `features` `[T, hidden]` beside the tokens of `feeds`; new ones `[R, hidden]` at the last rows."""
        batch = RaggedBatch.of(feeds, self.arena.page_size, self._device)
        if self._fused is None:
            made: Tensor = self._head(batch, features, Ragged(batch, self.arena, self._attend))
        else:
            made = self._fused.run(batch, self._fc(self._head.joined(batch.input_ids, features)))
        return made[batch.logit_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[R, vocab]` of features, by the target's own output matrix."""
        return cast("Tensor", self._output(hidden.to(self._output_dtype)).float())
