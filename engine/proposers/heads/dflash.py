"""DFlash (Chen, Liang and Liu 2026, arXiv 2602.06036): a block of masks becomes all drafts of a sequence in one pass.

The draft has a few Qwen3 layers. Their context is not text but the target's hidden states, fused to one feature per
position, from which every layer computes only keys and values. After the context comes the block: the newest token and
a mask per draft, at consecutive positions. Its rows see the context and the whole block, and the row of mask j predicts
draft j. For fewer drafts, fewer masks are fed, as in the authors' code and in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.attention import Attend
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.model.checkpoint import shape_of
from pilotfish.engine.model.decoder.architecture import Architecture, HeadNorm, NormForm
from pilotfish.engine.model.decoder.families.builders import FULL, SLIDING
from pilotfish.engine.model.decoder.norms import norm_of
from pilotfish.engine.model.decoder.weights import HEAD, WeightReader
from pilotfish.engine.proposers.chain import Chain, extend_at_once
from pilotfish.engine.proposers.heads.base import Head, HeadContext
from pilotfish.engine.proposers.heads.layers import FeatureHead, check_sizes, layer_config, layer_of, reader_of
from pilotfish.engine.proposers.heads.proposer import HeadProposer
from pilotfish.engine.proposers.heads.weights import KIND, drafted_ids, flattened, load_checkpoint
from pilotfish.engine.stats import Forward

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel
    from pilotfish.engine.model.decoder.families.described import ModelConfig

# In the speculators form: parts of the target used in training, and the inverse of `d2t`.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")
_ARCHITECTURES = frozenset({"DFlashDraftModel", "DFlashSpeculator"})
_BACKBONES = ("qwen3", "llama")  # the layers are still Qwen3's
# Supported or irrelevant fields: of Qwen3's and all configs, and of both forms of DFlash's.
_KNOWN = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
     "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache",
     "tie_word_embeddings", "rope_parameters", "attention_bias", "use_sliding_window", "sliding_window",
     "max_window_layers", "layer_types", "attention_dropout", "model_type", "architectures", "dtype",
     "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "id2label", "label2id",
     "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states",
     "problem_type", "torch_dtype", "rope_theta", "rope_scaling", "auto_map", "final_logit_softcapping",
     "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal", "causal",
     KIND, "speculators_version", "speculators_config", "draft_vocab_size", "target_hidden_size",
     "aux_hidden_state_layer_ids", "sliding_window_non_causal"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """The config of a draft for one target."""

    architecture: Architecture  # of its layers
    places: tuple[int, ...]  # of the target that it reads (`Tap`)
    block: int  # rows of a block: the newest token and one mask per draft
    mask: int  # id of the mask token
    is_causal: tuple[bool, ...]  # by layer: whether attention within the block is causal
    draft_vocab: int  # draft vocabulary size

    @classmethod
    def of(
        cls, name: str, config: Mapping[str, Any], target: DecoderModel, tensors: Mapping[str, Tensor]
    ) -> DFlashConfig:
        """Read the config of the draft `name`; the head size follows from `tensors`.

        In the authors' form (`dflash_config`) the target's layer i is read after it, in `speculators` before it.

        Raises:
            ModelError: it is another kind of draft, has unsupported options, or is incompatible with this target.
        """
        asked = _asked(name, config)
        settings = _settings(name, asked, tensors)
        depth, width, vocab = shape_of(target.config, "num_hidden_layers"), settings.hidden_size, settings.vocab_size
        check_sizes(name, width, vocab, target)
        if asked.get("target_hidden_size", width) != width:
            found = asked["target_hidden_size"]
            raise ModelError(f"{name!r}: target_hidden_size is {found}, but hidden_size is {width}")
        if (found := asked.get("num_target_layers") or depth) != depth:
            raise ModelError(f"{name!r} has num_target_layers {found}; the target has {depth} layers")
        key, after = ("aux_hidden_state_layer_ids", 0) if KIND in config else ("target_layer_ids", 1)
        ids, mask, block = (asked.get(field) for field in (key, "mask_token_id", "block_size"))
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i + after < depth for i in ids):
            # After the last layer, some implementations read before the final norm and others after it.
            raise ModelError(f"{name!r}: {key} is {ids!r}; expected a list of layers before the last of its {depth}")
        if type(mask) is not int or not 0 <= mask < vocab:
            raise ModelError(f"{name!r}: mask_token_id is {mask!r}; the target has {vocab} tokens")
        if type(block) is not int or block < 2:
            raise ModelError(f"{name!r}: block_size is {block!r}; expected at least 2")
        form, kinds = NormForm(settings.rms_norm_eps), settings.layer_types
        windows = [settings.sliding_window if kind == SLIDING else None for kind in kinds]
        layers = (layer_of(settings, name, tensors, i, each, norm=HeadNorm(form)) for i, each in enumerate(windows))
        made = Architecture(tuple(layers), vocab, width, form, softcap=asked.get("final_logit_softcapping"))
        causal = asked.get("is_causal", asked.get("causal"))  # for all layers; default: layers with a window
        is_causal = tuple(kind == SLIDING if causal is None else bool(causal) for kind in kinds)
        apart = asked.get("sliding_window_non_causal", KIND in config)
        if SLIDING in kinds and (causal is False or apart):
            said = f"causal is {causal} and sliding_window_non_causal {apart}"
            raise ModelError(f"{name!r}: {said} with {SLIDING}: non-causal windows are not supported")
        places = tuple(i + after for i in ids)
        return cls(made, places, block, mask, is_causal, asked.get("draft_vocab_size") or vocab)


def _asked(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a config, in either form."""
    own = config.get("dflash_config") or {}
    if not isinstance(own, dict) or (not own and KIND not in config):
        raise ModelError(f"{name!r} is not a DFlash draft: config.json has neither dflash_config nor {KIND}")
    for one in config.get("architectures") or ():
        if one not in _ARCHITECTURES:
            raise ModelError(f"{name!r} is a {one}; supported: {', '.join(sorted(_ARCHITECTURES))}")
    flat = flattened(config, name, "dflash")
    flat.pop("dflash_config", None)
    asked = {key: value for key, value in [*own.items(), *flat.items()] if value is not None}
    for key, value in asked.items():
        if key not in _KNOWN and value not in (False, 0, {}, []):  # it might change the computation
            raise ModelError(f"{name!r}: {key} is {value!r}, which is not supported")
    return asked


