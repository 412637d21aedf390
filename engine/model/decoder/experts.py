"""A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router selects the experts of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.kernels import reference
from pilotfish.engine.model.decoder.feed_forward import GatedFeed, GatedMLP, PlainFeed, PlainMLP
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.linear.activations import ELEMENTWISE
from pilotfish.engine.model.linear.experts import FusedExperts, RoutedExperts
from pilotfish.engine.native import PackedMatrix, multiplies, rows_for
from pilotfish.engine.native.experts import ExpertGate


@dataclass(frozen=True, slots=True)
class Router:
    """Selects the experts of a row, and their weights.

    Attributes:
        experts: number of experts.
        each: number of experts per row.
        scores: function of logits: over all experts (softmax), or element by element.
        cap: logits become tanh(logit / cap) * cap.
        tolerance: experts are selected sequentially, by SparseMixer; see `by_turns`.
        normalised: the weights of a row are divided by their sum.
        least: minimum of that divisor.
        scale: factor of weights.
        groups: number of groups of experts, and number of groups per row; None: one group.
        best: number of highest scores whose sum ranks a group.
        bias: the router's matrix has a bias.
        correction: name of a bias, below the feed-forward, that is used for selection but not in the weights.
        corrects_logits: the correction is added to logits instead of scores.
        is_row: the correction is stored as a matrix of one row.
        name: of the router.
    """

    experts: int
    each: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    cap: float | None = None
    tolerance: float | None = None
    normalised: bool = True
    least: float = 1e-20
    scale: float = 1.0
    groups: tuple[int, int] | None = None
    best: int = 2
    bias: bool = False
    correction: str | None = None
    corrects_logits: bool = False
    is_row: bool = False
    name: str = "gate"

    def choose(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """float32 `[T, experts]` -> experts `[T, each]` and their weights, float32 `[T, each]`."""
        if self.cap is not None:
            logits = ELEMENTWISE[torch.tanh](logits / self.cap) * self.cap
        if self.tolerance is not None:
            return self.by_turns(logits, self.tolerance)
        scores = logits.softmax(-1) if self.scores == "softmax" else ELEMENTWISE[torch.sigmoid](logits)
        # Logits have the order of the scores, without ties of scores near 0 or 1.
        wanted = logits if correction is None else (logits if self.corrects_logits else scores) + correction
        if self.groups is not None:
            count, kept = self.groups
            by_group = wanted.unflatten(-1, (count, -1))
            chosen = by_group.topk(self.best, -1)[0].sum(-1).topk(kept, -1)[1]
            lost = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, chosen, value=False)
            wanted = by_group.masked_fill(lost[..., None], -torch.inf).flatten(1)
        experts = wanted.topk(self.each, -1)[1]
        weights = scores.gather(1, experts)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(self.least)
        return experts, weights * self.scale

    def by_turns(self, logits: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
        """As `choose`; an expert's weight is its share among remaining experts of similar score (arXiv 2409.12136)."""
        left, chosen = logits, list[tuple[Tensor, Tensor]]()
        for _ in range(self.each):
            best, expert = left.max(-1, keepdim=True)
            is_near = (best - logits) / logits.abs().maximum(best) <= tolerance
            share = left.masked_fill(~is_near, -torch.inf).softmax(-1).gather(1, expert)
            chosen.append((expert, share))
            left = left.scatter(1, expert, -torch.inf)
        experts, weights = zip(*chosen, strict=True)
        return torch.cat(experts, 1), torch.cat(weights, 1)


@dataclass(frozen=True, slots=True)
class Experts:
    """A router and its experts, each of which is down(gate(gate_up)), and in some families a shared expert.

    A checkpoint has the matrices of all experts fused in two tensors, or separate ones.

    Attributes:
        inner: inputs of `down`.
        gate: the activation between the two matrices of an expert; one without `up` has only `up_proj`.
        router: selects the experts.
        bias: both matrices have one.
        transposed: fused matrices are `[inputs, outputs]`.
        latent: width of the experts' inputs and outputs, if it differs from a row's; `fc1_latent_proj` and
        `fc2_latent_proj` convert. on_inputs: weights multiply the experts' inputs instead of their outputs.
        shared: the shared expert.
        shared_name: of the shared expert.
        shared_gate: name of a vector; the sigmoid of its product with the input is the weight of `shared`.
    """

    inner: int
    gate: ExpertGate
    router: Router
    bias: bool = False
    transposed: bool = False
    latent: int | None = None
    on_inputs: bool = False
    shared: GatedFeed | PlainFeed | None = None
    shared_name: str = "shared_experts"
    shared_gate: str | None = None


