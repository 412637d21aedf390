"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer that drafts from several depths of the target.

The target's hidden states at three places are projected to one feature. Fed the feature of position t and token t + 1,
the layer computes

    x = attention([norm(embedding of the token), norm(feature)]) + feature      made = mlp(norm(x)) + x

and `made`, the feature of t + 1, is fed back for the next draft, without a projection. Logits come from its own norm
and output matrix, over a vocabulary that may be smaller than the target's: `d2t` is the difference to the target's id
for each token. Further layers are ordinary ones. In EAGLE-3.1 each place has a norm before the projection (`fc_norm`)
and the normalised feature is fed back (`norm_output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import shape_of
from pilotfish.engine.model.decoder.architecture import Architecture, NormForm
from pilotfish.engine.model.decoder.norms import norm_of
from pilotfish.engine.model.decoder.shapes import Shapes
from pilotfish.engine.model.decoder.stack import FINAL
from pilotfish.engine.model.decoder.weights import HEAD, WeightReader
from pilotfish.engine.proposers.heads.base import Head
from pilotfish.engine.proposers.heads.layers import (
    FeatureHead,
    check_sizes,
    layer_config,
    layer_of,
    reader_of,
    sizes_of,
)
from pilotfish.engine.proposers.heads.proposer import HeadProposer
from pilotfish.engine.proposers.heads.weights import KIND, drafted_ids, flattened, matrix_shapes

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel
    from pilotfish.engine.model.decoder.families.described import ModelConfig

_MARK = "hidden_norm.weight"  # a norm that EAGLE-1 heads do not have
_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
_LLAMA_LIKE = frozenset({"llama", "phi3", "eagle3", "eagle"})  # of configs with Llama layers
# Fields, of the config or of its `eagle_config`, that would change the computation, with the values that do not.
_UNCHANGED: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (), "parallel_drafting": (False,), "mask_token_id": (), "ptd_token_id": (), "pard_token": (),
    "parallel_draft_step": (0, 1), "parallel_draft_heads_num_layers": (0,), "use_mtp_layernorm": (False,),
    "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,), "is_causal": (True,),
    "partial_rotary_factor": (1, 1.0), "logit_scale": (1, 1.0), "kv_lora_rank": (), "use_qk_norm": (False,),
}  # fmt: skip
_TRAINING = ("verifier_lm_head.", "verifier_norm.", "t2d")  # copies of the target's parts; the inverse of `d2t`


def is_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint is an EAGLE-3 head instead of EAGLE-1."""
    named = [str(name) for name in config.get("architectures") or ()]
    kinds = config.get(KIND) in ("eagle3", "peagle") or any("eagle3" in name.lower() for name in named)
    return kinds or "d2t" in tensors or any(key.endswith(_MARK) for key in tensors)


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """The options of EAGLE-3 heads, besides the sizes of layers."""

    windows: tuple[int | None, ...]  # window of each layer
    places: tuple[int, ...]  # of the target, projected to one feature; a single `FINAL` is used unchanged
    norms: tuple[str, ...]  # before the projection: one per place (`fc_norm`), one for all, or none
    norm_before_residual: bool  # the first layer adds to the normalised feature
    norm_output: bool  # the normalised feature is fed back

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, depth: int) -> Eagle3Options:
        """The options of a flat config (`weights.flattened`); `depth`: number of the target's layers.

        Raises:
            ModelError: an unsupported variant.
        """
        inner = config.get("eagle_config") or {}
        if not isinstance(inner, Mapping):
            raise ModelError(f"{name!r}: eagle_config is {inner!r}; expected an object")
        both = {**config, **inner}
        _check_variant(both, name)
        layers, kinds, window = both.get("num_hidden_layers", 1), both.get("layer_types"), both.get("sliding_window")
        windows = [window if kind == "sliding_attention" else None for kind in (kinds or [None] * layers)[:layers]]
        if KIND in config and "norm_before_residual" not in config:
            raise ModelError(f"{name!r}: config.json has no norm_before_residual, whose default is ambiguous")
        reads_layers = both.get("use_aux_hidden_state", True)
        places = _places(config, inner, name, depth) if reads_layers else (FINAL,)
        norms = list[str]()
        if both.get("fc_norm") or both.get("use_aux_norm"):
            norms += [f"fc_norm.{i}" for i in range(len(places))]
        if both.get("norm_before_fc"):
            if norms:
                raise ModelError(f"{name!r}: fc_norm and norm_before_fc are both true; expected only one")
            norms = ["input_norm"]
        own = bool(both.get("norm_before_residual")), bool(both.get("norm_output"))
        return cls(tuple(windows), places, tuple(norms) if reads_layers else (), *own)

    def own_shapes(self, hidden: int, width: int, *, has_bias: bool) -> Shapes:
        """The shapes of norms and projection of a head with this hidden size, for a target of `width`."""
        if self.places == (FINAL,):
            return {}
        wide = len(self.places) * width
        norms: Shapes = {f"{norm}.weight": (wide // len(self.norms),) for norm in self.norms}
        return norms | matrix_shapes("fc", hidden, wide, has_bias=has_bias)


def _check_variant(config: Mapping[str, Any], name: str) -> None:
    kinds = config.get("architectures") or ()
    if not _ARCHITECTURES.issuperset(kinds):
        raise ModelError(f"{name!r}: architectures are {kinds}; EAGLE-3 heads support llama layers only")
    if config.get("model_type", "llama") not in _LLAMA_LIKE:
        raise ModelError(f"{name!r}: model_type is {config['model_type']!r}; EAGLE-3 heads support llama layers only")
    for key, unchanged in _UNCHANGED.items():
        if config.get(key) is not None and config[key] not in unchanged:
            raise ModelError(f"{name!r}: {key} is {config[key]!r}, which is not supported in EAGLE-3 heads")


def _places(config: Mapping[str, Any], inner: Mapping[str, Any], name: str, depth: int) -> tuple[int, ...]:
    """The places of the target; the paper's are before layers 2, depth / 2 and depth - 3.

    Configured layers are those whose input is read, as in vLLM and speculators. In `eagle_config` a list that begins
    with 1 means layers whose output is read, as in SpecForge and NVIDIA's heads (SGLang distinguishes them in this
    way). So does a list elsewhere that has the paper's places as outputs, because it was copied from there.
    """
    paper, key = (2, depth // 2, depth - 3), "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or inner.get(key)
    if not ids:
        if paper[2] < 0:
            raise ModelError(f"{name!r} reads layers 2, {paper[1]} and {paper[2]}; the target has {depth} layers")
        return paper
    outputs = tuple(one + 1 for one in ids)
    are_outputs = outputs == paper if config.get(key) else ids[0] == 1
    places = outputs if are_outputs else tuple(ids)
    if not 0 <= min(places) <= max(places) <= depth:
        raise ModelError(f"{name!r}: {key} are {ids}; the target has {depth} layers")
    return places


class Eagle3Head(FeatureHead):
    """Keys as published, with `midlayer` as `layers.0`; embedding and output matrix may be the target's."""

    def __init__(
        self,
        architecture: Architecture,
        weights: WeightReader,
        target: DecoderModel,
        options: Eagle3Options,
        drafts: Tensor | None,
    ) -> None:
        super().__init__(architecture, weights, target, drafts=drafts, feeds_normed=options.norm_output)
        below, wide = weights.below("model."), len(options.places) * shape_of(target.config, "hidden_size")
        norms = (norm_of(architecture.norm, below, name, wide // len(options.norms)) for name in options.norms)
        self.norms, self.fc = nn.ModuleList(norms), None
        if options.places != (FINAL,):
            self.fc = below.matrix({"fc": architecture.width}, wide, has_bias="model.fc.bias" in weights.weights)

    def project(self, features: Tensor) -> Tensor:
        """`[n, places * width of the target]` -> `[n, width]`."""
        if self.fc is None:
            return features.to(self.dtype)
        if len(self.norms):
            chunks = features.chunk(len(self.norms), -1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.norms, chunks, strict=True)], -1)
        return cast("Tensor", self.fc(features.to(self.dtype)))


def load_eagle3(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: DecoderModel) -> Head:
    """A head from a loaded checkpoint, on the target's device.

    Raises:
        ModelError: it is an unsupported variant, or incompatible with this target.
    """
    flat = flattened(config, name, "eagle3")
    options = Eagle3Options.of(flat, name, shape_of(target.config, "num_hidden_layers"))
    named = {_key(key): tensor for key, tensor in tensors.items()}
    named = {k: t for k, t in named.items() if not k.startswith(_TRAINING) and not k.endswith("rotary_emb.inv_freq")}
    if flat.get("tie_word_embeddings") and "embed_tokens.weight" in named:
        named.setdefault(HEAD, named["embed_tokens.weight"])
    settings = layer_config(flat, name, "llama", num_hidden_layers=len(options.windows))
    (width, vocab), hidden = sizes_of(target), settings.hidden_size
    check_sizes(name, flat.get("target_hidden_size") or hidden, settings.vocab_size, target)
    shares = not {"embed_tokens.weight", HEAD} <= named.keys() or options.places == (FINAL,)
    if shares and hidden != width:
        raise ModelError(
            f"{name!r} has hidden size {hidden} and no embed_tokens or lm_head; the target's have size {width}"
        )
    drafts = drafted_ids(named, name, vocab)
    made = _architecture(settings, options, named, name)
    own = options.own_shapes(hidden, width, has_bias="fc.bias" in named)
    own[HEAD] = flat.get("draft_vocab_size") or vocab, hidden
    head = Eagle3Head(made, reader_of(made, named, target, name, own), target, options, drafts)
    return head.over(options.places, HeadProposer)


def _architecture(
    settings: ModelConfig, options: Eagle3Options, tensors: Mapping[str, Tensor], name: str
) -> Architecture:
    """The first layer reads a second row; its own row is normalised by `hidden_norm`."""
    layers = []
    for number, window in enumerate(options.windows):
        layer = layer_of(settings, name, tensors, number, window, reads=None if number else 2 * settings.hidden_size)
        if not number:
            norms, normed = ("hidden_norm", *layer.norms[1:]), options.norm_before_residual
            layer = replace(layer, beside="input_layernorm", norms=norms, keeps_normed=normed)
        layers.append(layer)
    form = NormForm(settings.rms_norm_eps)
    return Architecture(tuple(layers), settings.vocab_size, settings.hidden_size, form)


def _key(key: str) -> str:
    """The name of a tensor in the form of EAGLE's authors, with numbered layers."""
    key = key.removeprefix("module.").removeprefix("model.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key
