"""What a model computes, as data: sizes, norms, windows and rotary positions, layer by layer. Reads no weights.

A family is one function that fills an `Architecture` from a config; a config whose model computes anything else gives
None, and transformers' own module runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.attention.spec import AttentionSpec
from engine.errors import ModelError
from engine.model.decoder.rotary import RotaryTable
from engine.native import ALIGNED
from engine.native.rows import GELU_TANH, SILU, Activation

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedConfig

_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Grouped attention with rotary positions.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values; a divisor of `heads`.
        head_dim: numbers of a head.
        spec: scale, window and cap of the scores.
        rotary: of queries and keys.
        head_norms: queries and keys are normed, each head alone, before they are rotated.
        qkv_bias: the products of queries, keys and values have a bias.
        out_bias: the product of the output has one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    spec: AttentionSpec
    rotary: RotaryTable
    head_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False


# Names of a layer's norms: before attention, of what attention gives, before the MLP, of what the MLP gives.
TWO_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
FOUR_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of layers x += attention(norm(x)); x += down(activation(gate) * up) of norm(x).

    Attributes:
        layers: the attention of each layer.
        vocab_size: rows of the table of embeddings.
        width: numbers of a hidden state.
        inner: numbers of `gate` and of `up`.
        activation: of the gate.
        eps: what norms add to the mean of squares.
        norms: names of the norms of a layer, `TWO_NORMS` or `FOUR_NORMS`.
        one_in_norms: the weight of a norm is 1 plus what is stored.
        mlp_bias: the products of the MLP have a bias.
        embedding_scale: what embeddings are multiplied by, in the type of the model.
        softcap: logits become tanh(logit / softcap) * softcap.
        is_tied: the output matrix is the table of embeddings.
        names: regular expressions for names of weights in a checkpoint, with what they become.
    """

    layers: tuple[AttentionLayer, ...]
    vocab_size: int
    width: int
    inner: int
    activation: Activation
    eps: float
    norms: tuple[str | None, ...] = TWO_NORMS
    one_in_norms: bool = False
    mlp_bias: bool = False
    embedding_scale: float | None = None
    softcap: float | None = None
    is_tied: bool = False
    names: tuple[tuple[str, str], ...] = ()

    @property
    def is_aligned(self) -> bool:
        """Whether our C multiplies all matrices: rows are whole vectors."""
        rows = {self.width, self.inner, *(layer.heads * layer.head_dim for layer in self.layers)}
        return not any(size % ALIGNED for size in rows)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Architecture | None:
        """The architecture that a config describes; None where it is not in the table."""
        family = _FAMILIES.get(config.model_type)
        try:
            return None if family is None else family(config)
        except ModelError:  # of rotary positions: transformers may have their scaling
            return None


