"""Finds modules of stacked experts and replaces them by modules of our own (`experts.py`). Knows no family by name.

A module is found by the shapes of its parameters. What it computes is found out on a miniature of it: the same code
with small random matrices, so that the real ones need not be read, or even be there (meta device).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from engine.model.linear.equivalence import agree
from engine.model.linear.experts import OwnGate, RoutedExperts
from engine.native import ALIGNED
from engine.native.experts import ExpertGate
from engine.native.rows import GELU_TANH

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_HIDDEN, _INNER, _ROWS = 32, 16, 3  # sizes of a miniature


@dataclass(frozen=True, slots=True)
class StackedForm:
    """How a module holds the matrices of its experts, and what it computes between the two of each.

    Attributes:
        up: the name of the first stack; the other one is `down_proj`.
        transposed: whether matrices are `[in, out]`.
        gate: None for the module's own code.
    """

    up: str
    transposed: bool
    gate: ExpertGate | None

    @property
    def names(self) -> tuple[str, str]:
        """The names of both stacks."""
        return self.up, "down_proj"


def unstack(model: nn.Module, *, whole_vectors: bool = False) -> int:
    """Replace every module of stacked experts whose code is understood; returns how many. Weights are not copied.

    `whole_vectors` leaves modules alone whose matrices our C cannot pack.
    """
    found = dict(recognised(model))
    for name, form in found.items():
        module = model.get_submodule(name)
        if not whole_vectors or has_whole_vectors(module, form):
            model.set_submodule(name, _unstacked(module, form))
    return len(found)


def recognised(model: nn.Module) -> Iterator[tuple[str, StackedForm]]:
    """The names of the modules of stacked experts whose code is understood."""
    known: dict[tuple[object, ...], StackedForm | None] = {}
    for name, module in model.named_modules():
        shapes = _shapes(module)
        if len(shapes) >= 2 and "down_proj" in shapes:
            kind = type(module), *sorted(shapes.items())
            if kind not in known:
                known[kind] = _form_of(module)
                log.debug("%s (%s): %s", name, type(module).__name__, known[kind] or "not understood")
            form = known[kind]
            if form is not None:
                yield name, form


def has_whole_vectors(module: nn.Module, form: StackedForm) -> bool:
    """Whether our C can pack the matrices of a module."""
    inputs = 1 if form.transposed else 2
    return not any(cast("Tensor", getattr(module, name)).shape[inputs] % ALIGNED for name in form.names)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}


def _form_of(module: nn.Module) -> StackedForm | None:
    """Find out what a module computes, by trying on a miniature what it may be."""
    for up in ("gate_up_proj", "up_proj"):
        for transposed in (False, True):
            if not _has_sizes(_shapes(module), up, transposed, 2 if up == "gate_up_proj" else 1):
                continue
            twin = _miniature(module, up, transposed)
            for gate in (*_gates(module, alone=up == "up_proj"), None):
                form = StackedForm(up, transposed, gate)
                if _computes(twin, form):
                    return form
    return None


def _has_sizes(shapes: dict[str, tuple[int, ...]], up: str, transposed: bool, halves: int) -> bool:
    """Whether parameters are a stack of `[halves * n, hidden]`, one of `[hidden, n]`, and maybe their biases."""
    biases = {f"{name}_bias" for name in (up, "down_proj")}
    if set(shapes) not in ({up, "down_proj"}, {up, "down_proj"} | biases) or len(shapes[up]) != 3:
        return False
    (experts, *first), (others, *second) = shapes[up], shapes["down_proj"]
    (wide, hidden), (out, inner) = (first[::-1], second[::-1]) if transposed else (first, second)
    return experts == others and hidden == out and wide == halves * inner


def _miniature(module: nn.Module, up: str, transposed: bool) -> nn.Module:
    """The same code with small random matrices in float32, on the CPU."""
    shapes, wide = _shapes(module), _INNER if up == "up_proj" else 2 * _INNER
    first, second = [wide, _HIDDEN], [_HIDDEN, _INNER]
    small = {up: first[::-1], "down_proj": second[::-1]} if transposed else {up: first, "down_proj": second}
    small |= {f"{up}_bias": [wide], "down_proj_bias": [_HIDDEN]}
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shapes[name][0], *small[name], generator=generator, device="cpu") for name in shapes}
    return _with(module, {name: nn.Parameter(weight, requires_grad=False) for name, weight in drawn.items()})


def _with(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A copy of a module with other parameters; the original keeps its own."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = parameters
    return twin


def _gates(module: nn.Module, *, alone: bool) -> Iterator[ExpertGate]:
    """What may lie between two matrices, in our C; limits and slopes as the module holds them."""
    kinds = [ExpertGate(), ExpertGate(GELU_TANH.linear, GELU_TANH.cubic), ExpertGate(squared=True)]
    if alone:
        yield from (replace(kind, alone=True) for kind in kinds)
        return
    limits, slopes = (
        [value for name in names if isinstance(value := getattr(module, name, None), int | float)]
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    kinds += [replace(kind, limit=float(limit)) for kind in kinds for limit in limits]
    kinds += [ExpertGate(float(a), limit=float(b), plus=1.0) for a in slopes for b in (*limits, math.inf)]
    for interleaved in (False, True):
        yield from (replace(kind, interleaved=interleaved) for kind in kinds)


def _computes(twin: nn.Module, form: StackedForm) -> bool:
    """Whether single matmuls with this form compute what a miniature computes."""
    experts = len(cast("Tensor", twin.get_parameter("down_proj")))
    each, generator = min(2, experts), torch.Generator().manual_seed(1)
    rows = torch.randn(_ROWS, _HIDDEN, generator=generator, device="cpu")
    chosen = torch.arange(_ROWS * each, device="cpu").view(_ROWS, each) % experts
    weights = torch.rand(_ROWS, each, generator=generator, device="cpu")
    return agree(lambda module: cast("Tensor", module(rows, chosen, weights)), twin, _unstacked(twin, form))


def _unstacked(module: nn.Module, form: StackedForm) -> RoutedExperts:
    """Single matmuls over views of a module's stacks."""
    ups, downs = (_matmuls(module, name, form.transposed) for name in form.names)
    return routed(module, form, ups, downs)


def routed(module: nn.Module, form: StackedForm, ups: Iterable[nn.Linear], downs: Iterable[nn.Linear]) -> RoutedExperts:
    """The matmuls of experts, as the module of their stacks runs them."""
    return RoutedExperts(ups, downs, OwnGate(_with(module, {})) if form.gate is None else form.gate)


def _matmuls(module: nn.Module, name: str, transposed: bool) -> Iterator[nn.Linear]:
    biases = cast("Tensor | None", getattr(module, f"{name}_bias", None))
    for expert, matrix in enumerate(module.get_parameter(name).detach()):
        weight = matrix.t() if transposed else matrix
        with torch.device("meta"):
            made = nn.Linear(1, 1, bias=False)
        made.out_features, made.in_features = weight.shape
        made.weight = nn.Parameter(weight, requires_grad=False)
        if biases is not None:
            made.bias = nn.Parameter(biases.detach()[expert], requires_grad=False)
        yield made


def stacked_weights(model: PreTrainedModel | nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of three dimensions and more, by name; no convolutions of single channels, `[channels, 1, size]`."""
    return ((name, weight) for name, weight in model.named_parameters() if weight.ndim > 2 and weight.shape[1] > 1)
