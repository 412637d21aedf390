"""The metadata and small tables of one file, by the keys of its architecture.

Rotary embeddings are returned as parameters of transformers' configs.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError, shown
from pilotfish.engine.model.gguf.blocks import dequantised, raw_of
from pilotfish.engine.model.gguf.container import Container, meant

MOST_LAYERS = 512  # four times those of the deepest published models; each is built before weights are read
EPSILON = "attention.layer_norm_epsilon"  # of LayerNorms
_LARGEST = (1 << 31) - 1  # maximum integer: kernels use 32 bits
_LONG, _SHORT, _FREQUENCIES = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
TABLES = (_LONG, _SHORT, _FREQUENCIES)  # tensors that are not weights
_TIED = 1e-5  # relative error of float32 tables that were computed in two ways


class Keys:
    """The metadata of a file whose keys begin with its architecture."""

    def __init__(self, container: Container) -> None:
        self.container, self.architecture = container, container.need("general.architecture", str)
        self._largest = max((size for tensor in container.tensors.values() for size in tensor.shape), default=1)

    def full(self, key: str) -> str:
        """The full key, with the architecture's prefix."""
        return f"{self.architecture}.{key}"

    def need(self, key: str, least: int = 1, most: int = _LARGEST) -> int:
        """A required integer. Raises ModelError if it is missing, or not from `least` to `most`."""
        self.container.need(self.full(key), int)
        return cast("int", self.integer(key, least=least, most=most))

    def size(self, key: str) -> int:
        """As `need`, for a number of inputs or outputs, which cannot exceed the largest tensor of the file."""
        return self.need(key, most=self._largest)

    def needs_real(self, key: str) -> float:
        """As `need`, for a real number."""
        self.container.need(self.full(key), float)
        return cast("float", self.real(key))

    def real(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or `default`. Raises ModelError if it is not positive, or not finite."""
        found = self.container.get(self.full(key), float)
        if found is not None and not 0 < found < math.inf:
            raise self.fault(key, found, "a positive number")
        return default if found is None else found

    def epsilon(self, key: str) -> float:
        """The epsilon of norms. Raises ModelError if it is missing, or not between 0 and 1."""
        found = self.needs_real(key)
        if found >= 1:
            raise self.fault(key, found, "a number between 0 and 1")
        return found

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int | None:
        """An integer from `least` to `most`; `default` if it is missing."""
        found = self.container.get(self.full(key), int)
        if found is not None and not least <= found <= most:
            raise self.fault(key, found, f"{least} to {most}")
        return default if found is None else found

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean; `default` if it is missing."""
        return default if (found := self.container.get(self.full(key), bool)) is None else found

    def of_layers(self, key: str) -> list[int]:
        """A number per layer; a file may have one for all.

        Raises:
            ModelError: the numbers of values and layers differ, or values are not all 0 or one positive number.
        """
        blocks, several = self.blocks, self.container.metadata.get(self.full(key))
        if not isinstance(several, np.ndarray):
            return [self.size(key)] * blocks
        found = several.tolist() if len(several) == blocks else []
        if not all(type(number) is int for number in found) or len({number for number in found if number}) != 1:
            raise self.fault(key, several[:16].tolist(), f"{blocks} values, each 0 or one common number")
        return found

    def refuse(self, key: str, why: str) -> None:
        """Raise ModelError if a number of the metadata is present and not 0."""
        found = self.container.metadata.get(self.full(key))
        if len(found) if isinstance(found, np.ndarray) else found:
            raise ModelError(f"{self.container.path}: {self.full(key)} is set; {why}")

    def fault(self, key: str, found: object, expected: str) -> ModelError:
        """The error for an invalid value."""
        return ModelError(f"{self.container.path}: {self.full(key)} is {shown(found)}; expected {expected}")

    def check_width(self, key: str, width: int) -> None:
        """Refuse rows longer than any in the file: index tables of this size are allocated before rows are read."""
        if width > self._largest:
            raise self.fault(key, self.need(key), f"a value that gives rows of at most {self._largest}")

    def has(self, name: str) -> bool:
        return name in self.container.tensors

    @property
    def blocks(self) -> int:
        """Layers, including MTP layers."""
        return self.need("block_count", most=MOST_LAYERS)

    @property
    def layers(self) -> int:
        """Layers, without the MTP layers after them."""
        return self.blocks - (self.integer("nextn_predict_layers", least=0, most=self.blocks - 1) or 0)

    @property
    def heads(self) -> int:
        return self.size("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """K/V heads of attention layers. Raises ModelError if layers differ, or heads is not a multiple of it."""
        key = "attention.head_count_kv"
        if self.full(key) not in self.container.metadata:
            return self.heads
        found = max(self.of_layers(key))
        if not 1 <= found <= self.heads or self.heads % found:
            raise self.fault(key, found, f"a divisor of {self.heads} heads")
        return found

    @property
    def head_dim(self) -> int:
        key = "attention.key_length"
        if self.full(key) in self.container.metadata:
            found = self.size(key)
        else:
            key, found = "attention.head_count", self.size("embedding_length") // self.heads
        if not found or found % 2:
            raise self.fault(key, self.need(key), "a value that gives an even head size")
        return found

    @property
    def rotated(self) -> int:
        """Rotated dimensions of a head."""
        key = "rope.dimension_count"
        found = cast("int", self.integer(key, self.head_dim, most=self.head_dim))
        if found % 2:
            raise self.fault(key, found, "an even number")
        return found

    def table(self, name: str) -> Tensor | None:
        """A positive float per rotated pair; None if the file has no such table.

        Raises:
            ModelError: the table has another length, or invalid values.
        """
        tensor = self.container.tensors.get(name)
        if tensor is None:
            return None
        wanted = (self.rotated // 2,)
        found = dequantised(tensor.kind, raw_of(tensor)).float() if tensor.shape == wanted else None
        if found is None or not (found.isfinite() & (found > 0)).all():
            has = f"has shape {list(tensor.shape)}" if found is None else "has other values"
            raise ModelError(f"{self.container.path}: {name} {has}; expected {wanted[0]} positive numbers")
        return found


def rope_of(keys: Keys) -> dict[str, Any]:
    """The rotary embedding with its scaling. Raises ModelError for an unknown scaling."""
    plain = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10_000.0)}
    kind, key = keys.container.get(keys.full("rope.scaling.type"), str), "rope.scaling.factor"
    found = keys.container.get(keys.full(key), float)
    factor = keys.real("rope.scale_linear") if found == 0 else keys.real(key) or keys.real("rope.scale_linear")
    if kind in (None, "none") and factor in (None, 1.0):
        return plain
    if kind in ("linear", "yarn") and factor is None:
        raise keys.fault(key, found, f"a positive number, because rope.scaling.type is {kind}")
    if kind in (None, "linear"):
        return plain | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.need("rope.scaling.original_context_length")
        return plain | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind in ("longrope", "su"):  # its tables are tensors: `with_tables`
        return plain
    raise keys.fault("rope.scaling.type", kind, "none, linear, yarn or longrope")


def llama3(keys: Keys) -> dict[str, Any] | None:
    """Llama 3's rotary embedding, from the frequency divisors in the file; None without them.

    All published Llamas have the bounds 1 and 4 and an original length of 8,192 tokens; for others any power of two
    with the same table is equivalent.

    Raises:
        ModelError: the table is not of this kind.
    """
    factors = keys.table(_FREQUENCIES)
    if factors is None:
        return None
    theta, half = keys.real("rope.freq_base", 10_000.0), torch.arange(len(factors), dtype=torch.float64) / len(factors)
    assert theta is not None
    waves = 2 * math.pi * theta**half
    factor = float(factors.max())
    found = {"rope_type": "llama3", "rope_theta": theta, "factor": factor}
    low, high = 1.0, 4.0
    for original in (2**bits for bits in (13, 11, 12, 14, 15, 16, 17)):
        smooth = (original / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        wanted = torch.where(waves < original / high, 1.0, torch.where(waves > original / low, factors.max(), between))
        if torch.allclose(wanted.float(), factors, rtol=_TIED, atol=0):
            bounds = {"low_freq_factor": low, "high_freq_factor": high}
            return found | bounds | {"original_max_position_embeddings": original}
    raise ModelError(f"{keys.container.path}: {_FREQUENCIES} is not a Llama 3 frequency table, which is required")


def longrope(keys: Keys) -> dict[str, Any] | None:
    """Phi's rotary embedding with two tables of divisors, for short and long texts; None without them."""
    long, short = keys.table(_LONG), keys.table(_SHORT)
    if long is None or short is None:
        return None
    rope = rope_of(keys) | {"rope_type": "longrope", "long_factor": _decimals(long), "short_factor": _decimals(short)}
    rope["original_max_position_embeddings"] = keys.need("rope.scaling.original_context_length")
    factor = keys.real("rope.scaling.attn_factor")
    return rope if factor is None else rope | {"attention_factor": factor}


def partly(keys: Keys, rope: dict[str, Any]) -> dict[str, Any]:
    """A rotary embedding of the first numbers of each head."""
    keys.need("rope.dimension_count")
    return rope | {"partial_rotary_factor": keys.rotated / keys.head_dim}


def _decimals(table: Tensor) -> list[float]:
    return list(map(meant, table.tolist()))
