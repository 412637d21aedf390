"""Whether a stand-in says what the original says, tried on random rows; knows tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

T = TypeVar("T")
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)


def random_rows(model: PreTrainedModel, *shape: int) -> Tensor:
    """The same numbers each time, in the model's type and place."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(model.device, model.dtype)


@torch.inference_mode()
def agree(run: Callable[[T], Tensor], original: T, stand_in: T, *, also: tuple[type[Exception], ...] = ()) -> bool:
    """Whether both give the same but for rounding; one that cannot run does not. `also`: how else that may show."""
    faults: tuple[type[Exception], ...] = (*_FAULTS, *also)
    try:
        want, got = run(original), run(stand_in)
    except faults:
        return False
    if want.dtype != got.dtype:
        return False
    # A row as a whole: where numbers are rounded coarsely, one of thousands is always far off.
    off = (got - want).float().square().mean(-1).sqrt().max()
    return bool(off <= (1e-4 if want.dtype == torch.float32 else 0.03) * want.float().std())
