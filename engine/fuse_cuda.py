"""Stand-ins for CUDA: what `fuse` has joined, run by our kernels. Knows shapes of modules and no family by name.

As there, a stand-in is tried on random rows beside what it replaces and stays only if both say the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention import reference
from engine.attention.registry import Ragged
from engine.batch import Feed, RaggedBatch
from engine.fuse import Part, RMSNorm, RotaryAttention, fuse
from engine.kv import KVArena
from engine.runner import kv_layout
from engine.trial import agree, random_rows

log = logging.getLogger(__name__)

_ROWS, _PAGE = 3, 8  # of a trial


class Ops(Protocol):
    """`engine.kernels.rows`, or `engine.kernels.reference`, which means the same."""

    rotate_and_write: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    gate: Callable[..., Tensor]


def fuse_for_cuda(model: PreTrainedModel, ops: Ops | None = None) -> Counter[str]:
    """Join what `fuse` joins, then give `model` our kernels wherever they fit; how many of each kind."""
    if ops is None:
        from engine.kernels import rows  # brings Triton

        ops = cast("Ops", rows)
    fuse(model)
    done: Counter[str] = Counter()
    for name in [name for name, _ in model.named_modules()][:0:-1]:  # what is inside comes before what it is inside of
        if name.endswith(".inner"):
            continue  # the original of one of `fuse`'s stand-ins, which still asks for it as it was
        for kind, candidates in (
            ("norms", _norms),
            ("gates", _gates),
            ("attentions", _attentions),
            ("layers", _layers),
        ):
            module = model.get_submodule(name)
            found = next((new for new in candidates(module, ops) if _agrees(model, module, new, kind)), None)
            if found is not None:
                model.set_submodule(name, found)
                done[kind] += 1
    log.info("our kernels run %s", ", ".join(f"{count} {kind}" for kind, count in done.items()))
    return done


class KernelNorm(nn.Module):
    """RMSNorm, alone or of a sum."""

    def __init__(self, norm: RMSNorm, ops: Ops) -> None:
        super().__init__()
        size = norm.scale.numel()
        self.scale = nn.Parameter(norm.scale.detach() / size**0.5, requires_grad=False)
        self.eps, self.ops = norm.eps / size, ops

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]`."""
        return self.ops.add_norm(x, None, self.scale, self.eps)[0]

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum."""
        return self.ops.add_norm(x, residual, self.scale, self.eps)


class KernelGate(nn.Module):
    """down(activation(gate) * up) on gate and up in one matmul."""

    def __init__(self, both: nn.Module, down: nn.Module, activation: str, ops: Ops) -> None:
        super().__init__()
        self.both, self.down_proj, self.activation, self.ops = both, down, activation, ops

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        return cast("Tensor", self.down_proj(self.ops.gate(self.both(x), self.activation)))


class KernelAttention(nn.Module):
    """Attention whose rotation, norms of heads and K/V write are one kernel; without a ragged batch, the original."""

    def __init__(self, fused: RotaryAttention, ops: Ops) -> None:
        super().__init__()
        inner = cast("Any", fused.inner)
        self.fused, self.ops, self.seen, self.layer_idx = fused, ops, fused.seen, fused.layer_idx
        self.qkv = inner.q_proj.joined if hasattr(inner, "q_proj") else inner.qkv_proj
        self.o_proj = inner.o_proj
        self.head_norms: tuple[KernelNorm, ...] = tuple(
            norm for norm in (getattr(inner, "q_norm", None), getattr(inner, "k_norm", None)) if norm is not None
        )
        assert not self.head_norms or all(isinstance(norm, KernelNorm) for norm in self.head_norms)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # cos and sin, [1, T, rotary_dim]
        ragged: Ragged | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """As the original."""
        if ragged is None or position_embeddings is None:
            return cast("tuple[Tensor, None]", self.fused(hidden_states, position_embeddings, ragged=ragged, **others))
        cos, sin = position_embeddings
        k, v = ragged.arena.k[self.layer_idx], ragged.arena.v[self.layer_idx]
        norms = (self.head_norms[0].scale, self.head_norms[1].scale) if self.head_norms else None
        eps = self.head_norms[0].eps if self.head_norms else 0.0
        query = self.ops.rotate_and_write(
            self.qkv(hidden_states)[0], cos[0], sin[0], ragged.batch.kv_rows, k, v, norms, eps
        )
        seen = self.seen
        out = ragged.attend(query, k, v, ragged.batch, seen.scale, seen.window, seen.softcap)
        return self.o_proj(out.flatten(1)[None]), None


class KernelLayer(nn.Module):
    """A decoder layer x += attention(norm(x)); x += mlp(norm(x)), its first sum and second norm in one kernel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """What a model asks of its layers besides, such as their kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """`[1, T, hidden]`."""
        inner = cast("Any", self.inner)
        attended, _ = inner.self_attn(hidden_states=inner.input_layernorm(hidden_states), **others)
        normed, residual = inner.post_attention_layernorm.of_sum(attended, hidden_states)
        return cast("Tensor", residual + inner.mlp(normed))


def _norms(module: nn.Module, ops: Ops) -> list[nn.Module]:
    return [KernelNorm(module, ops)] if isinstance(module, RMSNorm) else []


def _gates(module: nn.Module, ops: Ops) -> list[nn.Module]:
    inner = cast("Any", getattr(module, "inner", module))  # `fuse` may have one of its own for CPUs
    gate, down = getattr(inner, "gate_proj", None), getattr(inner, "down_proj", None)
    both = gate.joined if isinstance(gate, Part) else getattr(inner, "gate_up_proj", None)
    if not isinstance(both, nn.Module) or not isinstance(down, nn.Module):
        return []
    return [KernelGate(both, down, activation, ops) for activation in ("silu", "gelu_tanh")]


def _attentions(module: nn.Module, ops: Ops) -> list[nn.Module]:
    return [KernelAttention(module, ops)] if isinstance(module, RotaryAttention) else []


def _layers(module: nn.Module, _: Ops) -> list[nn.Module]:
    norm, attention = getattr(module, "post_attention_layernorm", None), getattr(module, "self_attn", None)
    return [KernelLayer(module)] if isinstance(norm, KernelNorm) and isinstance(attention, nn.Module) else []


def _agrees(model: PreTrainedModel, old: nn.Module, new: nn.Module, kind: str) -> bool:
    """Whether both give the same but for rounding, on the same rows; kernels assert what they cannot run."""
    width = new.scale.numel() if isinstance(new, KernelNorm) else model.config.get_text_config().hidden_size
    x, needs_context = random_rows(model, 1, _ROWS, width), kind in ("attentions", "layers")
    return agree(lambda module: _run(model, module, x, needs_context=needs_context), old, new, also=(AssertionError,))


def _run(model: PreTrainedModel, module: nn.Module, x: Tensor, *, needs_context: bool) -> Tensor:
    if not needs_context:
        return cast("Tensor", module(x))
    batch = RaggedBatch.of([Feed([0] * _ROWS, 4, [0])], _PAGE, model.device)
    arena = KVArena(kv_layout(model.config, model.dtype), 1, _PAGE, model.device)
    positions = torch.arange(4, 4 + _ROWS, device=model.device)[None]
    out = module(
        hidden_states=x,
        position_embeddings=_rotary(model, x, positions),
        attention_mask=None,
        position_ids=positions,
        ragged=Ragged(batch, arena, reference.attend),
    )
    return out[0] if isinstance(out, tuple) else cast("Tensor", out)


def _rotary(model: PreTrainedModel, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as the model makes them, of its first kind of layer where it has several."""
    rotary = cast("Any", model.get_decoder()).rotary_emb
    kinds = getattr(rotary, "layer_types", None)
    return cast("tuple[Tensor, Tensor]", rotary(x, positions, *sorted(kinds)[:1]) if kinds else rotary(x, positions))
