"""Numbers on the device that the host writes now and then, all that is new in one piece. Knows no sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.paging import send

_ALIGNED = 32  # words: a kernel that finds a tensor at another alignment would be compiled anew
_NUMPY: Mapping[torch.dtype, Any] = {
    torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Home:
    """Where one tensor's numbers are to go, and which they are."""

    tensor: Tensor
    first: int  # word of its first number
    new: dict[int, float] = field(default_factory=dict)  # by place in the flattened tensor


class Slate:
    """Tensors in one stretch of device memory, of 32-bit words.

    `tensor[i] = 5` on CUDA is a copy from memory that is not pinned, for which the host waits until the device has
    done all it has to do. So `write` only notes a number, and `send` brings all that were noted up in one copy and one
    scatter, which take their place behind what was launched before: or does nothing, if nothing was noted.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        starts, end = dict[str, int](), 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = end
            end += -(-_words(dtype, shape) // _ALIGNED) * _ALIGNED
        self._words = torch.zeros(end, dtype=torch.int32, device=device)
        self._homes = dict[str, Home]()
        for name, (dtype, shape) in shapes.items():
            mine = self._words[starts[name] : starts[name] + _words(dtype, shape)]
            self._homes[name] = Home(mine.view(dtype).view(shape), starts[name])

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, as the device has it."""
        return self._homes[name].tensor

    def write(self, name: str, first: int, *numbers: float) -> None:
        """Note numbers for places from `first` on of a tensor that is thought of as flat; the last one noted counts."""
        self._homes[name].new.update(enumerate(numbers, first))

    def send(self) -> None:
        """Bring up what was noted."""
        homes = [home for home in self._homes.values() if home.new]
        if not homes:
            return
        at = np.concatenate([_places(home) for home in homes])
        numbers = [np.array(list(home.new.values()), _NUMPY[home.tensor.dtype]).view(np.int32) for home in homes]
        packed = send(torch.from_numpy(np.concatenate([at.view(np.int32), *numbers])), self._words.device)
        self._words.index_copy_(0, packed[: 2 * len(at)].view(torch.int64), packed[2 * len(at) :])
        for home in homes:
            home.new.clear()


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dtype.itemsize // 4


def _places(home: Home) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The words of its new numbers: places 3 and 5 of 64-bit numbers from word 10 on -> 16, 17, 20, 21."""
    width = home.tensor.dtype.itemsize // 4
    first = home.first + width * np.array(list(home.new), np.int64)
    return (first[:, None] + np.arange(width)).ravel()
