"""Configs of the most used families, read without transformers, whose import takes seconds.

The fields equal those of transformers' config objects, with the family's defaults. A config with missing or mistyped
numbers is left to transformers, which supports more variants and reports errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
SCALINGS = ("default", "linear", "llama3", "longrope", "yarn")  # of rotary positions
_FULL, _SLIDING = "full_attention", "sliding_attention"
_COMMON: dict[str, Any] = {
    "head_dim": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_WINDOWS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
# By model type: optional fields with defaults, and required fields.
_FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({"num_key_value_heads": None}, ()),
    "mistral": ({}, ("sliding_window",)),
    "qwen2": (_WINDOWS, ()),
    "qwen3": (_WINDOWS, ("head_dim",)),
    "gemma": (_GEMMA, ("head_dim",)),
    "gemma2": (_GEMMA | {"layer_types": None, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
               ("head_dim", "sliding_window", "query_pre_attn_scalar")),
    "gemma3_text": (_GEMMA | {"layer_types": None, "attn_logit_softcapping": None, "final_logit_softcapping": None},
                    ("head_dim", "sliding_window", "query_pre_attn_scalar")),
}  # fmt: skip


class ModelConfig(SimpleNamespace):
    """The fields of a config, as attributes."""

    model_type: str
    is_encoder_decoder = False

    def get_text_config(self, **_: object) -> ModelConfig:
        """The config of the language model: itself."""
        return self


def described_by(table: Mapping[str, Any], model_type: str | None = None) -> ModelConfig | None:
    """The config of the contents of a `config.json`; None if transformers must read it."""
    family = _FAMILIES.get(str(model_type or table.get("model_type")))
    if family is None or table.get("use_bidirectional_attention"):
        return None
    defaults, needed = family
    fields = _COMMON | defaults | dict(table)
    fields["model_type"] = model_type or table["model_type"]
    must = {*_SIZES, "rms_norm_eps", "eos_token_id", "bos_token_id", *needed} - defaults.keys()
    sizes = [fields.get(name) for name in _SIZES if (name, fields.get(name)) != ("num_key_value_heads", None)]
    if not must <= table.keys() or not all(map(_is_size, sizes)):
        return None
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
    fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // heads
    rope = _rope(fields)
    if rope is None or fields["hidden_size"] % heads or not isinstance(fields["rms_norm_eps"], float):
        return None
    fields["rope_parameters"] = rope
    fields["dtype"] = _dtype(fields.pop("torch_dtype", None), fields.get("dtype"))
    if fields["model_type"] == "gemma" and fields["hidden_act"] == "gelu":  # here it means the other GELU
        fields["hidden_act"] = "gelu_pytorch_tanh"
    if "layer_types" in fields:
        fields |= _windows(fields)
    return ModelConfig(**fields)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dtype(*names: object) -> torch.dtype | None:
    found = next((name for name in names if name is not None), None)
    made = getattr(torch, found, None) if isinstance(found, str) else found
    return made if isinstance(made, torch.dtype) else None


def _windows(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of each layer, and the window, if any."""
    depth, window, kinds = fields["num_hidden_layers"], fields.get("sliding_window"), fields["layer_types"]
    if "use_sliding_window" in fields:
        window = window if fields["use_sliding_window"] else None
        first = fields.get("max_window_layers", 28)
        made = [_FULL if window is None or i < first else _SLIDING for i in range(depth)]
    else:
        pattern = 2 if fields["model_type"] == "gemma2" else fields.get("sliding_window_pattern") or 6
        made = [_SLIDING if (i + 1) % pattern else _FULL for i in range(depth)]
    return {"sliding_window": window, "layer_types": kinds or made}


def _rope(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The rotary parameters, by their current names; None if they have another form."""
    scaled = fields.pop("rope_scaling", None)
    given, theta = fields.get("rope_parameters"), fields.get("rope_theta")
    if fields["model_type"] == "gemma3_text":
        return _rope_by_kind(fields, scaled, given, theta)
    rope = dict(scaled or given or {})
    if any(isinstance(value, dict) for value in rope.values()) or "partial_rotary_factor" in fields:
        return None
    return _standard(rope, fields, _THETA if theta is None else theta)


def _rope_by_kind(fields: dict[str, Any], scaled: Any, given: Any, theta: Any) -> dict[str, Any] | None:
    """Layers with a window have a separate table without scaling."""
    found = {kind: dict((given or {}).get(kind) or {}) for kind in (_FULL, _SLIDING)}
    found[_FULL] |= scaled or {}
    local = fields.pop("rope_local_base_freq", None)
    defaults = {_FULL: 1e6 if theta is None else theta, _SLIDING: 1e4 if local is None else local}
    made = {kind: _standard(rope, fields, defaults[kind]) for kind, rope in found.items()}
    return None if None in made.values() else made


def _standard(rope: dict[str, Any], fields: Mapping[str, Any], theta: float) -> dict[str, Any] | None:
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", theta)
    if rope["rope_type"] not in SCALINGS or not isinstance(rope["rope_theta"], float | int):
        return None
    if rope["rope_type"] in ("llama3", "longrope", "yarn"):
        rope.setdefault(_ORIGINAL, fields["max_position_embeddings"])
        if _ORIGINAL in fields:
            rope[_ORIGINAL] = fields[_ORIGINAL]
    return rope
