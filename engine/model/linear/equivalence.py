"""Whether a stand-in says what the original says, tried on random rows; knows tensors alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.kernels import faults

log = logging.getLogger(__name__)

T = TypeVar("T")
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)


def random_rows(model: PreTrainedModel, *shape: int) -> Tensor:
    """The same numbers each time, in the model's type and place."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(model.device, model.dtype)


@torch.inference_mode()
def agree(run: Callable[[T], Tensor], original: T, stand_in: T, *, also: tuple[type[Exception], ...] = ()) -> bool:
    """Whether both give the same but for rounding; one that cannot run does not. `also`: how else that may show."""
    expected: tuple[type[Exception], ...] = (*_FAULTS, *also)
    try:
        want, got = run(original), run(stand_in)
    except expected as error:
        log.debug("%s stays out: %r", type(stand_in).__name__, error)
        return False
    if want.dtype != got.dtype:
        return False
    # A row as a whole: where numbers are rounded coarsely, one of thousands is always far off.
    off = (got - want).float().square().mean(-1).sqrt().max()
    return bool(off <= (1e-4 if want.dtype == torch.float32 else 0.03) * want.float().std())


class EquivalenceTests:
    """Stand-ins of several kinds that are run by kernels.

    A kernel that cannot be compiled, or does not fit on this card, keeps its kind out from then on: the log says so
    once, and the model stays as it was.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # kinds, and why

    def agree(self, kind: str, run: Callable[[T], Tensor], original: T, stand_in: T) -> bool:
        """As `trial.agree`; kernels assert what they cannot run."""
        if kind in self.failed:
            return False
        try:
            return agree(run, original, stand_in, also=(AssertionError,))
        except faults() as error:
            self.failed[kind] = f"{type(error).__name__}: {error}"
            log.warning("no kernels of ours for %s: %s", kind, " ".join(self.failed[kind].split())[:300])
            return False
