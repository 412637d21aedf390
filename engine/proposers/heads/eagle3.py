"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer that drafts from several depths of the target at once.

The target's hidden states at three places are projected to one feature. Fed the feature of position t and token t + 1,
the layer computes

    x = attention([norm(embedding of the token), norm(feature)]) + feature      made = mlp(norm(x)) + x

and `made`, the feature of t + 1, is fed back for the next draft, without a projection. Its logits are those of a norm
and an output matrix of its own, over a vocabulary that may be smaller than the target's: `d2t` has for each of its
tokens the distance to the target's id. Further layers are usual ones. In EAGLE-3.1 each place has a norm before the
projection (`fc_norm`) and the normed feature is fed back (`norm_output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.model.checkpoint import shape_of
from engine.model.decoder.architecture import Architecture, NormForm
from engine.model.decoder.norms import norm_of
from engine.model.decoder.shapes import Shapes
from engine.model.decoder.weights import HEAD, WeightReader
from engine.model.linear.rows import matmul_shape
from engine.model.tap import FINAL
from engine.proposers.heads.base import Head
from engine.proposers.heads.layers import FeatureHead, layer_config, layer_of, reader_of
from engine.proposers.heads.speculators import KIND, flattened
from engine.proposers.heads.weights import matrix_shapes, target_ids

if TYPE_CHECKING:
    from engine.model.decoder.decoder import DecoderModel
    from engine.model.decoder.families.described import ModelConfig

_MARK = "hidden_norm.weight"  # the norm that an EAGLE-1 head does not have
_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
_LLAMA_LIKE = frozenset({"llama", "phi3", "eagle3", "eagle"})  # of configs whose tensors are those of Llama's layer
_OF_LAYERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters",
)  # fmt: skip
# Fields, of the config or of its `eagle_config`, that would change what is computed, and the values that do not.
_UNCHANGED: Mapping[str, tuple[object, ...]] = {
    "quantization_config": (), "parallel_drafting": (False,), "mask_token_id": (), "ptd_token_id": (), "pard_token": (),
    "parallel_draft_step": (0, 1), "parallel_draft_heads_num_layers": (0,), "use_mtp_layernorm": (False,),
    "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,), "is_causal": (True,),
    "partial_rotary_factor": (1, 1.0), "logit_scale": (1, 1.0), "kv_lora_rank": (), "use_qk_norm": (False,),
}  # fmt: skip
_TRAINING = ("verifier_lm_head.", "verifier_norm.", "t2d")  # copies of the target's parts; the inverse of `d2t`


def is_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint is an EAGLE-3 head, and none of EAGLE-1."""
    named = [str(name) for name in config.get("architectures") or ()]
    kinds = config.get(KIND) in ("eagle3", "peagle") or any("eagle3" in name.lower() for name in named)
    return kinds or "d2t" in tensors or any(key.endswith(_MARK) for key in tensors)


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What EAGLE-3 heads differ in, beside the sizes of their layers."""

    layers: int
    windows: tuple[int | None, ...]  # of each layer: to how many positions it attends
    places: tuple[int, ...]  # of the target that are projected to one feature; `FINAL` alone is taken as it is
    place_norms: bool  # a norm for each place (`fc_norm`)
    joint_norm: bool  # one norm for all places together (`norm_before_fc`)
    norm_before_residual: bool  # the first layer adds to the normed feature
    norm_output: bool  # the normed feature is fed back

    @property
    def reads_output(self) -> bool:
        """Whether it reads the target's last hidden state as it is, and has no projection."""
        return self.places == (FINAL,)

    def norms(self, width: int) -> dict[str, int]:
        """The sizes of the norms before the projection, by name; `width` is that of the target."""
        if self.reads_output:
            return {}
        if self.place_norms:
            return {f"fc_norm.{i}": width for i in range(len(self.places))}
        return {"input_norm": len(self.places) * width} if self.joint_norm else {}

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, depth: int) -> Eagle3Options:
        """The options of a flat config (`speculators.flattened`); `depth`: number of the target's layers.

        Raises:
            ModelError: a variant that is not served.
        """
        inner = config.get("eagle_config") or {}
        if not isinstance(inner, Mapping):
            raise ModelError(f"{name!r}: eagle_config is {inner!r}; expected an object")
        both = {**config, **inner}
        _check_variant(both, name)
        layers = both.get("num_hidden_layers", 1)
        kinds, window = both.get("layer_types") or (), both.get("sliding_window")
        windows = [window if kind == "sliding_attention" else None for kind in kinds[:layers]] or [None] * layers
        if KIND in config and "norm_before_residual" not in config:
            raise ModelError(f"{name!r}: config.json does not say norm_before_residual, which has no one default")
        place_norms, joint_norm = (
            bool(both.get("fc_norm") or both.get("use_aux_norm")),
            bool(both.get("norm_before_fc")),
        )
        if place_norms and joint_norm:
            raise ModelError(f"{name!r}: fc_norm and norm_before_fc are both true; one of them is expected")
        reads_layers = both.get("use_aux_hidden_state", True)
        return cls(
            layers,
            tuple(windows),
            _places(config, inner, name, depth) if reads_layers else (FINAL,),
            place_norms,
            joint_norm,
            bool(both.get("norm_before_residual")),
            bool(both.get("norm_output")),
        )


def _check_variant(config: Mapping[str, Any], name: str) -> None:
    kinds = config.get("architectures") or ()
    if not _ARCHITECTURES.issuperset(kinds):
        raise ModelError(f"{name!r}: architectures are {kinds}; of EAGLE-3 those with Llama's layer are served")
    if config.get("model_type", "llama") not in _LLAMA_LIKE:
        raise ModelError(f"{name!r}: model_type is {config['model_type']!r}; of EAGLE-3 Llama's layer is served")
    for key, unchanged in _UNCHANGED.items():
        if config.get(key) is not None and config[key] not in unchanged:
            raise ModelError(f"{name!r}: {key} is {config[key]!r}; EAGLE-3 heads with it are not served")


def _places(config: Mapping[str, Any], inner: Mapping[str, Any], name: str, depth: int) -> tuple[int, ...]:
    """Where the target is read; the paper's places are before layers 2, depth / 2 and depth - 3.

    Where a config names layers, these are layers whose input is read, as in vLLM and speculators. In `eagle_config` a
    list that begins with 1 names layers whose output is read, as in SpecForge and NVIDIA's heads: SGLang tells them
    apart in this way. So does a list elsewhere that has the paper's places as outputs: it was copied from there.
    """
    paper, key = (2, depth // 2, depth - 3), "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or inner.get(key)
    if not ids:
        if paper[2] < 0:
            raise ModelError(f"{name!r} reads layers 2, {paper[1]} and {paper[2]} of the target, which has {depth}")
        return paper
    outputs = tuple(one + 1 for one in ids)
    are_outputs = outputs == paper if config.get(key) else ids[0] == 1
    places = outputs if are_outputs else tuple(ids)
    if not 0 <= min(places) <= max(places) <= depth:
        raise ModelError(f"{name!r}: {key} are {ids}; the target has {depth} layers")
    return places


class Eagle3Head(FeatureHead):
    """Keys as published, `midlayer` being `layers.0`; embedding and output matrix may be the target's."""

    def __init__(
        self,
        architecture: Architecture,
        weights: WeightReader,
        target: DecoderModel,
        options: Eagle3Options,
        drafts: Tensor | None,
    ) -> None:
        super().__init__(architecture, weights, target, drafts=drafts, feeds_normed=options.norm_output)
        below, width = weights.below("model."), shape_of(target.config, "hidden_size")
        norms = options.norms(width).items()
        self.norms = nn.ModuleList(norm_of(architecture.norm, below, name, size) for name, size in norms)
        self.fc: nn.Module | None = None
        if not options.reads_output:
            has_bias = "model.fc.bias" in weights.weights
            self.fc = below.matrix({"fc": width}, len(options.places) * width, has_bias=has_bias)

    def project(self, features: Tensor) -> Tensor:
        """`[n, places * width of the target]` -> `[n, width]`."""
        if self.fc is None:
            return features.to(self.dtype)
        if len(self.norms):
            chunks = features.chunk(len(self.norms), -1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.norms, chunks, strict=True)], -1)
        return cast("Tensor", self.fc(features.to(self.dtype)))

    def inputs(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `FeatureHead`: the first layer reads the embedding beside the feature."""
        return features, self.embedded(ids)


def load_eagle3(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: DecoderModel) -> Head:
    """A head of a checkpoint that is read already, on the target's device.

    Raises:
        ModelError: it is of a variant that is not served, or does not fit this target.
    """
    flat = flattened(config, name, "eagle3")
    options = Eagle3Options.of(flat, name, shape_of(target.config, "num_hidden_layers"))
    named = {_key(key): tensor for key, tensor in tensors.items()}
    named = {k: t for k, t in named.items() if not k.startswith(_TRAINING) and not k.endswith("rotary_emb.inv_freq")}
    offsets = named.pop("d2t", None)
    if flat.get("tie_word_embeddings") and "embed_tokens.weight" in named:
        named.setdefault("lm_head.weight", named["embed_tokens.weight"])
    size = matmul_shape(target.get_output_embeddings())
    if size is None:
        raise ModelError(f"{type(target).__name__}: its output is no matrix that says how many tokens there are")
    settings = _settings(flat, options, name, size, named)
    made = _architecture(settings, options, named, name)
    weights = reader_of(made, named, target, name, _beside_layers(settings, options, named, size))
    drafts = _target_ids(offsets, named, name, size[1])
    return Eagle3Head(made, weights, target, options, drafts).over(options.places)


def _architecture(
    settings: ModelConfig, options: Eagle3Options, tensors: Mapping[str, Tensor], name: str
) -> Architecture:
    """The first layer reads a second row, and its own is normed by `hidden_norm`."""
    layers = []
    for number, window in enumerate(options.windows):
        layer = layer_of(settings, name, tensors, number, window, reads=None if number else 2 * settings.hidden_size)
        if not number:
            norms, normed = ("hidden_norm", *layer.norms[1:]), options.norm_before_residual
            layer = replace(layer, beside="input_layernorm", norms=norms, keeps_normed=normed)
        layers.append(layer)
    form = NormForm(settings.rms_norm_eps)
    return Architecture(tuple(layers), settings.vocab_size, settings.hidden_size, form)


def _beside_layers(
    settings: ModelConfig, options: Eagle3Options, tensors: Mapping[str, Tensor], target: tuple[int, int]
) -> Shapes:
    """The shapes of what is not as in a decoder."""
    (width, vocab), hidden = target, settings.hidden_size
    found: Shapes = {HEAD: (settings.draft_vocab_size or vocab, hidden)}
    if options.reads_output:
        return found
    found |= {f"{norm}.weight": (size,) for norm, size in options.norms(width).items()}
    return found | matrix_shapes("fc", hidden, len(options.places) * width, has_bias="fc.bias" in tensors)


def _key(key: str) -> str:
    """The name of a tensor as EAGLE's authors have it, with numbered layers."""
    key = key.removeprefix("module.").removeprefix("model.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def _settings(
    config: Mapping[str, Any], options: Eagle3Options, name: str, target: tuple[int, int], tensors: Mapping[str, Tensor]
) -> ModelConfig:
    """The config of the layers as a Llama's."""
    asked = {key: config[key] for key in _OF_LAYERS if config.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        rope = asked.get(key) or {}
        if "mrope" in (rope.get("rope_type"), rope.get("type")):  # of text, all sections have the same position
            asked[key] = {k: v for k, v in rope.items() if k == "rope_theta"} | {"rope_type": "default"}
    draft = config.get("draft_vocab_size")
    settings = layer_config(asked, name, "llama", num_hidden_layers=options.layers, draft_vocab_size=draft)
    width, hidden = config.get("target_hidden_size") or settings.hidden_size, settings.hidden_size
    found, want = f"{width} features and {settings.vocab_size} tokens", f"{target[0]} and {target[1]}"
    shares = not {"embed_tokens.weight", "lm_head.weight"} <= tensors.keys() or options.reads_output
    if (width, settings.vocab_size) != target:
        raise ModelError(f"{name!r} is a head for {found}; the target has {want}")
    if shares and hidden != target[0]:
        raise ModelError(
            f"{name!r} is {hidden} wide, and embed_tokens or lm_head is missing: the target's are {target[0]} wide"
        )
    return settings


def _target_ids(offsets: Tensor | None, tensors: Mapping[str, Tensor], name: str, vocab: int) -> Tensor | None:
    """The target's ids of the head's tokens, int64 `[draft vocab]`; None where they are the same."""
    size = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab
    if offsets is None:
        if size != vocab:
            raise ModelError(
                f"{name!r} drafts {size} of the target's {vocab} tokens, and d2t, which says which, is missing"
            )
        return None
    ids = target_ids(offsets, size, vocab)
    if ids is None:
        raise ModelError(f"{name!r}: d2t is no map from the head's {size} tokens to the target's {vocab}")
    return None if torch.equal(ids, torch.arange(vocab)) else ids
