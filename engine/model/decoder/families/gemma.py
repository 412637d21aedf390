"""The Gemma families. See `table.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.model.decoder.architecture import (
    FOUR_NORMS,
    Architecture,
    AttentionLayer,
    HeadNorm,
    Layer,
    NormForm,
)
from pilotfish.engine.model.decoder.experts import Router
from pilotfish.engine.model.decoder.families.builders import (
    FULL,
    SLIDING,
    decoder,
    gated,
    grouped,
    of_kinds,
    refuse,
    turning,
    with_attention,
    with_windows,
)
from pilotfish.engine.model.decoder.feed_forward import GatedFeed
from pilotfish.engine.model.decoder.gemma import LayerVectors, NormedExperts, ScaledSums, Streams
from pilotfish.engine.native.experts import ExpertGate
from pilotfish.engine.native.rows import GELU_TANH


def _gemma(config: Any) -> Architecture:
    refuse(getattr(config, "use_bidirectional_attention", None), "use_bidirectional_attention")
    norm = NormForm(config.rms_norm_eps, plus_one=True)
    scale = config.hidden_size**0.5
    return decoder(config, grouped(config), gated(config, bias=False), norm=norm, embedding_scale=scale)


def _gemma2(config: Any) -> Architecture:
    made = _gemma(config)
    spec = AttentionSpec(config.query_pre_attn_scalar**-0.5, softcap=config.attn_logit_softcapping)
    made = with_attention(made, [{"spec": spec} for _ in made.layers])
    layers = tuple(replace(layer, norms=FOUR_NORMS) for layer in made.layers)
    return with_windows(config, replace(made, layers=layers, softcap=config.final_logit_softcapping))


def _vaultgemma(config: Any) -> Architecture:
    made, norms = _gemma2(config), (FOUR_NORMS[0], None, FOUR_NORMS[2], None)
    return replace(made, layers=tuple(replace(layer, norms=norms) for layer in made.layers))


def _gemma3(config: Any) -> Architecture:
    """Norms of heads, and separate rotary positions in layers with a window."""
    made = _gemma2(config)
    return of_kinds(config, with_attention(made, [{"norm": HeadNorm(made.norm)} for _ in made.layers]))


def _sources(config: Any) -> list[int | None]:
    """The source of each layer's keys and values: the last layers share those of the last earlier layer of their kind.

    Kinds s f s f | s f with two that share: [None, None, None, None, 2, 3].
    """
    kinds, own = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
    latest = {kind: layer for layer, kind in enumerate(kinds[:own])}
    return [None] * own + [latest[kind] for kind in kinds[own:]]


def _attention(norm: NormForm) -> dict[str, Any]:
    """Scores without a scale, because queries, keys and values are all normalised."""
    return {"spec": AttentionSpec(1.0), "norm": HeadNorm(norm), "value_norm": replace(norm, has_weight=False)}


def _of_model(config: Any, norm: NormForm) -> dict[str, Any]:
    """The parts of both families outside of layers."""
    scale, cap = config.hidden_size**0.5, config.final_logit_softcapping
    return {"norm": norm, "embedding_scale": scale, "softcap": cap, "names": _NAMES}


def _vectors(config: Any, norm: NormForm, streams: int = 1) -> LayerVectors:
    form = replace(norm, eps=norm.eps * config.hidden_size)  # of products that are not divided by its root
    size, depth = config.hidden_size_per_layer_input, config.num_hidden_layers
    return LayerVectors(config.vocab_size_per_layer_input, depth, size, form, streams)


def _gemma3n(config: Any) -> Architecture:
    """Streams of hidden states; some layers keep only the largest gates."""
    fits = not config.altup_active_idx and config.altup_correct_scale and config.hidden_size_per_layer_input
    refuse(not fits, "this altup_active_idx, altup_correct_scale or hidden_size_per_layer_input")
    norm, count = NormForm(config.rms_norm_eps), config.altup_num_inputs
    around = Streams(count, config.laurel_rank, config.hidden_size_per_layer_input, config.hidden_activation, norm)
    more = _of_model(config, norm) | {"per_layer": _vectors(config, norm, count)}
    feed, layer = gated(config, bias=False), {"norms": FOUR_NORMS, "around": around}
    made = decoder(config, grouped(config, **_attention(norm)), feed, layer, **more)
    made = of_kinds(config, with_windows(config, made))
    made = with_attention(made, [{"source": source} for source in _sources(config)])
    layers = []
    sizes = zip(config.intermediate_size, config.activation_sparsity_pattern, strict=True)
    for each, (inner, share) in zip(made.layers, sizes, strict=True):
        least = float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64))) if share else None
        layers.append(replace(each, feed=replace(feed, inner=inner, deviations=least)))
    return replace(made, layers=tuple(layers))


def _gemma4(config: Any) -> Architecture:
    """Full-attention layers have other heads and may use keys as values; experts beside the feed-forward."""
    norm, sources = NormForm(config.rms_norm_eps), _sources(config)
    is_unified = config.model_type == "gemma4_unified_text"  # which has neither of these
    size, has_experts = (0, False) if is_unified else (config.hidden_size_per_layer_input, config.enable_moe_block)
    around, layers = ScaledSums(size, config.hidden_activation, norm), []
    for number, source in enumerate(sources):
        mixer, feed = _attention_of_gemma4(config, number, source, norm), gated(config, bias=False)
        if config.use_double_wide_mlp and source is not None:
            feed = replace(feed, inner=2 * feed.inner)
        layers.append(Layer(mixer, feed, FOUR_NORMS, around=around))
    refuse(config.use_bidirectional_attention == "all", "use_bidirectional_attention")
    more = _of_model(config, norm) | {"per_layer": _vectors(config, norm) if size else None}
    tied = bool(config.tie_word_embeddings)
    made = Architecture(tuple(layers), config.vocab_size, config.hidden_size, is_tied=tied, **more)
    return _beside_experts(config, made) if has_experts else made


def _attention_of_gemma4(config: Any, number: int, source: int | None, norm: NormForm) -> AttentionLayer:
    kind, own = config.layer_types[number], config.per_layer_config[number]
    rotary = turning(config, config.rope_parameters[kind], own.head_dim)
    fields = _attention(norm) | {"source": source, "rotary": rotary}
    refuse(kind not in (FULL, SLIDING), f"a layer of the type {kind}")
    fields["spec"] = AttentionSpec(1.0, window=config.sliding_window if kind == SLIDING else None)
    return grouped(own, same_values=bool(config.attention_k_eq_v) and kind == FULL, **fields)


def _beside_experts(config: Any, made: Architecture) -> Architecture:
    """Add experts to each layer, beside the feed-forward, with their own input norms."""
    router = Router(config.num_experts, config.top_k_experts, name="router.proj")
    is_known = config.hidden_activation == "gelu_pytorch_tanh" and 0 < router.each <= router.experts
    refuse(not is_known, f"{router.each} of {router.experts} experts with {config.hidden_activation}")
    gate, norms = ExpertGate(GELU_TANH.linear, GELU_TANH.cubic), (*FOUR_NORMS[:2], None, FOUR_NORMS[3])
    fields: dict[str, Any] = {"shared_name": "dense", "norm": made.norm}
    layers = []
    for layer in made.layers:
        assert isinstance(layer.feed, GatedFeed)
        feed = NormedExperts(config.moe_intermediate_size, gate, router, shared=layer.feed, **fields)
        layers.append(replace(layer, feed=feed, norms=norms))
    return replace(made, layers=tuple(layers), names=_NAMES + _NAMES_BESIDE_EXPERTS)


_NAMES = (
    (r"^model\.(?=embed_tokens_per_layer|per_layer_|altup_)", "model.per_layer."),
    (r"^(model\.layers\.\d+)\.(?:altup\.|laurel\.|(?=per_layer_|post_per_layer_|layer_scalar))", r"\1.around."),
)
_NAMES_BESIDE_EXPERTS = (
    (r"^(model\.layers\.\d+\.mlp)\.(?=(?:gate|up|down)_proj\.)", r"\1.dense."),
    (r"^(model\.layers\.\d+)\.(?=router\.|experts\.|\w+_feedforward_layernorm_[12]\.|pre_feed)", r"\1.mlp."),
)
# By model type.
GEMMA: dict[str, Callable[[Any], Architecture]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "vaultgemma": _vaultgemma,
}
