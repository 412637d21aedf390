"""Norms, gates, attention and decoder layers that our kernels run. Uses shapes of modules and no family by name.

All work between two matmuls is one kernel: a sum, the norm that follows it and, where the next matmul is in 8-bit
floats, the rounding of its rows.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from engine.attention.registry import Ragged
from engine.kernels.args import Fp8Rows
from engine.kv.rounded import SCALE_BYTES, is_rounded
from engine.model.decoder.norms import RMSNorm
from engine.model.decoder.ops import LayerOps
from engine.model.fusion.fuse import RotaryAttention


class KernelNorm(nn.Module):
    """RMSNorm, alone or of a sum. With `rounds`, its result for a matmul is in 8-bit floats."""

    def __init__(self, norm: RMSNorm, ops: LayerOps) -> None:
        super().__init__()
        size = norm.scale.numel()
        self.scale = nn.Parameter(norm.scale.detach() / size**0.5, requires_grad=False)
        self.eps, self.ops, self.rounds = norm.eps / size, ops, False
        # Mamba's blocks ask a norm for the type of its weight: `fuse` has left an empty one.
        self.weight = getattr(norm, "weight", norm.scale.detach()[:0])
        self._handed: tuple[Tensor | None, Tensor | Fp8Rows | None] = None, None  # a sum, and its stored norm

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]`."""
        handed = self._taken(x)
        return handed if isinstance(handed, Tensor) else self.ops.add_norm(x, None, self.scale, self.eps)[0]

    def for_matmul(self, x: Tensor) -> Tensor | Fp8Rows:
        """The norm of x, in the form that the next matmul reads."""
        handed = self._taken(x)
        return handed if handed is not None else self._run(x, None, None)[0]

    def of_sum(self, x: Tensor, residual: Tensor, before: KernelNorm | None) -> tuple[Tensor | Fp8Rows, Tensor]:
        """Return the norm of x + residual, in the form that a matmul reads, and the sum; `before` is applied to x."""
        return self._run(x, residual, None if before is None else (before.scale, before.eps))

    def hand_on(self, x: Tensor, residual: Tensor, before: KernelNorm | None) -> Tensor:
        """Return the sum, and store its norm until the next call of this module.

        If that call is for this same tensor, it takes the stored norm; for any other tensor it computes the norm.
        Other code may read the sum in between, but must not write to it.
        """
        normed, total = self.of_sum(x, residual, before)
        self._handed = total, normed
        return total

    def _taken(self, x: Tensor) -> Tensor | Fp8Rows | None:
        total, normed = self._handed
        self._handed = None, None
        return normed if total is x else None

    def _run(
        self, x: Tensor, residual: Tensor | None, before: tuple[Tensor, float] | None
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        run = self.ops.add_norm_round if self.rounds else self.ops.add_norm
        return run(x, residual, self.scale, self.eps, before)


class KernelGate(nn.Module):
    """down(activation(gate) * up), with gate and up in one matmul. With `rounds`, `down` reads 8-bit floats."""

    def __init__(self, both: nn.Module, down: nn.Module, activation: str, ops: LayerOps) -> None:
        super().__init__()
        self.both, self.down_proj, self.activation, self.ops, self.rounds = both, down, activation, ops, False

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        run = self.ops.gate_round if self.rounds else self.ops.gate
        return cast("Tensor", self.down_proj(run(self.both(x), self.activation)))


class KernelAttention(nn.Module):
    """Attention with rotation, norms of heads and K/V write in one kernel; the original runs if there is no batch."""

    def __init__(self, fused: RotaryAttention, ops: LayerOps) -> None:
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
        hidden_states: Tensor | Fp8Rows,  # [1, T, hidden]; rounded only where there is a ragged batch
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # cos and sin, [1, T, rotary_dim]
        ragged: Ragged | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute what the original computes."""
        if ragged is None or position_embeddings is None:
            return cast("tuple[Tensor, None]", self.fused(hidden_states, position_embeddings, ragged=ragged, **others))
        query = self._write(self.qkv(hidden_states)[0], position_embeddings, ragged)
        k, v = ragged.arena.k[self.layer_idx], ragged.arena.v[self.layer_idx]
        out = ragged.attend(query, k, v, ragged.batch, self.seen.spec)
        return self.o_proj(out.flatten(1)[None]), None

    def _write(self, projected: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """Write keys and values of `[T, (heads + 2 kv_heads) * head_dim]` to the arena; returns the turned queries."""
        norms = (self.head_norms[0].scale, self.head_norms[1].scale) if self.head_norms else None
        eps = self.head_norms[0].eps if self.head_norms else 0.0
        k, v, rows = ragged.arena.k[self.layer_idx], ragged.arena.v[self.layer_idx], ragged.batch.kv_rows
        scaled = SCALE_BYTES if is_rounded(k) else 0
        return self.ops.rotate_and_write(projected, rotary[0][0], rotary[1][0], rows, k, v, norms, eps, scaled)


# In the order of their use: before attention, on attention's result, before the MLP, on the MLP's result.
NAMES = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)


class KernelLayer(nn.Module):
    """A decoder layer x += attention(norm(x)); x += mlp(norm(x)), each sum in one kernel with the norm that follows.

    In some families the results of attention and MLP are normalised before they are added. Without a ragged batch the
    original runs.
    """

    def __init__(self, inner: nn.Module, names: tuple[str | None, ...]) -> None:
        super().__init__()
        self.inner = inner
        norms = [None if name is None else getattr(inner, name, None) for name in names]
        assert all(norm is None or isinstance(norm, KernelNorm) for norm in norms)
        assert [name is None for name in names] == [norm is None for norm in norms]
        self.norms = cast("tuple[KernelNorm, KernelNorm | None, KernelNorm, KernelNorm | None]", tuple(norms))
        # The norm that reads this layer's result, if this layer may compute it; in a tuple, so that torch does not
        # register it as a part of this module.
        self.following: tuple[KernelNorm, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the original layer that a model reads, such as its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """`[1, T, hidden]`."""
        inner = cast("Any", self.inner)
        if others.get("ragged") is None or others.get("position_embeddings") is None:
            return cast("Tensor", inner(hidden_states, **others))
        first, after_attention, second, after_mlp = self.norms
        attended, _ = inner.self_attn(hidden_states=first.for_matmul(hidden_states), **others)
        normed, total = second.of_sum(attended, hidden_states, after_attention)
        out = inner.mlp(normed)
        if self.following:
            return self.following[0].hand_on(out, total, after_mlp)
        return cast("Tensor", total + (out if after_mlp is None else after_mlp(out)))
