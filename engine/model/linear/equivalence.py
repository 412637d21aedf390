"""Equivalence tests: compare a replacement module with the original on random rows. Knows only tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from engine.kernels import faults

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

T = TypeVar("T")
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)


def random_rows(model: PreTrainedModel, *shape: int) -> Tensor:
    """Random numbers that are the same each time, in the model's type and on its device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(model.device, model.dtype)


@torch.inference_mode()
def agree(
    run: Callable[[T], Tensor],
    original: T,
    stand_in: T,
    *,
    also: tuple[type[Exception], ...] = (),
    rounds: bool = False,
) -> bool:
    """Whether both give the same result except for rounding.

    An error means that they do not agree. `also` names exceptions that are treated as such an error. `rounds`: there
    are rows of integers inside, where a number that differs in its last bit may be another integer.
    """
    expected: tuple[type[Exception], ...] = (*_FAULTS, *also)
    try:
        want, got = run(original), run(stand_in)
    except expected as error:
        log.debug("%s stays out: %r", type(stand_in).__name__, error)
        return False
    if want.dtype != got.dtype:
        return False
    # The error of a whole row: where numbers are rounded coarsely, one of thousands always has a large error.
    off = (got - want).float().square().mean(-1).sqrt().max()
    is_fine = want.dtype == torch.float32 and not rounds
    return bool(off <= (1e-4 if is_fine else 0.03) * want.float().std())


class EquivalenceTests:
    """Equivalence tests for several kinds of replacement modules that run kernels.

    If a kernel cannot be compiled or does not fit on this card, its kind is not used from then on. The log says so
    once, and the model stays as it was.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # kind -> the error

    def agree(self, kind: str, run: Callable[[T], Tensor], original: T, stand_in: T) -> bool:
        """Like the function `agree`; an AssertionError means that a kernel cannot run this shape."""
        if kind in self.failed:
            return False
        try:
            return agree(run, original, stand_in, also=(AssertionError,))
        except faults() as error:
            self.failed[kind] = f"{type(error).__name__}: {error}"
            log.warning("no kernels of ours for %s: %s", kind, " ".join(self.failed[kind].split())[:300])
            return False
