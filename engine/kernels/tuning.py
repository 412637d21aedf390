"""How the attention kernel is cut for a card: blocks, warps, buffers. Knows numbers; knows no Triton and no tensor.

`tuning.json` beside this file holds what a sweep on a card found best; what is not in it has defaults, which were
chosen by what the compiler says of registers and shared memory (docs/adr/0020-triton-kernels.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import torch


@dataclass(frozen=True, slots=True)
class Tuning:
    """What changes the speed of attention; of its results at most the last bits, the same for every batch."""

    block_n: int  # keys that a program takes at a time, a power of two
    num_warps: int
    num_stages: int = 3  # 3 keeps two blocks of K and of V in shared memory: one is loaded while the other is worked on
    programs: int = 528  # wanted at least, if sequences are long: four for each multiprocessor of a large card

    def over_codes(self) -> Tuning:
        """The same for int8 K/V, whose codes become floats in registers: of larger blocks they would spill."""
        return replace(self, block_n=min(self.block_n, 32))


def tuning_for(dtype: torch.dtype, group: int, dim: int, prompt: bool) -> Tuning:
    """What a sweep found for this card, or the default; `group` query heads to a K/V head, `prompt` for large tiles."""
    found = _recorded().get(key_of(_capability(), dtype, group, dim, prompt))
    return found or default_for(dtype, group, dim, prompt)


def key_of(capability: str, dtype: torch.dtype, group: int, dim: int, prompt: bool) -> str:
    """9.0, bfloat16, 4, 128, False -> 9.0/bfloat16/4/128/decode."""
    return f"{capability}/{str(dtype).removeprefix('torch.')}/{group}/{dim}/{'prompt' if prompt else 'decode'}"


def default_for(dtype: torch.dtype, group: int, dim: int, prompt: bool) -> Tuning:
    """The widest of which nothing is spilled and, for decoding, two programs fit on a multiprocessor."""
    if dtype.itemsize > 2:
        return Tuning(16, 8)
    if dim > 256:
        return Tuning(16, 8)
    is_large = group > 4 and not prompt  # decoding in tiles of 64 rows, on four warps
    return Tuning(32 if dim > 128 or is_large else 64, 8 if dim > 128 or prompt else 4)


@lru_cache
def _capability() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.get_device_capability()))


@lru_cache
def _recorded() -> dict[str, Tuning]:
    text = (resources.files("engine.kernels") / "tuning.json").read_text("utf-8")
    return {key: Tuning(**fields) for key, fields in json.loads(text).items()}
