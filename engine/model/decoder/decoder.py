"""The decoder that runs every architecture of the table (`architecture.py`), over ragged batches, on a CPU.

Its modules have transformers' names, which adapters and heads use. Layers run in one call of C where that can run the
pass, and else module by module, with the same bits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.attention.registry import Ragged
from engine.machine.threads import most_threads
from engine.model.decoder.architecture import Architecture
from engine.model.decoder.stack import Stack
from engine.model.decoder.weights import WeightReader
from engine.model.fusion.fuse import Gated, Joined, JoinedPart, RMSNorm, RotaryAttention
from engine.model.linear.activations import ELEMENTWISE, RowWise
from engine.model.tap import FINAL
from engine.native.rows import SILU

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedConfig


class DecoderModel(nn.Module):
    """A model of the table."""

    keeps_no_state = True

    def __init__(self, architecture: Architecture, config: PreTrainedConfig, weights: WeightReader) -> None:
        """Take the weights, one matrix at a time.

        Raises:
            ModelError: one cannot be read.
        """
        super().__init__()
        self.architecture, self.config, self.dtype = architecture, config, weights.dtype
        self.generation_config = None  # the config has the end tokens
        self.lm_head, table = weights.head_and_table(architecture)
        self.model: Any = nn.Module()
        self.model.embed_tokens = table
        self.model.layers = Stack(_layers(architecture, weights))
        self.model.norm = _norm(architecture, weights, "model.norm")

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device("cpu")

    def get_decoder(self) -> nn.Module:
        """Everything but the output matrix."""
        trunk: nn.Module = self.model
        return trunk

    def get_input_embeddings(self) -> nn.Module:
        """Token ids to hidden states."""
        table: nn.Module = self.model.embed_tokens
        return table

    def get_output_embeddings(self) -> nn.Module:
        """Hidden states to logits."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,  # [1, T]
        position_ids: Tensor,  # [1, T]
        logits_to_keep: Tensor,  # [R]
        ragged: Ragged,
        *,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """`logits` `[1, R, vocab]` of these rows, as transformers' models return them."""
        del use_cache  # keys and values lie in the arena
        trunk = self.model
        hidden: Tensor = trunk.embed_tokens(input_ids)
        each = [layer.rotary for layer in self.architecture.layers[: len(trunk.layers)]]
        tables = {rotary: rotary.table(position_ids[0], hidden.dtype) for rotary in set(each)}
        hidden = trunk.layers.run(hidden, [tables[rotary] for rotary in each], ragged)
        readers = [tap for tap in trunk.layers.taps if FINAL in tap.places]
        if readers:
            hidden = trunk.norm(hidden)
            for tap in readers:
                tap.keep(FINAL, hidden[0])
            kept = hidden[:, logits_to_keep]
        else:
            kept = trunk.norm(hidden[:, logits_to_keep])
        logits: Tensor = self.lm_head(kept)
        cap = self.architecture.softcap
        return SimpleNamespace(logits=logits if cap is None else ELEMENTWISE[torch.tanh](logits / cap) * cap)


def _layers(architecture: Architecture, weights: WeightReader) -> list[DecoderLayer]:
    """All layers, several at a time: each of the many steps from a file to panels leaves most threads idle.

    Floats that are rounded keep all threads busy by themselves, and two layers of them take more memory than one.
    """
    numbers, here = range(len(architecture.layers)), copy_context()

    def layer(number: int) -> DecoderLayer:
        below = weights.below(f"model.layers.{number}.")
        return here.copy().run(DecoderLayer, architecture, number, below)

    with ThreadPoolExecutor(most_threads() if weights.rounded is None else 1) as threads:
        return list(threads.map(layer, numbers))


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)), with norms of both results in families of four norms."""

    def __init__(self, architecture: Architecture, number: int, weights: WeightReader) -> None:
        super().__init__()
        self.self_attn = RotaryAttention(
            _Projections(architecture, number, weights.below("self_attn.")), architecture.layers[number]
        )
        inner = _Projected(architecture, weights.below("mlp."))
        self.mlp = Gated(inner, architecture.activation)
        for name in filter(None, architecture.norms):
            setattr(self, name, _norm(architecture, weights, name))
        self._norms = architecture.norms

    def forward(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        norms: list[Any] = [None if name is None else getattr(self, name) for name in self._norms]
        first, after_attention, second, after_mlp = norms
        attended, _ = self.self_attn(first(hidden_states), rotary, ragged=ragged)
        hidden_states = hidden_states + (attended if after_attention is None else after_attention(attended))
        made = self.mlp(second(hidden_states))
        out: Tensor = hidden_states + (made if after_mlp is None else after_mlp(made))
        return out


class _Projections(nn.Module):
    """The matrices of attention; queries, keys and values in one."""

    def __init__(self, architecture: Architecture, number: int, weights: WeightReader) -> None:
        super().__init__()
        layer, self.layer_idx = architecture.layers[number], number
        width, queries = architecture.width, layer.heads * layer.head_dim
        sizes = [queries, *[layer.kv_heads * layer.head_dim] * 2]
        _join(self, weights, ("q_proj", "k_proj", "v_proj"), sizes, width, has_bias=layer.qkv_bias)
        self.o_proj = weights.matrix({"o_proj": width}, queries, has_bias=layer.out_bias)
        if layer.head_norms:
            self.q_norm, self.k_norm = (
                _norm(architecture, weights, name, layer.head_dim) for name in ("q_norm", "k_norm")
            )


class _Projected(nn.Module):
    """The matrices of a gated MLP, gate and up in one; what it computes where C does not."""

    def __init__(self, architecture: Architecture, weights: WeightReader) -> None:
        super().__init__()
        width, inner, bias = architecture.width, architecture.inner, architecture.mlp_bias
        _join(self, weights, ("gate_proj", "up_proj"), [inner, inner], width, has_bias=bias)
        self.down_proj = weights.matrix({"down_proj": width}, inner, has_bias=bias)
        self.act_fn = RowWise(nn.SiLU() if architecture.activation is SILU else nn.GELU(approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` -> `[..., width]`."""
        parts: Any = self
        made: Tensor = self.down_proj(self.act_fn(parts.gate_proj(x)) * parts.up_proj(x))
        return made


def _join(
    module: nn.Module, weights: WeightReader, names: tuple[str, ...], sizes: list[int], inputs: int, *, has_bias: bool
) -> None:
    matmul = weights.matrix(dict(zip(names, sizes, strict=True)), inputs, has_bias=has_bias)
    joined = Joined(matmul, sizes)
    for index, name in enumerate(names):
        setattr(module, name, JoinedPart(joined, index))


def _norm(architecture: Architecture, weights: WeightReader, name: str, size: int | None = None) -> RMSNorm:
    weight = weights.vector(f"{name}.weight", size or architecture.width)
    return RMSNorm(1 + weight.float() if architecture.one_in_norms else weight, architecture.eps)


def is_of_table(model: nn.Module) -> bool:
    """Whether a model is a decoder, whose table CI has tested: no load needs to."""
    return isinstance(model, DecoderModel)
