"""The layers of a head in one call of our C, as `model.decoder.stack` runs those of a model. Knows Llama's layers.

A head drafts one token per pass: in a small head the Python code between two matmuls takes longer than they do, and in
any head reading the weights takes longer than multiplying them. So on a CPU a head is in bfloat16, as most are stored,
whatever the target is in: that may change a draft, but never an output.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from engine.attention import Attend, native
from engine.kv.arena import KVArena
from engine.kv.batch import RaggedBatch
from engine.model.decoder.norms import RMSNorm
from engine.native import PackedMatrix, multiplies, rows_for
from engine.native.layers import LayerParts, Layers

_GROWING = ("dynamic", "longrope")  # rotary tables that depend on the length of a text


class Rotary:
    """cos and sin of positions, looked up where the frequencies never change."""

    def __init__(self, embedding: LlamaRotaryEmbedding, dtype: torch.dtype) -> None:
        self._embedding, self._like = embedding, torch.empty(0, dtype=dtype)
        self._is_fixed = embedding.rope_type not in _GROWING
        self._table = torch.empty(2, 0, 0)  # [2, positions so far, head_dim]

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Positions `[T]`, all below `stop` -> cos and sin, `[T, head_dim]` each."""
        if not self._is_fixed:
            cos, sin = self._embedding(self._like, positions[None])
            return cos[0].contiguous(), sin[0].contiguous()
        if stop > self._table.shape[1]:
            everything = torch.arange(1 << (stop - 1).bit_length())
            self._table = torch.cat(self._embedding(self._like, everything[None]))
        cos, sin = self._table.index_select(1, positions)
        return cos, sin


class FusedLayers:
    """Layers of a head over its arena. A layer that has a `hidden_norm` reads a second row beside its own.

    The norm of that row is `input_layernorm`, and its own is `hidden_norm`; it may add to the normed row
    (`norm_before_residual`). A layer with a `window` attends to so many positions.
    """

    def __init__(self, layers: Seq[nn.Module], config: LlamaConfig, rotary: Rotary, arena: KVArena) -> None:
        self._head_dim = _head_dim(config)
        parts = [_parts(layer, self._head_dim**-0.5) for layer in layers]
        self._depth = len(parts)
        self._layers, self._arena, self._rotary = Layers(parts, arena.k, arena.v), arena, rotary
        self._heads, self._kv_heads = config.num_attention_heads, arena.k[0].shape[1]

    @classmethod
    def of(
        cls, layers: Seq[nn.Module], config: LlamaConfig, rotary: LlamaRotaryEmbedding, arena: KVArena, attend: Attend
    ) -> FusedLayers | None:
        """The layers in C, which then hold a copy of their matrices; None where our C cannot run them."""
        weight = cast("Any", layers[0]).mlp.down_proj.weight
        ours = getattr(attend, "func", attend) is native.attend and arena.layout.takes(weight.dtype)
        if not ours or not _runs(config, weight.dtype, weight.device):
            return None
        return cls(layers, config, Rotary(rotary, weight.dtype), arena)

    def run(self, batch: RaggedBatch, hidden: Tensor, beside: Tensor | None = None) -> Tensor:
        """The last layer's output for `hidden`, which it overwrites, and second rows `beside`; `[T, hidden]` each."""
        where = native.args_of(batch, self._heads, self._kv_heads, self._head_dim)
        keys = self._arena.k[0]
        where.key_stride = where.value_stride = keys.stride(0)
        where.rounded = self._arena.layout.is_rounded
        cos, sin = self._rotary.rows(batch.positions, max(batch.kv_lens))
        return self._layers.run(hidden, [(cos, sin)] * self._depth, batch.kv_rows, where, beside)


def type_of(config: LlamaConfig, target: PreTrainedModel) -> torch.dtype:
    """The type of a head with such layers: bfloat16 where our C runs them, else the target's."""
    return torch.bfloat16 if _runs(config, torch.bfloat16, target.device) else target.dtype