def _llama(
    config: Any, *, qkv_bias: bool | None = None, out_bias: bool | None = None, mlp_bias: bool | None = None
) -> Architecture | None:
    """A model of two norms a layer; a bias that is None is as the config says in Llama's words."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    activation = _ACTIVATIONS.get(getattr(config, "hidden_activation", None) or config.hidden_act)
    if activation is None or heads % kv_heads or head_dim % 2:
        return None
    rope, bias = config.rope_parameters, bool(getattr(config, "attention_bias", False))
    layer = AttentionLayer(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        spec=AttentionSpec(head_dim**-0.5),
        rotary=RotaryTable.of(rope, head_dim) if "rope_type" in rope else RotaryTable(()),  # else by kinds of layers
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        out_bias=bias if out_bias is None else out_bias,
    )
    return Architecture(
        layers=(layer,) * config.num_hidden_layers,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        inner=config.intermediate_size,
        activation=activation,
        eps=config.rms_norm_eps,
        mlp_bias=bool(getattr(config, "mlp_bias", False)) if mlp_bias is None else mlp_bias,
        is_tied=config.tie_word_embeddings,
    )


def _with_windows(config: Any, made: Architecture | None) -> Architecture | None:
    """With the window in the layers that `layer_types` names; in all where the config has a window and no such list."""
    if made is None:
        return None
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or [_FULL if config.sliding_window is None else _SLIDING] * len(made.layers)
    if len(kinds) != len(made.layers) or not set(kinds) <= {_FULL, _SLIDING}:
        return None
    windows = (config.sliding_window if kind == _SLIDING else None for kind in kinds)
    return replace(made, layers=tuple(map(_windowed, made.layers, windows)))


def _windowed(layer: AttentionLayer, window: int | None) -> AttentionLayer:
    return replace(layer, spec=replace(layer.spec, window=window))


def _mistral(config: Any) -> Architecture | None:
    # A list of kinds of layers has no meaning here: those models are `ministral`.
    made = _llama(config, qkv_bias=False, out_bias=False, mlp_bias=False)
    return made and replace(made, layers=tuple(_windowed(layer, config.sliding_window) for layer in made.layers))


def _ministral(config: Any) -> Architecture | None:
    return _with_windows(config, _llama(config, qkv_bias=False, out_bias=False, mlp_bias=False))


def _cwm(config: Any) -> Architecture | None:
    return _with_windows(config, _llama(config, qkv_bias=False, out_bias=False))


def _qwen2(config: Any) -> Architecture | None:
    return _with_windows(config, _llama(config, qkv_bias=True, out_bias=False, mlp_bias=False))


def _qwen3(config: Any) -> Architecture | None:
    made = _with_windows(config, _llama(config, mlp_bias=False))
    return made and replace(made, layers=tuple(replace(layer, head_norms=True) for layer in made.layers))


def _exaone(config: Any) -> Architecture | None:
    made = _llama(config)
    return made and replace(made, names=_EXAONE)


def _seed_oss(config: Any) -> Architecture | None:
    return _llama(config, out_bias=config.attention_out_bias)


def _granite(config: Any) -> Architecture | None:
    made = _llama(config)
    factors = (config.embedding_multiplier, config.logits_scaling, config.residual_multiplier)
    if made is None or set(factors) != {1}:
        return None
    spec = AttentionSpec(config.attention_multiplier)
    return replace(made, layers=tuple(replace(layer, spec=spec) for layer in made.layers))


def _gemma(config: Any) -> Architecture | None:
    made = _llama(config, mlp_bias=False)
    if made is None or getattr(config, "use_bidirectional_attention", None):
        return None
    return replace(made, one_in_norms=True, embedding_scale=config.hidden_size**0.5)


def _gemma2(config: Any) -> Architecture | None:
    made = _with_windows(config, _gemma(config))
    if made is None:
        return None
    spec = AttentionSpec(config.query_pre_attn_scalar**-0.5, softcap=config.attn_logit_softcapping)
    layers = tuple(replace(layer, spec=replace(spec, window=layer.spec.window)) for layer in made.layers)
    return replace(made, layers=layers, norms=FOUR_NORMS, softcap=config.final_logit_softcapping)


def _gemma3(config: Any) -> Architecture | None:
    """Norms of heads, and rotary positions of their own in layers with a window."""
    made = _gemma2(config)
    if made is None:
        return None
    rotary = {kind: RotaryTable.of(config.rope_parameters[kind], config.head_dim) for kind in set(config.layer_types)}
    layers = tuple(
        replace(layer, rotary=rotary[kind], head_norms=True)
        for layer, kind in zip(made.layers, config.layer_types, strict=True)
    )
    return replace(made, layers=layers)


_EXAONE = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
# By model type.
_FAMILIES: dict[str, Callable[[Any], Architecture | None]] = {
    "cwm": _cwm,
    "exaone": _exaone,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "internlm3": _llama,
    "iquestcoder": _llama,
    "llama": _llama,
    "ministral": _ministral,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
}


def shapes_of(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by its name in a checkpoint; a tied head is the table."""
    width, inner, a = architecture.width, architecture.inner, architecture
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (a.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not a.is_tied:
        found["lm_head.weight"] = a.vocab_size, width
    for number, layer in enumerate(a.layers):
        at = f"model.layers.{number}."
        found |= {f"{at}{name}.weight": (width,) for name in a.norms if name is not None}
        found |= _with_biases(f"{at}self_attn.", _attention_shapes(layer, width), layer.qkv_bias, layer.out_bias)
        matrices = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        found |= _with_biases(f"{at}mlp.", matrices, a.mlp_bias, a.mlp_bias)
        if layer.head_norms:
            found |= {f"{at}self_attn.{name}_norm.weight": (layer.head_dim,) for name in "qk"}
    return found


def _attention_shapes(layer: AttentionLayer, width: int) -> dict[str, tuple[int, int]]:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, queries)}


def _with_biases(
    at: str, matrices: dict[str, tuple[int, int]], has_bias: bool, last_has_bias: bool
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{at}{name}.weight": shape for name, shape in matrices.items()}
    *several, last = matrices
    biased = [*several] * has_bias + [last] * last_has_bias
    return found | {f"{at}{name}.bias": matrices[name][:1] for name in biased}
