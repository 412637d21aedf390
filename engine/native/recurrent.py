"""Layers that keep a state per sequence, in C (`recurrent.c`). Knows tensors and addresses only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from functools import cache

from torch import Tensor

from engine.machine.threads import pool_threads
from engine.native.attention import BITS
from engine.native.compiled import function, library

RULES = ("delta", "mamba1", "conv")  # in the order of recurrent.c


class _Plan(ctypes.Structure):
    _fields_ = (
        ("sequences", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rows", "read", "first", "writes")),
    )


class _Scan(ctypes.Structure):
    _fields_ = (
        ("plan", _Plan),
        ("states", ctypes.c_void_p),
        ("x", ctypes.c_void_p * 6),
        *((name, ctypes.c_void_p) for name in ("a", "d", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "width", "depth", "blocks")),
        *((name, ctypes.c_int) for name in ("bits", "wide", "corrects")),
    )


@cache
def most_keys() -> int:
    """The largest `depth` that C takes; 0 where there is no compiled code."""
    native = library()
    return 0 if native is None else int(native.pilotfish_most_keys())


def scans(x: Tensor, depth: int) -> bool:
    """Whether C runs rules over rows of this type and device, with states of this depth."""
    return x.is_cpu and x.dtype in BITS and 0 < depth <= most_keys()


def scan(
    rule: str,
    states: Tensor,
    rows: Seq[Tensor],
    slots: Tensor,
    num_sequences: int,
    *,
    a: Tensor | None = None,
    d: Tensor | None = None,
    out: Tensor,
    heads: int = 1,
    groups: int = 1,
    width: int,
    depth: int,
    wide: bool = False,
    corrects: bool = False,
) -> Tensor:
    """Run a rule over the rows of all sequences; return `out`.

    Args:
        rule: one of `RULES`.
        states: the arena of states, dense.
        rows: the inputs `[S, ...]`, in the order of recurrent.c; those of one type are dense rows.
        slots: int64, `[B + 1]` first rows, `[B]` slots to read, `[B + 1]` first writes, then pairs of (rows, slot).
        num_sequences: B.
        a: float32, what does not depend on rows: decays, or a kernel.
        d: float32, what is added to the result: per head, or per number.
        out: `[S, ...]`, dense, in the type of `rows[0]`.
        heads: of the rule.
        groups: of heads that share keys and queries.
        width: numbers of a head that come out.
        depth: numbers of the state for each of them.
        wide: for `delta`, a decay for each number of a key; for `conv`, silu.
        corrects: whether `delta` is a delta rule; else it adds what it is fed, as Mamba 2 does.
    """
    held = [states, *(x if x.is_contiguous() else x.contiguous() for x in rows), out]
    held += [x.contiguous() for x in (a, d) if x is not None]
    assert all(x.is_contiguous() for x in (states, out)), "rows lie apart"
    b, at = num_sequences, slots.data_ptr()
    step = slots.element_size()
    plan = _Plan(b, at, at + step * (b + 1), at + step * (2 * b + 1), at + step * (3 * b + 2))
    inputs = (ctypes.c_void_p * 6)(*(x.data_ptr() for x in held[1 : 1 + len(rows)]))
    told = iter(held[2 + len(rows) :])
    made = _Scan(
        plan, states.data_ptr(), inputs,
        None if a is None else next(told).data_ptr(), None if d is None else next(told).data_ptr(), out.data_ptr(),
        heads, groups, width, depth, 0, BITS[rows[0].dtype], int(wide), int(corrects),
    )  # fmt: skip
    call = function("scan", (ctypes.c_void_p, ctypes.c_int, ctypes.c_int))
    call(ctypes.addressof(made), RULES.index(rule), pool_threads())
    return out
