"""Replaces matmuls of a model by others, wherever a module refers to them. Knows modules and no family by name.

A replacement module and the original inside it may both refer to one matmul. If it were replaced in one place only, the
old matmul would stay in memory beside the new one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from engine.model.linear.unstack import stacked_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_ROUTERS = ("gate", "router")

Fits = Callable[[int, int], bool]  # in_features, out_features


@dataclass(slots=True)
class Swapped:
    """How many matmuls were replaced, and why each of the others was not, by name."""

    done: int = 0
    stayed: dict[str, str] = field(default_factory=dict)

    def tell(self, kind: str) -> None:
        """Write one line to the log."""
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.stayed.items():
            reasons[reason].append(name)
        others = "; ".join(f"{len(names)} {reason} ({names[0]} ...)" for reason, names in reasons.items()) or "none"
        log.info("%d of %d matrices are in %s; others: %s", self.done, self.done + len(self.stayed), kind, others)


def swap_matmuls(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module], fits: Fits) -> Swapped:
    """Replace every matmul that may be rounded by `make(matmul)`, one at a time, wherever a module refers to it."""
    places: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear:
            places[id(module)].append(name)
    stacked = {name: "stacked experts" for name, _ in stacked_weights(model)}
    head, swapped = model.get_output_embeddings(), Swapped(stayed=stacked)
    for names in places.values():
        matmul = cast("nn.Linear", model.get_submodule(names[0]))
        reason = why_not(names[0], matmul, head, fits)
        if reason is not None:
            swapped.stayed[names[0]] = reason
            continue
        made = make(matmul)
        for name in names:
            model.set_submodule(name, made)
        swapped.done += 1
    return swapped


def bytes_after_swap(
    model: PreTrainedModel, dtype: torch.dtype, fits: Fits, num_bytes: Callable[[int, int], int]
) -> int:
    """Bytes of the weights of a float model after the swap: `num_bytes(in, out)` for its matmuls, others in `dtype`."""
    head, swapped = model.get_output_embeddings(), 0
    stay = {id(weight): weight for weight in model.parameters()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and why_not(name, module, head, fits) is None:
            del stay[id(module.weight)]
            swapped += num_bytes(module.in_features, module.out_features)
    return swapped + sum(weight.numel() for weight in stay.values()) * dtype.itemsize


def why_not(name: str, matmul: nn.Linear, head: nn.Module | None, fits: Fits) -> str | None:
    """The reason why a matmul stays as it is; None if it can be replaced."""
    if matmul is head:
        return "head"
    if is_router(name):
        return "router"
    return None if fits(matmul.in_features, matmul.out_features) else "of sizes that do not fit"


def is_router(name: str) -> bool:
    """Whether a matrix chooses experts, or is inside of what does: small, and rounding it could change the choice."""
    return name.rpartition(".")[2] in _ROUTERS or is_in_router(name)


def is_in_router(name: str) -> bool:
    """Whether a matrix is a part of a router, whose own code may multiply it."""
    return any(part in _ROUTERS for part in name.split(".")[-2:-1])