class MixtureMLP(nn.Module):
    """The weighted experts of a row, and the shared expert."""

    def __init__(self, feed: Experts, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.feed, router, count, read = feed, feed.router, feed.router.experts, feed.latent or width
        self.router = RowProducts(weights, router.name, count, width, has_bias=router.bias)
        self.correction: Tensor | None
        self.register_buffer("correction", None, persistent=False)
        if router.correction is not None:
            size = (1, count) if router.is_row else (count,)
            self.correction = weights.floats(router.correction, *size).float().view(-1)
        each = replace(weights.below("experts."), converted=None)
        form = {"has_bias": feed.bias, "transposed": feed.transposed}
        parts = ("up_proj",) if feed.gate.ungated else ("gate_proj", "up_proj")
        ups = each.experts("gate_up_proj", parts, count, len(parts) * feed.inner, read, **form)
        downs = each.experts("down_proj", ("down_proj",), count, read, feed.inner, **form)
        both = cast("list[nn.Linear]", ups), cast("list[nn.Linear]", downs)
        in_c = weights.packs and weights.device.type == "cpu"
        runs_singly = in_c or not all(isinstance(parts[0], nn.Linear) for parts in both)  # codes are not fused
        self.experts = RoutedExperts(*both, feed.gate) if runs_singly else _fused(*both, feed.gate)
        if feed.latent is not None:
            self.fc1_latent_proj = weights.matrix({"fc1_latent_proj": read}, width, has_bias=False)
            self.fc2_latent_proj = weights.matrix({"fc2_latent_proj": width}, read, has_bias=False)
        if feed.shared is not None:
            below = weights.below(f"{feed.shared_name}.")
            shared = PlainMLP(feed.shared, width, below) if isinstance(feed.shared, PlainFeed) else None
            setattr(self, feed.shared_name, shared or GatedMLP(cast("GatedFeed", feed.shared), width, below))
        gate = None if feed.shared_gate is None else RowProducts(weights, feed.shared_gate, 1, width, has_bias=False)
        self.shared_gate = gate

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """`[1, T, width]`, and the mixers' arguments -> `[1, T, width]`."""
        feed, rows = self.feed, x.reshape(-1, x.shape[-1])
        chosen, weights = feed.router.choose(self.router(rows), self.correction)
        if feed.on_inputs:
            given = (rows[:, None] * weights[..., None]).to(rows.dtype).flatten(0, 1)
            made = self.experts(given, chosen.view(-1, 1), given.new_ones(len(given), 1, dtype=torch.float32))
            made = made.unflatten(0, (-1, feed.router.each)).sum(1)
        elif feed.latent is not None:
            made = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(rows), chosen, weights))
        else:
            made = self.experts(rows, chosen, weights)
        if feed.shared is not None:
            shared = self.get_submodule(feed.shared_name)(x).view_as(made)
            if self.shared_gate is not None:
                shared = (shared * ELEMENTWISE[torch.sigmoid](self.shared_gate(rows))).to(made.dtype)
            made = made + shared
        return cast("Tensor", made).view_as(x)


class RowProducts(nn.Module):
    """A small unrounded matrix of floats; a row's products are independent of other rows."""

    def __init__(self, weights: WeightReader, name: str, outputs: int, inputs: int, *, has_bias: bool) -> None:
        super().__init__()
        weight = weights.floats(f"{name}.weight", outputs, inputs)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), cast("Tensor | None", None)
        if has_bias:
            self.bias = nn.Parameter(weights.floats(f"{name}.bias", outputs).float(), requires_grad=False)
        self._packed: PackedMatrix | None = None
        in_c = weights.packs and weight.is_cpu and multiplies(torch.float32)
        if in_c and rows_for(torch.float32, inputs) is not None:
            self._packed = PackedMatrix.of(weight.detach().float(), self.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """`[T, inputs]` -> float32 `[T, outputs]`, summed in the order of the inputs on a CPU."""
        wide = rows.float()
        if self._packed is not None:
            return self._packed.multiply(wide.contiguous(), None, torch.float32)
        parts = wide.split(1) if wide.is_cpu else (wide,)
        return torch.cat([F.linear(part.clone(), self.weight.float(), self.bias) for part in parts])


def _fused(ups: list[nn.Linear], downs: list[nn.Linear], gate: ExpertGate) -> FusedExperts:
    """The matrices of all experts fused in two tensors; in plain torch until `use` sets kernels."""
    up, down = (torch.stack([matmul.weight.detach() for matmul in matmuls]) for matmuls in (ups, downs))
    biases = None
    if ups[0].bias is not None:
        biases = torch.stack([matmul.bias for matmul in ups]), torch.stack([matmul.bias for matmul in downs])
    return FusedExperts(up, down, biases, gate, reference.mix)
