"""What kernels would have done, where a stand-in for the driver runs nothing: an engine goes on with right numbers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine import kernels
from pilotfish.engine.attention import reference as by_sequence
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.paging import Paging
from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.sampling.distribution import choose

_PLAIN = {"args", "paging", "reference"}  # modules without kernels


def modules() -> list[ModuleType]:
    """All that hold kernels."""
    found = [info.name for info in pkgutil.iter_modules(kernels.__path__) if info.name not in _PLAIN]
    return [importlib.import_module(f"pilotfish.engine.kernels.{name}") for name in found]


def install() -> None:
    """Have each launcher that has a meaning launch, and then give what it means."""
    for module in modules():
        for name, launcher in inspect.getmembers(module, inspect.isfunction):
            meaning = attend if name == "attend" else _meaning_of(name)
            if meaning is not None and launcher.__module__ == module.__name__:
                setattr(module, name, _both(launcher, meaning))


def _meaning_of(name: str) -> Callable[..., Any] | None:
    return choose if name == "choose" else getattr(reference, name, None)


def _both(launcher: Callable[..., Any], meaning: Callable[..., Any]) -> Callable[..., Any]:
    """Options of speed alone are not told to what does without."""
    known = inspect.signature(meaning).parameters

    @wraps(launcher)
    def both(*args: Any, **options: Any) -> Any:
        launcher(*args, **options)
        return meaning(*args, **{name: value for name, value in options.items() if name in known})

    return both


def attend(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `engine.kernels.reference.attend`, a sequence at a time: quick with thousands of keys for hundreds of rows."""
    out = query.new_zeros(*query.shape[:2], v.shape[2])
    for first, rows, start, table in paging.spans.tolist():
        mine, kv_len = query[first : first + rows], start + rows
        if kv_len < 1:
            continue  # rows before position 0 see nothing
        positions = torch.arange(start, kv_len)
        nothing = positions[:0]
        batch = RaggedBatch(
            input_ids=nothing, positions=positions, position_ids=nothing, kv_rows=nothing, logit_rows=nothing,
            cu_seqlens=(0, rows), kv_lens=(kv_len,), page_tables=(paging.tables[table].tolist(),),
            page_size=paging.page_size, is_contiguous=(False,),
        )  # fmt: skip
        found = by_sequence.attend(mine, k, v, batch, AttentionSpec(scale, window, chunk, softcap, sinks))
        out[first : first + rows] = torch.where((positions < 0)[:, None, None], 0, found)
    return out
