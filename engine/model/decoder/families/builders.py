"""Parts of an `Architecture` from the usual names of config fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.architecture import Architecture, AttentionLayer, HeadNorm, Layer, Mixer, NormForm
from pilotfish.engine.model.decoder.feed_forward import ACTIVATIONS, LEARNED, GatedFeed, PlainFeed
from pilotfish.engine.model.decoder.rotary import RotaryTable

FULL, SLIDING = "full_attention", "sliding_attention"


def refuse(condition: object, what: str) -> None:
    """If the condition holds, raise ModelError, so that transformers runs the model."""
    if condition:
        raise ModelError(f"{what} is not in the table of architectures")


def grouped(config: Any, *, bias: bool | None = None, kv_heads: int | None = None, **more: Any) -> AttentionLayer:
    """The attention of most families; `bias`: of all four matrices, default: as in Llama-like configs."""
    heads = config.num_attention_heads
    kv_heads = kv_heads or getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    refuse(heads % kv_heads or head_dim % 2, f"attention of {heads} and {kv_heads} heads of {head_dim}")
    has_bias = bool(getattr(config, "attention_bias", False)) if bias is None else bias
    fields: dict[str, Any] = {"spec": AttentionSpec(head_dim**-0.5), "qkv_bias": has_bias, "out_bias": has_bias}
    fields["rotary"] = more.pop("rotary", None) or rotary_of(config, head_dim)
    return AttentionLayer(heads, kv_heads, head_dim, **fields | more)


def normed_heads(config: Any) -> HeadNorm:
    """A norm per head, with a shared weight."""
    return HeadNorm(NormForm(config.rms_norm_eps))


def after_rotation(config: Any) -> AttentionLayer:
    """Hunyuan's: norms of heads after the rotation. An `alpha` changes the base, equally for all lengths."""
    norm = HeadNorm(NormForm(config.rms_norm_eps), turned=True, names=("query_layernorm", "key_layernorm"))
    rope, dim = dict(config.rope_parameters), getattr(config, "head_dim", None)
    if rope.get("rope_type") == "dynamic" and rope.get("alpha") and dim:
        rope |= {"rope_type": "default", "rope_theta": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))}
        return grouped(config, norm=norm, rotary=RotaryTable.of(rope, dim))
    return grouped(config, norm=norm)


def rotary_of(config: Any, head_dim: int) -> RotaryTable:
    """The rotary positions of all layers; None if each kind of layers has its own."""
    rope = config.rope_parameters
    if "rope_type" not in rope:
        return RotaryTable.none(head_dim)
    return turning(config, rope, head_dim)


def turning(config: Any, rope: Any, head_dim: int) -> RotaryTable:
    """The rotary positions that these parameters of the config describe."""
    return RotaryTable.of({"max_position_embeddings": config.max_position_embeddings} | dict(rope), head_dim)


def gated(config: Any, **more: Any) -> GatedFeed:
    """The gated feed-forward of most families."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    refuse(activation not in ACTIVATIONS or activation in LEARNED, f"the activation {activation}")
    bias = bool(getattr(config, "mlp_bias", False))
    inner = more.pop("inner", None) or config.intermediate_size
    return GatedFeed(inner, activation, **{"bias": bias} | more)


def plain(inner: int, activation: str, **more: Any) -> PlainFeed:
    """A feed-forward without a gate."""
    refuse(activation not in ACTIVATIONS, f"the activation {activation}")
    return PlainFeed(inner, activation, **more)


def decoder(config: Any, mixer: Mixer, feed: Any, layer: Any = None, **more: Any) -> Architecture:
    """A model of equal layers; `layer`: further fields of a layer."""
    norm = more.pop("norm", None) or NormForm(config.rms_norm_eps)
    layers = (Layer(mixer, feed, **(layer or {})),) * config.num_hidden_layers
    return Architecture(
        layers, config.vocab_size, config.hidden_size, norm, is_tied=bool(config.tie_word_embeddings), **more
    )


def granite_factors(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Granite's factors, as fields of a layer and of a model."""
    scale = None if config.embedding_multiplier == 1 else float(config.embedding_multiplier)
    logits = None if config.logits_scaling == 1 else 1 / config.logits_scaling
    return {"scale": float(config.residual_multiplier)}, {"embedding_scale": scale, "logit_scale": logits}


def with_attention(made: Architecture, fields: Iterable[dict[str, Any]]) -> Architecture:
    """With other fields of each layer's attention; `window` is one of its spec."""
    layers = []
    for layer, changed in zip(made.layers, fields, strict=True):
        assert isinstance(layer.mixer, AttentionLayer), "a layer without attention"
        spec = changed.pop("spec", layer.mixer.spec)
        spec = replace(spec, window=changed.pop("window", spec.window))
        layers.append(replace(layer, mixer=replace(layer.mixer, spec=spec, **changed)))
    return replace(made, layers=tuple(layers))


def with_windows(config: Any, made: Architecture) -> Architecture:
    """Set the window in the layers selected by `layer_types`, or in all if the config has a window but no such list."""
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or [FULL if config.sliding_window is None else SLIDING] * len(made.layers)
    refuse(not set(kinds) <= {FULL, SLIDING}, f"layer_types {sorted(set(kinds))}")
    return with_attention(made, [{"window": config.sliding_window if kind == SLIDING else None} for kind in kinds])


def of_kinds(config: Any, made: Architecture) -> Architecture:
    """Set the rotary positions of each kind of layers, if any."""
    dim, found = made.attention.head_dim, {kind: config.rope_parameters[kind] for kind in set(config.layer_types)}
    still = RotaryTable.none(dim)
    tables = {kind: still if rope is None else turning(config, rope, dim) for kind, rope in found.items()}
    return with_attention(made, [{"rotary": tables[kind]} for kind in config.layer_types])


def rotary_in_windows(config: Any, made: Architecture) -> Architecture:
    """Set windows; layers without one also have no rotary positions."""
    made = with_windows(config, made)
    still = RotaryTable.none(made.attention.head_dim)
    return with_attention(made, [{"rotary": still} if kind == FULL else {} for kind in config.layer_types])


def with_bases(config: Any, made: Architecture) -> Architecture:
    """Set windows, sinks and each layer's rotary base; 0: no rotary positions."""
    made, dim, rope = with_windows(config, made), made.attention.head_dim, dict(config.rope_parameters)
    tables = {base: turning(config, rope | {"rope_theta": base}, dim) for base in set(config.layer_rope_theta) - {0}}
    tables[0] = RotaryTable.none(dim)
    return with_attention(made, [{"rotary": tables[base], "has_sinks": True} for base in config.layer_rope_theta])


def cohere(config: Any, inner: int | None = None) -> Architecture:
    """Attention and feed-forward read the same normalised row; `inner`: of the feed-forward, default as configured."""
    eps = getattr(config, "rms_norm_eps", None)
    form = NormForm(config.layer_norm_eps, centred=True) if eps is None else NormForm(eps)
    norm = HeadNorm(form, extent="heads") if getattr(config, "use_qk_norm", False) else None
    layer = {"norms": ("input_layernorm", None, None, None), "parallel": True}
    mixer, feed = grouped(config, interleaved=True, norm=norm), gated(config, bias=False, inner=inner)
    return decoder(config, mixer, feed, layer, norm=form, logit_scale=config.logit_scale)
