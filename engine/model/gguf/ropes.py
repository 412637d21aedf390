"""Rotary embeddings as metadata and tables of GGUF files describe them, as the parameters of transformers' configs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.gguf.header import meant
from engine.model.gguf.keys import Keys

_LONG, _SHORT, _FREQUENCIES = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
TABLES = (_LONG, _SHORT, _FREQUENCIES)  # tensors that are no weights
_TIED = 1e-5  # relative error of float32 tables that were computed in two ways


def rope_of(keys: Keys) -> dict[str, Any]:
    """The rotary embedding, with the scaling that the metadata names.

    Raises:
        ModelError: the scaling is of an unknown type.
    """
    plain = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10_000.0)}
    kind, key = keys.text("rope.scaling.type"), "rope.scaling.factor"
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
    """Llama 3's rotary embedding, from the divisors of its frequencies that files have instead; None without them.

    All published Llamas share the bounds 1 and 4 and a first training at 8,192 tokens; others may have another power of
    two, of which any that gives the same table is as good.

    Raises:
        ModelError: the table is another one.
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
    raise ModelError(f"{keys.container.path}: {_FREQUENCIES} is no table of Llama 3: its frequencies cannot be served")


def longrope(keys: Keys) -> dict[str, Any] | None:
    """Phi's rotary embedding with two tables of divisors, for short and for long texts; None without them."""
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