def _settings(name: str, asked: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The config of the layers, in Qwen3's form."""
    kind = asked.get("model_type", "qwen3")
    if kind not in _BACKBONES:
        raise ModelError(f"{name!r}: model_type is {kind!r}; supported: {', '.join(_BACKBONES)}")
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    if norm is None:
        raise ModelError(f"{name!r} does not fit the target: layers.0.self_attn.q_norm.weight is missing")
    # The default of head_dim depends on the family; the tensors show the actual size.
    settings = layer_config(asked, name, "qwen3", head_dim=len(norm))
    kinds = settings.layer_types
    if not set(kinds) <= {FULL, SLIDING} or len(kinds) != settings.num_hidden_layers:
        raise ModelError(f"{name!r}: layer_types is {kinds}; expected {FULL} or {SLIDING} for each layer")
    if SLIDING in kinds and settings.sliding_window is None:
        raise ModelError(f"{name!r}: layers with {SLIDING} require sliding_window and use_sliding_window: true")
    return settings


class DFlashHead(FeatureHead):
    """Keys as published: `fc`, `hidden_norm`, `layers.i` as in Qwen3, `norm`; optionally `embed_tokens`, `lm_head`.

    The matrices of keys and values are stored twice, because context rows do not need queries, whose matrix is larger.
    """

    def __init__(
        self, config: DFlashConfig, weights: WeightReader, target: DecoderModel, drafts: Tensor | None
    ) -> None:
        made = config.architecture
        super().__init__(made, weights, target, drafts=drafts)
        below, width = weights.below("model."), made.width
        self.fc = below.matrix({"fc": width}, len(config.places) * width, has_bias=False)
        self.hidden_norm = norm_of(made.norm, below, "hidden_norm", width)
        mixers: list[Any] = [layer.mixer for layer in made.layers]
        self.keys_and_values = nn.ModuleList(
            below.below(f"layers.{i}.self_attn.").matrix(
                dict.fromkeys(("k_proj", "v_proj"), mixer.sizes[1]), width, has_bias=mixer.qkv_bias
            )
            for i, mixer in enumerate(mixers)
        )
        self.config = config

    def project(self, features: Tensor) -> Tensor:
        """The target's features `[n, places * width]`, fused: `[n, width]`."""
        return cast("Tensor", self.hidden_norm(self.fc(features.to(self.dtype))))

    def forward(self, features: Tensor, ragged: Ragged) -> Tensor:
        """Write each layer's keys and values of fused features `[T, width]`; returns those at the last rows.

        Context rows are only projected, without attention.
        """
        turned = self.rotations.of(ragged.batch.position_ids, self.dtype, len(self.layers))
        for layer, matmul, rotary in zip(self.layers, self.keys_and_values, turned, strict=True):
            cast("Any", layer).mixer.write(matmul(features), rotary, ragged)
        return features[ragged.batch.logit_rows]

    def fill_in(self, causal: Ragged, mutual: Ragged) -> Tensor:
        """The outputs `[R, width]` of a batch's last rows; layers that are not causal run over `mutual`."""
        batch = causal.batch
        x = self.ends[0](batch.input_ids).to(self.dtype)[None]
        turned = self.rotations.of(batch.position_ids, self.dtype, len(self.layers))
        for layer, rotary, is_causal in zip(self.layers, turned, self.config.is_causal, strict=True):
            x = layer(x, rotary, causal if is_causal else mutual)
        assert self.norm is not None
        return cast("Tensor", self.norm(x[0][batch.logit_rows]))


def load_dflash(name: str, revision: str | None, target: DecoderModel) -> Head:
    """A draft of a local folder or a hub id, in the authors' form or that of `speculators`.

    Raises:
        ModelError: it is not a DFlash draft, is not supported, or is incompatible with this target.
    """
    written, tensors = load_checkpoint(name, revision)
    config = DFlashConfig.of(name, written, target, tensors)
    made, tensors = config.architecture, {key: tensor for key, tensor in tensors.items() if key not in _UNUSED}
    drafts, width = drafted_ids(tensors, name, made.vocab_size), made.width
    own = {"fc.weight": (width, len(config.places) * width), "hidden_norm.weight": (width,)}
    reader = reader_of(made, tensors, target, name, own | {HEAD: (config.draft_vocab, width)})
    return DFlashHead(config, reader, target, drafts).over(config.places, DFlashProposer)


def attend_bidirectionally(
    attend: Attend, query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec
) -> Tensor:
    """As `attend`, but every row of a sequence also sees the rows after it.

    The last row sees all. So the rows of a sequence become further query heads of its last row, and every key is read
    once.
    """
    last, rows, home = batch.once("mutual", partial(_as_last_rows, batch))
    heads = k.shape[1]
    folded = query[rows].unflatten(2, (heads, -1)).transpose(1, 2)  # [B, kv_heads, n, group, key_dim]
    out = attend(folded.flatten(1, 3), k, v, last, spec).unflatten(1, folded.shape[1:4])
    unfolded: Tensor = out.transpose(1, 2).flatten(2, 3).flatten(0, 1)[home]
    return unfolded


def _as_last_rows(batch: RaggedBatch) -> tuple[RaggedBatch, Tensor, Tensor]:
    """The same sequences with only their last rows; the rows of each; and the index of each row among those.

    `[B, n]` rows of the batch, n of the longest: a shorter one repeats its last; `[T]` places among the B * n.
    """
    device, stops = batch.positions.device, batch.cu_seqlens[1:]
    spans = [range(start, stop) for start, stop in zip(batch.cu_seqlens, stops, strict=False)]
    n = max(map(len, spans))
    rows = torch.tensor([[min(span.start + i, span.stop - 1) for i in range(n)] for span in spans], device=device)
    home = torch.tensor([b * n + i for b, span in enumerate(spans) for i in range(len(span))], device=device)
    last = replace(
        batch, positions=batch.positions[rows[:, -1]], cu_seqlens=tuple(range(len(spans) + 1)), _worked_out={}
    )
    return last, rows, home


class DFlashProposer(HeadProposer):
    """Drafts up to `block` - 1 tokens of each sequence in one pass.

    Row r of a sequence's arena has the keys and values of the r-th feature. All are computed by the target; the block
    is beyond the cursor, and the next features overwrite it.
    """

    is_parallel = True  # one pass for any number of drafts

    head: DFlashHead

    def __init__(self, head: DFlashHead, places: tuple[int, ...], context: HeadContext) -> None:
        super().__init__(head, places, context)
        self.most_drafts = head.config.block - 1

    def draft(self, chains: list[Chain], forwards: list[Forward]) -> None:
        """Catch up on the target's features, within the token budget; then draft for sequences that have caught up."""
        for chain in chains:
            chain.k = min(chain.k, self.head.config.block - 1)
        read: list[Forward] = []
        ready, _ = self._catch_up(chains, read)
        # The features of one round are part of the block's pass; prompts need separate passes.
        forwards += [one for one in read if not ready or one.tokens > self.head.config.block * one.sequences]
        if ready:
            self._draw_block(ready)
            forwards.append(Forward("draft", len(ready), sum(chain.k + 1 for chain in ready)))

    def _draw_block(self, chains: list[Chain]) -> None:
        """Draw all drafts of each chain."""
        feeds = []
        for chain in chains:
            cursor, block = chain.sequence.draft, [chain.sequence.tokens[-1], *[self.head.config.mask] * chain.k]
            feeds.append(Feed(block, cursor.kv_len, cursor.page_table, chain.k))
        causal = self.ragged(feeds)
        mutual = replace(causal, attend=partial(attend_bidirectionally, causal.attend))
        extend_at_once(chains, self.head.logits(self.head.fill_in(causal, mutual)))

    def _grow(self, chains: list[Chain], hidden: Tensor) -> tuple[list[Chain], Tensor]:
        """Features yield no drafts: chains that have caught up continue with their blocks."""
        return chains, hidden
