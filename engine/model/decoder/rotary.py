"""Rotary frequencies from the parameters of a config.

Su et al. 2021 (RoFormer, arXiv 2104.09864); scaled: linear (Chen et al. 2023, arXiv 2306.15595), YaRN (Peng et al.
2023, arXiv 2309.00071, section 3), longrope and Llama 3's. Floats are bitwise equal to those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import TABLE_MARK

_Parameters = Mapping[str, Any]
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """The rotary positions of some layers.

    Attributes:
        frequencies: float32, one per rotated pair.
        scaling: factor of cos and sin of rotated pairs.
        still: number of pairs of a head without rotation.
        long: longrope's frequencies for sequences beyond the original training length.
    """

    frequencies: tuple[float, ...]
    scaling: float = 1.0
    still: int = 0
    long: tuple[float, ...] | None = None

    @classmethod
    def of(cls, parameters: _Parameters, dim: int, turned: int | None = None) -> RotaryTable:
        """The rotary positions of heads of size `dim`, of which `turned` are rotated; default: as in the parameters.

        Raises:
            ModelError: the type of scaling is not supported, or a parameter is missing.
        """
        kind = parameters.get("rope_type", "default")
        if kind not in _SCALED:
            raise ModelError(f"rope_type is {kind!r}; supported: {', '.join(sorted(_SCALED))}")
        share = 1.0 if kind == "proportional" else parameters.get("partial_rotary_factor", 1.0)
        turned = int(dim * share) if turned is None else turned
        if turned % 2 or dim % 2:
            raise ModelError(f"{turned} of {dim} dimensions of a head are rotated; expected even numbers")
        try:
            frequencies, scaling = _SCALED[kind](parameters, _plain(parameters["rope_theta"], turned))
            long = tuple(_extended(parameters, "long_factor", turned).tolist()) if kind == "longrope" else None
        except KeyError as error:
            raise ModelError(f"rope_parameters of rope_type {kind!r} have no {error.args[0]}") from error
        return cls(tuple(frequencies.tolist()), scaling, (dim - turned) // 2, long)

    @classmethod
    def none(cls, dim: int) -> RotaryTable:
        """The table of a layer without rotary positions."""
        return cls((), still=dim // 2)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + factor * log(1 + floor((position + shift) / span)) (arXiv 2501.19399)."""

    factor: float
    span: float
    shift: int = 0

    def of(self, positions: Tensor) -> Tensor:
        """`[T]` -> float32 `[T]`."""
        return torch.log1p(torch.floor((positions.float() + self.shift) / self.span)) * self.factor + 1.0


class Rotation(nn.Module):
    """cos and sin of a table's positions; its frequencies are on the model's device."""

    frequencies: Tensor  # [n], or [2, n] with long frequencies

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.table = table
        both = table.frequencies if table.long is None else (table.frequencies, table.long)
        self.register_buffer("frequencies", torch.tensor(both), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[1, T, head_dim]` each, of marked positions `[T]` (`kv.batch`); both halves of a head are equal."""
        table, frequencies = self.table, self.frequencies
        if table.long is not None:
            frequencies, positions = frequencies[positions // TABLE_MARK], positions % TABLE_MARK
        angles = positions[None, :, None].float() * frequencies
        cos = F.pad(angles.cos() * table.scaling, (0, table.still), value=1.0)
        sin = F.pad(angles.sin() * table.scaling, (0, table.still))
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


class Rotations(nn.ModuleList):
    """cos and sin of each layer's positions; layers with the same table share them."""

    def __init__(self, tables: Seq[RotaryTable]) -> None:
        distinct = [*dict.fromkeys(tables)]
        super().__init__(map(Rotation, distinct))
        self._which = [*map(distinct.index, tables)]

    def of(self, positions: Tensor, dtype: torch.dtype, depth: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of the first `depth` layers, as in `Rotation`."""
        made = [rotation(positions, dtype) for rotation in self]
        return [made[which] for which in self._which[:depth]]


def _plain(theta: float, dim: int) -> Tensor:
    """Frequencies without scaling, `[dim / 2]`."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))


def _linear(parameters: _Parameters, plain: Tensor) -> tuple[Tensor, float]:
    return plain / parameters["factor"], 1.0


def _proportional(parameters: _Parameters, plain: Tensor) -> tuple[Tensor, float]:
    """The slowest pairs are not rotated."""
    count = int(parameters.get("partial_rotary_factor", 1.0) * 2 * len(plain) // 2)
    return torch.cat([plain[:count], torch.zeros(len(plain) - count)]) / parameters.get("factor", 1.0), 1.0


def _llama3(parameters: _Parameters, plain: Tensor) -> tuple[Tensor, float]:
    """Slow frequencies are divided by a factor, fast ones are unchanged, and those between are interpolated."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original, waves = parameters[_ORIGINAL], 2 * math.pi / plain
    smooth = (original / waves - low) / (high - low)
    slow = torch.where(waves > original / low, plain / factor, plain)
    mixed = (1 - smooth) * slow / factor + smooth * slow
    is_between = ~(waves < original / high) * ~(waves > original / low)
    return torch.where(is_between, mixed, slow), 1.0


def _yarn(parameters: _Parameters, plain: Tensor) -> tuple[Tensor, float]:
    """Fast frequencies are unchanged, slow ones are divided by a factor, with a ramp between."""
    dim, theta, factor = 2 * len(plain), parameters["rope_theta"], parameters["factor"]
    original = parameters[_ORIGINAL]
    turns = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    first, last = (dim * math.log(original / (each * 2 * math.pi)) / (2 * math.log(theta)) for each in turns)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    stays = 1 - ((torch.arange(dim // 2, dtype=torch.float) - first) / span).clamp(0, 1)
    waves = theta ** (torch.arange(0, dim, 2).float() / dim)
    return 1.0 / (factor * waves) * (1 - stays) + 1.0 / waves * stays, _of_yarn(parameters, factor)


def _longrope(parameters: _Parameters, plain: Tensor) -> tuple[Tensor, float]:
    """Each frequency has two factors: for short and for long sequences (arXiv 2402.13753)."""
    original, factor = parameters[_ORIGINAL], parameters.get("factor")
    grown = parameters["max_position_embeddings"] / original if factor is None else factor
    asked = parameters.get("attention_factor")
    if asked is None:
        asked = 1.0 if grown <= 1 else math.sqrt(1 + math.log(grown) / math.log(original))
    return _extended(parameters, "short_factor", 2 * len(plain)), asked


def _extended(parameters: _Parameters, name: str, dim: int) -> Tensor:
    steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    made: Tensor = 1.0 / (torch.tensor(parameters[name], dtype=torch.float) * parameters["rope_theta"] ** steps)
    return made


def _of_yarn(parameters: _Parameters, factor: float) -> float:
    """The factor of cos and sin, the square root of the factor of attention scores."""

    def growth(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    asked, own, of_all = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if asked is not None:
        return float(asked)
    return growth(own) / growth(of_all) if own and of_all else growth(1.0)


_SCALED: dict[str, Callable[[_Parameters, Tensor], tuple[Tensor, float]]] = {
    "default": lambda _, plain: (plain, 1.0),
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