def _runs(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> bool:
    dim = _head_dim(config)
    widths = config.hidden_size, config.intermediate_size, config.num_attention_heads * dim
    runs = device.type == "cpu" and multiplies(dtype) and not dim % 2 and config.hidden_act == "silu"
    return runs and rows_for(dtype, *widths, dim // 2) is not None


def _head_dim(config: LlamaConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _parts(layer: nn.Module, scale: float) -> LayerParts:
    """The parts of a layer with the names of Llama's."""
    inside = cast("Any", layer)
    attention, mlp, own = inside.self_attn, inside.mlp, getattr(inside, "hidden_norm", None)
    first = _norm(inside.input_layernorm)
    return LayerParts(
        qkv=[packed(attention.q_proj, attention.k_proj, attention.v_proj)],
        out=[packed(attention.o_proj)],
        gate_up=[packed(mlp.gate_proj, mlp.up_proj)],
        down=[packed(mlp.down_proj)],
        norm_attention=first if own is None else _norm(own),
        norm_mlp=cast("tuple[Tensor, float]", _norm(inside.post_attention_layernorm)),
        scale=scale,
        softcap=None,
        window=getattr(inside, "window", None),
        norm_beside=None if own is None else first,
        normed_residual=getattr(inside, "norm_before_residual", False),
    )


def _norm(norm: nn.Module) -> tuple[Tensor, float] | None:
    if not isinstance(norm, LlamaRMSNorm):
        return None  # the paper's first head has none before its attention
    ours = RMSNorm(norm.weight, norm.variance_epsilon)
    return ours.scale.data, ours.eps


def packed(*matmuls: nn.Linear) -> PackedMatrix:
    """The matrices, one below the other, in the panels of our C."""
    biases = [cast("Tensor | None", matmul.bias) for matmul in matmuls]
    whole = [
        torch.zeros(m.out_features) if b is None else b.detach().float() for m, b in zip(matmuls, biases, strict=True)
    ]
    bias = None if all(b is None for b in biases) else torch.cat(whole)
    return PackedMatrix.of([matmul.weight.detach() for matmul in matmuls], bias)


class FusedProjection:
    """Hidden states of several places, side by side, each normed or all together or not, times a matrix.

    The weights of the norms are multiplied into the matrix, so that one call norms all places.
    """

    def __init__(self, matmul: nn.Linear, norms: Seq[LlamaRMSNorm]) -> None:
        weight, bias = matmul.weight.detach(), cast("Tensor | None", matmul.bias)
        if norms:
            scale = torch.cat([norm.weight.detach().float() for norm in norms])
            weight = (weight.float() * scale).to(weight.dtype)
        self._matrix = PackedMatrix.of(weight, None if bias is None else bias.detach().float())
        width = matmul.in_features // max(1, len(norms))
        self._root, self._eps = torch.full((width,), width**0.5), norms[0].variance_epsilon * width if norms else None

    @classmethod
    def of(cls, matmul: nn.Linear, norms: Seq[LlamaRMSNorm]) -> FusedProjection | None:
        """The same in C; None where it cannot run these widths."""
        runs = rows_for(torch.float32, matmul.in_features // max(1, len(norms))) is not None
        return cls(matmul, norms) if runs else None

    def __call__(self, features: Tensor) -> Tensor:
        """`[n, places * width]` in the target's type -> `[n, hidden]` in the head's."""
        if self._eps is not None:
            native = rows_for(features.dtype, len(self._root))
            assert native is not None, "the target is in float32 or bfloat16"
            normed = native.norm(features.reshape(-1, len(self._root)), self._root, self._eps)
            features = normed.view(features.shape)
        return self._matrix.multiply(features.to(self._matrix.dtype).contiguous(), None, self._matrix.dtype)


def norm_in_c(norm: LlamaRMSNorm, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The norm as a function of dense rows `[n, hidden]`, without the overhead of calling a module."""
    ours, rows = RMSNorm(norm.weight, norm.variance_epsilon), rows_for(dtype, norm.weight.numel())
    assert rows is not None, "layers of this width do not run in C"
    return partial(rows.norm, weight=ours.scale.data, eps=ours.eps)


def logits_in_c(matmul: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The product as a function of dense rows `[n, hidden]` -> float32 `[n, out]`."""
    return partial(packed(matmul).multiply, step=None, dtype=torch.float32)
