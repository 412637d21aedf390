"""Fewer, larger operations in a transformers model; uses shapes of modules and no family by name.

A module that looks like one we can run faster gets a replacement module. An equivalence test compares both on random
rows, and the replacement stays only if both give the same result. All other modules stay as they were.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from engine.attention.registry import Ragged
from engine.attention.spec import AttentionSpec
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed, RaggedBatch
from engine.machine.mapped import release_mapped
from engine.model.decoder.attention import Joined, JoinedPart
from engine.model.decoder.norms import RMSNorm
from engine.model.linear.equivalence import agree, random_rows
from engine.model.linear.grouped import GroupedLinear, SideBySide, has_codes
from engine.model.linear.low_rank import add_products
from engine.native import Rows, rows_for
from engine.native.rows import GELU_TANH, SILU, Activation, WeightAndEps
from engine.verdicts import verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ROWS, _PAGE = 3, 8  # of an equivalence test


def fuse(model: PreTrainedModel) -> Counter[str]:
    """Put replacement modules into `model` wherever they fit; returns how many of each kind.

    Weights are joined one module at a time.
    """
    done: Counter[str] = Counter()
    if not hasattr(model.config.get_text_config(), "hidden_size"):
        log.info("fused: nothing, as the config names no width")
        return done
    for name in [name for name, _ in model.named_modules()][:0:-1]:  # inner modules come before outer ones
        module = model.get_submodule(name)
        for group in _GROUPS:
            done["matmuls joined"] += _join(module, group)
        for kind, stand_in in (("norms", _norm_for), ("gates", _gate_for), ("attentions", _attention_for)):
            found = stand_in(module, model)
            if found is not None:
                model.set_submodule(name, found)
                done[kind] += 1
    log.info("fused: %s", ", ".join(f"{count} {kind}" for kind, count in done.items()))
    return done


def _join(module: nn.Module, group: tuple[str, ...]) -> bool:
    parts = [getattr(module, name, None) for name in group]
    kinds, widths = {type(part) for part in parts}, {getattr(part, "in_features", None) for part in parts}
    if len(kinds) > 1 or len(widths) > 1 or len({getattr(part, "bias", None) is None for part in parts}) > 1:
        return False
    matmul: nn.Module
    kind = kinds.pop()
    if issubclass(kind, GroupedLinear):
        matmul = SideBySide.of(cast("list[GroupedLinear]", parts))
    elif kind is nn.Linear:
        matmul = _joined_linear(cast("list[nn.Linear]", parts))
    else:
        return False
    joined = Joined(matmul, [cast("int", part.out_features) for part in parts if part is not None])
    for index, name in enumerate(group):
        setattr(module, name, JoinedPart(joined, index))
    return True


def _joined_linear(parts: list[nn.Linear]) -> nn.Linear:
    with torch.device("meta"):
        joined = nn.Linear(parts[0].in_features, 1, bias=False)
    joined.out_features = sum(part.out_features for part in parts)
    joined.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    for part in parts:
        release_mapped(part.weight)
    return joined


def _norm_for(module: nn.Module, model: PreTrainedModel) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(eps, float)
    if not is_norm or not isinstance(weight, nn.Parameter):  # a buffer stands for no weight, and has any size
        return None
    x = random_rows(model, 1, _ROWS, weight.numel())
    stand_ins = [RMSNorm(scale, cast("float", eps)) for scale in (weight, 1 + weight.float())]  # Gemma leaves out 1
    fitting = [each for each in stand_ins if agree(lambda m: m(x), module, each)]
    if not fitting:
        return None
    stand_in = min(fitting, key=lambda each: _relative_error(each, module, x))
    # Mamba's blocks ask a norm for the type of its weight; its numbers are in the scale.
    stand_in.weight = weight.detach()[:0]
    return stand_in


@torch.inference_mode()
def _relative_error(stand_in: nn.Module, original: nn.Module, x: Tensor) -> float:
    """The mean over all numbers. Beside weights of hundreds a wrong 1 hides in the error of a row."""
    got, want = stand_in(x).float(), original(x).float()
    return float(((got - want).abs() / want.abs().clamp_min(1e-6)).mean())


class Gated(nn.Module):
    """down(activation(gate) * up) on joined gate and up, in C; the same call rounds the input of `down` for codes."""

    def __init__(self, inner: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.inner, self.activation = inner, activation

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        inner = cast("Any", self.inner)
        both = inner.gate_proj.joined(x)
        native = rows_for(both.dtype, both.shape[-1] // 2)
        if native is None or not both.is_cpu or not len(both):
            return cast("Tensor", inner(x))
        rows = both.view(-1, both.shape[-1])
        if isinstance(inner.down_proj, GroupedLinear):
            out = inner.down_proj.of_rounded(*native.gate_round(rows, self.activation), x.dtype)
            add_products(inner.down_proj, lambda: native.gate(rows, self.activation), out)
            return out.view(x.shape)
        return cast("Tensor", inner.down_proj(native.gate(rows, self.activation).view(*x.shape[:-1], -1)))


def _gate_for(module: nn.Module, model: PreTrainedModel) -> nn.Module | None:
    gate = getattr(module, "gate_proj", None)
    if not isinstance(gate, JoinedPart) or not hasattr(module, "down_proj") or model.device.type != "cpu":
        return None
    activation = next((each for each in (SILU, GELU_TANH) if _activates(module, each)), None)
    if activation is None:
        return None
    x = random_rows(model, 1, _ROWS, model.config.get_text_config().hidden_size)
    stand_in, rounds = Gated(module, activation), has_codes(module)
    return stand_in if verdict(lambda: agree(lambda m: m(x), module, stand_in, rounds=rounds)) else None


@torch.inference_mode()
def _activates(module: nn.Module, activation: Activation) -> bool:
    """Whether the activation of a gated MLP is this one. Small numbers, as random rows may give, do not tell."""
    act, x = getattr(module, "act_fn", getattr(module, "activation_fn", None)), torch.linspace(-8, 8, 257)
    bend = activation.linear * x + activation.cubic * x**3
    return callable(act) and torch.allclose(act(x), x * bend.sigmoid(), rtol=1e-4, atol=1e-5)


class AttentionShape(Protocol):
    """The sizes of a layer's attention, and what it computes."""

    @property
    def heads(self) -> int:
        """Heads of queries."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        ...

    @property
    def spec(self) -> AttentionSpec:
        """Scale, window and cap."""
        ...


class RotaryAttention(nn.Module):
    """Attention with rotary positions on joined q, k and v: one rotation for q and k, no transposed copies.

    Without a ragged batch, as in transformers' own forward pass, the original runs.
    """

    def __init__(self, inner: nn.Module, seen: AttentionShape) -> None:
        super().__init__()
        self.inner, self.layer_idx, self.seen = inner, cast("int", inner.layer_idx), seen

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden]
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # cos and sin, [1, T, head_dim]
        attention_mask: Tensor | None = None,
        ragged: Ragged | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Compute what the original computes."""
        seen = self.seen
        if ragged is None or position_embeddings is None or position_embeddings[0].shape[-1] != seen.head_dim:
            passed = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **others}
            passed |= {} if ragged is None else {"ragged": ragged}
            return cast("tuple[Tensor, None]", self.inner(hidden_states=hidden_states, **passed))
        cos, sin = position_embeddings
        projected = self._projected(hidden_states)
        native = self._native_for(projected, cos, ragged)
        if native is not None:
            out = self._attend(native, projected, cos[0], sin[0], ragged)
            return cast("nn.Module", self.inner.o_proj)(out.flatten(1)[None]), None
        heads = projected.unflatten(-1, (-1, seen.head_dim))
        turning, value = heads.split([seen.heads + seen.kv_heads, seen.kv_heads], 1)
        turned = _rotate(self._normed(turning), cos, ragged.batch.once(("sin", sin), partial(_signed, sin)))
        query, key = turned.split([seen.heads, seen.kv_heads], 1)
        out = ragged.attend_layer(self.layer_idx, query, key, value, seen.spec)
        return cast("nn.Module", self.inner.o_proj)(out.flatten(1)[None]), None

    def _native_for(self, projected: Tensor, cos: Tensor, ragged: Ragged) -> Rows | None:
        """Our C functions, where they can rotate the projected rows while writing them into this arena; else None."""
        dtype, dim = projected.dtype, self.seen.head_dim
        fits = dtype == cos.dtype and ragged.arena.layout.takes(dtype)
        one_type = fits and projected.is_cpu and cos.shape[0] == 1
        return rows_for(dtype, dim // 2) if self.head_norms() is not None and one_type and not dim % 2 else None

    def head_norms(self) -> tuple[WeightAndEps, WeightAndEps] | tuple[None, None] | None:
        """The norms of each head of q and k; two None in families that have none, None where they are of another kind.

        Some families have one norm for all heads together.
        """
        norms = getattr(self.inner, "q_norm", None), getattr(self.inner, "k_norm", None)
        match norms:
            case None, None:
                return None, None
            case RMSNorm() as query, RMSNorm() as key if query.width == key.width == self.seen.head_dim:
                return (query.scale.data, query.eps), (key.scale.data, key.eps)
        return None

    def _attend(self, native: Rows, projected: Tensor, cos: Tensor, sin: Tensor, ragged: Ragged) -> Tensor:
        seen, arena = self.seen, ragged.arena
        k, v = arena.k[self.layer_idx], arena.v[self.layer_idx]
        norms = self.head_norms()
        assert norms is not None, "`_native_for` said no"
        query = native.rotate(projected, cos.contiguous(), sin.contiguous(), ragged.batch.kv_rows, k, v, norms)
        return ragged.attend(query, k, v, ragged.batch, seen.spec)

    def _projected(self, hidden_states: Tensor) -> Tensor:
        """q, k and v side by side, `[T, ...]`; some families have one matmul for all three from the start."""
        inner = cast("Any", self.inner)
        both = inner.q_proj.joined if hasattr(inner, "q_proj") else inner.qkv_proj
        return cast("Tensor", both(hidden_states)[0])

    def _normed(self, turning: Tensor) -> Tensor:
        """Apply the norms on q and k, in families that have them."""
        q_norm, k_norm = getattr(self.inner, "q_norm", None), getattr(self.inner, "k_norm", None)
        if q_norm is None or k_norm is None:
            return turning
        heads = self.seen.heads
        return torch.cat([q_norm(turning[:, :heads]), k_norm(turning[:, heads:])], 1)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate [T, heads, d]: the halves (a, b) of each head become (a cos - b sin, b cos + a sin)."""
    return (x * cos[0, :, None]).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


def _signed(sin: Tensor) -> Tensor:
    """[1, T, d] -> [T, 1, d], the first half negated."""
    first, second = sin[0, :, None].chunk(2, -1)
    return torch.cat([-first, second], -1)


class _RecordedAttention:
    """Replaces our attention function in an equivalence test, and records what an attention module passes to it."""

    def __init__(self) -> None:
        self.heads = self.kv_heads = self.head_dim = 0
        self.spec = AttentionSpec(scale=0.0)

    def __call__(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Mix all inputs, so that a difference in any of them changes the result."""
        self.spec = spec
        _, self.heads, self.head_dim = query.shape
        self.kv_heads = k.shape[1]
        fresh = (k + 2 * v)[batch.kv_rows]
        return query * spec.scale + fresh.repeat_interleave(self.heads // self.kv_heads, 1)


class _Page:
    """An arena of one page for an equivalence test, of the recorded shape or of the shape that is written first."""

    def __init__(self, dtype: torch.dtype, seen: _RecordedAttention) -> None:
        self.layout = KVLayout.uniform(1, seen.kv_heads, seen.head_dim, dtype)
        self.k, self.v = (
            defaultdict[int, Tensor](lambda: torch.zeros(_PAGE, seen.kv_heads, seen.head_dim, dtype=dtype))
            for _ in "kv"
        )

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        self.k[layer], self.v[layer] = (x.new_zeros(_PAGE, *x.shape[1:]).index_copy_(0, rows, x) for x in (key, value))


def _attention_for(module: nn.Module, model: PreTrainedModel) -> nn.Module | None:
    has_qkv = isinstance(getattr(module, "q_proj", None), JoinedPart) or hasattr(module, "qkv_proj")
    width, head_dim = model.config.get_text_config().hidden_size, getattr(module, "head_dim", None)
    if not has_qkv or not hasattr(module, "o_proj") or not hasattr(module, "layer_idx") or not head_dim:
        return None
    seen = _RecordedAttention()
    batch = RaggedBatch.of([Feed([0] * _ROWS, 4, [0])], _PAGE, model.device)
    angles = random_rows(model, 1, _ROWS, head_dim // 2).float().repeat(1, 1, 2) * 3
    rotary = angles.cos().to(model.dtype), angles.sin().to(model.dtype)
    x = random_rows(model, 1, _ROWS, width)

    def run(candidate: nn.Module) -> Tensor:
        ragged = Ragged(batch, cast("KVArena", _Page(model.dtype, seen)), seen)
        out = candidate(hidden_states=x, position_embeddings=rotary, attention_mask=None, ragged=ragged)
        assert len(out) == 2
        return cast("Tensor", out[0])

    stand_in = RotaryAttention(module, seen)
    also, rounds = (ModelError, AssertionError), has_codes(module)
    return stand_in if agree(run, module, stand_in, also=also, rounds=rounds) else None
