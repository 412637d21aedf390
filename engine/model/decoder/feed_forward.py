"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.kernels.args import Fp8Rows
from pilotfish.engine.model.decoder.architecture import NormForm
from pilotfish.engine.model.decoder.attention import join
from pilotfish.engine.model.decoder.norms import norm_of
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.linear.activations import RowWise
from pilotfish.engine.model.linear.cuda import Fp8Linear
from pilotfish.engine.model.linear.grouped import GroupedLinear
from pilotfish.engine.model.linear.low_rank import add_products
from pilotfish.engine.native import rows_for
from pilotfish.engine.native.rows import GELU_TANH, SILU, Activation


@dataclass(frozen=True, slots=True)
class GatedFeed:
    """down(activation(gate) * up); `joined`: the checkpoint has gate and up in one matrix, `gate_up_proj`.

    `norm`: of the input of `down`, `ffn_sub_norm`.
    `scales`: factors of the gate, before its activation, and of the result.
    `deviations`: gates below this number of standard deviations above their mean become 0.
    """

    inner: int
    activation: str
    bias: bool = False
    joined: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    norm: NormForm | None = None
    deviations: float | None = None


@dataclass(frozen=True, slots=True)
class PlainFeed:
    """down(activation(up)); `names` are those of both matrices."""

    inner: int
    activation: str
    bias: bool = False
    names: tuple[str, str] = ("up_proj", "down_proj")


# Shapes of the weights of activations, by name.
LEARNED: dict[str, dict[str, tuple[int, ...]]] = {
    "xielu": {"act_fn.alpha_p": (1,), "act_fn.alpha_n": (1,), "act_fn.beta": (), "act_fn.eps": ()}
}


class SquaredReLU(nn.Module):
    """max(x, 0)^2."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n]` -> `[..., n]`."""
        return F.relu(x).square()


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n]` -> `[..., n]`."""
        return x * torch.sigmoid(1.702 * x)


class XIELU(nn.Module):
    """A parabola for x > 0, else an exponential of x plus a line (arXiv 2411.13010)."""

    above: Tensor
    below: Tensor
    beta: Tensor
    eps: Tensor

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        """Take the checkpoint's weights: the factors of both sides are softplus of the alphas."""
        super().__init__()
        parts = {"above": F.softplus(alpha_p), "below": beta + F.softplus(alpha_n), "beta": beta, "eps": eps}
        for name, part in parts.items():
            self.register_buffer(name, part, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n]` -> `[..., n]`."""
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * self.below
        return torch.where(x > 0, self.above * x * x, below) + self.beta * x


# By config name; each is called with its weights (`LEARNED`).
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_fast": lambda: nn.GELU(approximate="tanh"),
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "relu2": SquaredReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "xielu": XIELU,
}
# Those supported by our C and kernels, by their names there.
_IN_KERNELS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_IN_KERNELS |= {"gelu_fast": "gelu_tanh"}
_IN_C = {"silu": SILU, "gelu_tanh": GELU_TANH}


class GatedMLP(nn.Module):
    """down(activation(gate) * up) with joined gate and up; in C the same call also rounds the input of `down`."""

    def __init__(self, feed: GatedFeed, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.feed = feed
        self.ops: LayerOps | None = None  # of a GPU
        if feed.joined:
            self.gate_up_proj = weights.matrix({"gate_up_proj": 2 * feed.inner}, width, has_bias=feed.bias)
        else:
            join(self, weights, dict.fromkeys(("gate_proj", "up_proj"), feed.inner), width, has_bias=feed.bias)
        self.down_proj = weights.matrix({"down_proj": width}, feed.inner, has_bias=feed.bias)
        self.ffn_sub_norm: nn.Module | None = None
        if feed.norm is not None:
            self.ffn_sub_norm = norm_of(feed.norm, weights, "ffn_sub_norm", feed.inner)
        is_plain = feed.scales == (1.0, 1.0) and feed.norm is None and feed.deviations is None
        self._name = _IN_KERNELS.get(feed.activation) if is_plain else None
        self.activation: Activation | None = None if self._name is None else _IN_C[self._name]
        self.act_fn = RowWise(ACTIVATIONS[feed.activation]())

    @property
    def matmul(self) -> nn.Module:
        """The matrix of gate and up."""
        parts: Any = self
        return cast("nn.Module", parts.gate_up_proj if self.feed.joined else parts.gate_proj.joined.matmul)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """`[..., width]` -> `[..., width]`."""
        both = cast("Tensor", self.matmul(x))
        down, bend = self.down_proj, self.activation
        if self.ops is not None and bend is not None:
            run = self.ops.gate_round if isinstance(down, Fp8Linear) else self.ops.gate
            return cast("Tensor", down(run(both, self._name)))
        native = rows_for(both.dtype, self.feed.inner)
        if native is None or not both.is_cpu or not len(both) or bend is None:
            gate, up = both.chunk(2, -1)
            before, after = self.feed.scales
            if before != 1:
                gate = gate * before
            if self.feed.deviations is not None:
                gate = _largest(gate, self.feed.deviations)
            gated = self.act_fn(gate) * up
            made: Tensor = down(gated if self.ffn_sub_norm is None else self.ffn_sub_norm(gated))
            return made if after == 1 else made * after
        rows = both.view(-1, both.shape[-1])
        if isinstance(down, GroupedLinear):
            out = down.of_rounded(*native.gate_round(rows, bend), x.dtype)
            add_products(down, lambda: native.gate(rows, bend), out)
            return out.view(*x.shape)
        return cast("Tensor", down(native.gate(rows, bend).view(*x.shape[:-1], -1)))


def _largest(x: Tensor, deviations: float) -> Tensor:
    """Each element minus (mean of its row + `deviations` standard deviations), at least 0."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    spread = (wide - mean).square().mean(-1, keepdim=True).sqrt()
    return F.relu(wide - (mean + spread * deviations)).to(x.dtype)


class PlainMLP(nn.Module):
    """down(activation(up))."""

    def __init__(self, feed: PlainFeed, width: int, weights: WeightReader) -> None:
        super().__init__()
        self._names = feed.names
        up, down = feed.names
        setattr(self, up, weights.matrix({up: feed.inner}, width, has_bias=feed.bias))
        setattr(self, down, weights.matrix({down: width}, feed.inner, has_bias=feed.bias))
        learned = (weights.vector(name, *shape) for name, shape in LEARNED.get(feed.activation, {}).items())
        self.act_fn = RowWise(ACTIVATIONS[feed.activation](*learned))

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """`[..., width]`, and what mixers are given too -> `[..., width]`."""
        up, down = map(self.get_submodule, self._names)
        return cast("Tensor", down(self.act_fn(up(x))))
