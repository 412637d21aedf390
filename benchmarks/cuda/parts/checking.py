"""Checks of kernels, and the table of their largest differences from what was wanted."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cuda.card import Card
from benchmarks.cuda.report import PartReport


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One row of a table."""

    kernel: str
    dtype: str
    shape: str
    most: float  # maximum difference
    differs: Callable[[], float]


class KernelMismatch(Exception):
    """Unexpected: a kernel's result differs from its reference, or the kernel fails."""


def run_checks(checks: Iterable[KernelCheck], section: PartReport) -> None:
    """Run all checks even if one fails, then raise KernelMismatch if any result was wrong."""
    section.table("kernel", "type", "shape", "largest difference", "allowed", "")
    wrong, count = list[str](), 0
    for check in checks:
        name = f"{check.kernel} {check.dtype} {check.shape}"
        try:
            found = check.differs()
        except Exception as error:  # noqa: BLE001 - reported in its row; the other kernels are still checked
            print(traceback.format_exc(), flush=True)
            cells, is_right = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
        else:
            cells, is_right = f"{found:.2g}", found <= check.most
            section.number(name, difference=found)
        count += 1
        wrong += [] if is_right else [name]
        section.row(check.kernel, check.dtype, check.shape, cells, check.most, "" if is_right else "**wrong**")
    section.say(f"{count - len(wrong)} of {count} are correct.")
    if wrong:
        raise KernelMismatch("; ".join(wrong))


def types_on(card: Card) -> tuple[torch.dtype, ...]:
    """Return the types, most important first; the interpreter has no bfloat16."""
    return (torch.bfloat16, torch.float32, torch.float16) if card.is_cuda else (torch.float32,)


def largest_difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference; a NaN counts as infinite."""
    difference = (got.float() - want.float()).abs().nan_to_num(nan=float("inf"))
    return float(difference.max())


def relative_to_largest(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return largest_difference(got, want) / float(want.abs().max())
