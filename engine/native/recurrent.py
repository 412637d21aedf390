"""Layers that keep a state per sequence, in C (`recurrent.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pilotfish.engine.machine.threads import pool_threads
from pilotfish.engine.native.compiled import BITS, fields, function, library

RULES = ("delta", "mamba1", "conv")  # in the order of recurrent.c


class _Scan(ctypes.Structure):
    _fields_ = (
        *fields("n", "sequences"),
        *fields("p", "plan states log"),
        *fields("n", "log_rows log_width"),
        ("x", ctypes.c_void_p * 5),
        *fields("p", "a d out"),
        *fields("n", "heads groups width depth blocks"),
        *fields("i", "bits wide corrects"),
    )


def scans(x: Tensor, depth: int) -> bool:
    """Whether C supports rows of this type and device, with states of this depth."""
    runs = x.is_cpu and x.dtype in BITS and library() is not None
    return runs and 0 < depth <= function("most_keys")()


def scan(
    rule: str, states: Tensor, log: Tensor, plan: Tensor, rows: Seq[Tensor], *, a: Tensor | None = None,
    d: Tensor | None = None, heads: int = 1, groups: int = 1, width: int, depth: int, wide: bool = False,
    corrects: bool = False,
) -> Tensor:  # fmt: skip
    """Run a rule over the rows of all sequences; return `[T, ...]`, in the shape and type of `rows[0]`.

    Args:
        rule: one of `RULES`.
        states: all slots `[slots, ...]`, dense.
        log: of the same slots, `[slots, log_rows, log_width]`, dense, in the type of the states.
        plan: int64 `[B, 8]`, the `SequenceScan` of each sequence.
        rows: the inputs `[T, ...]`, in the order of recurrent.c; those of one type are dense rows.
        a: float32, parameters independent of rows: decays, or a kernel.
        d: float32, added to the result: per head, or per element.
        heads: of the rule.
        groups: of heads that share keys and queries.
        width: output size of a head.
        depth: state size per output element.
        wide: for `delta`, a decay per element of a key; for `conv`, SiLU.
        corrects: whether `delta` is a delta rule; else values are added uncorrected, as in Mamba 2.
    """
    assert all(x.is_contiguous() for x in (states, log, plan)), "rows are not contiguous"
    rows = [x.contiguous() for x in rows]
    a, d = (None if x is None else x.contiguous() for x in (a, d))
    out = torch.empty_like(rows[0])
    made = _Scan(
        len(plan), plan.data_ptr(), states.data_ptr(), log.data_ptr(), *log.shape[1:],
        (ctypes.c_void_p * 5)(*(x.data_ptr() for x in rows)),
        None if a is None else a.data_ptr(), None if d is None else d.data_ptr(), out.data_ptr(),
        heads, groups, width, depth, 0, BITS[rows[0].dtype], int(wide), int(corrects),
    )  # fmt: skip
    function("scan")(ctypes.byref(made), RULES.index(rule), pool_threads())
    return out
