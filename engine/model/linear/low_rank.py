"""The products of low-rank adapters, scale * B (A x), added to the rows of a matmul that have an adapter.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. The module of a matmul is
unchanged: a hook changes only the rows of its result that have an adapter, so all others keep their bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.native import ALIGNED, PackedMatrix, multiplies

RowIndex = slice | Tensor  # of a pass: a range, or indices


class LowRankProduct:
    """The product scale * B (A x) of one adapter and one matmul.

    On a CPU it is in float32, and a row has the same bits in any batch: our C sums in the order of the inputs, and
    torch multiplies one row at a time. On CUDA it is in the model's type.
    """

    def __init__(self, a: Tensor, b: Tensor, *, row_wise: bool) -> None:
        """Take `a` `[rank, in]` and `b` `[out, rank]`, which includes the scale; both on the model's device.

        `row_wise`: a row's bits must not depend on the number of rows.
        """
        self._row_wise = row_wise
        self._packed: tuple[PackedMatrix, PackedMatrix] | None = None
        self._plain = a, b
        if a.is_cpu and multiplies(torch.float32) and not a.shape[1] % ALIGNED:
            spare = -len(a) % ALIGNED  # zeros, which add nothing
            padded = F.pad(a, (0, 0, 0, spare)).contiguous(), F.pad(b, (0, spare)).contiguous()
            self._packed, self._plain = (PackedMatrix.of(padded[0]), PackedMatrix.of(padded[1])), (a[:0], b[:0])
        self._dtype = a.dtype

    def of(self, rows: Tensor) -> Tensor:
        """Multiply rows `[M, in]` of any float type -> `[M, out]`."""
        wide = rows.to(self._dtype).contiguous()
        if self._packed is not None:
            down, up = self._packed
            return up.multiply(down.multiply(wide, None, self._dtype), None, self._dtype)
        a, b = self._plain
        if self._row_wise:
            return torch.stack([b @ (a @ row.clone()) for row in wide])  # cloned, for a constant alignment
        return wide @ a.t() @ b.t()


Products = Mapping[nn.Module, LowRankProduct]  # of an adapter, by matmul


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of one pass that have an adapter.

    Three feeds of 2, 3 and 1 tokens with 1, 0 and 1 logits; the first and the last have adapters X and Y:

        tokens  X: 0..1, Y: 5..5, of 6 rows
        logits  X: 0..0, Y: 1..1, of 2 rows
    """

    tokens: Seq[tuple[Products, RowIndex]]
    num_tokens: int
    logits: Seq[tuple[Products, RowIndex]]  # of the output matrix, which gets the rows with logits
    num_logits: int
    calls: Counter[nn.Module] = field(default_factory=Counter)  # matmuls with a hook that has run

    def check(self) -> None:
        """Check after the pass that every matmul ran as a module, so that its hook could add to its result.

        Raises:
            ValueError: one did not, so a part of an adapter is missing in the result.
        """
        adapters = (products for products, _ in (*self.tokens, *self.logits))
        missing = [matmul for products in adapters for matmul in products if not self.calls[matmul]]
        if missing:
            raise ValueError(f"{len(missing)} layers with an adapter were not called as modules, e.g. {missing[0]}")


class AdapterHook:
    """The hook of one matmul: adds the products of the current pass's adapters to its result."""

    def __init__(self, current: Callable[[], PassRows | None], matmul: nn.Module, *, is_head: bool) -> None:
        """`current` returns the rows of the current pass; None if no row has an adapter."""
        self._current, self._is_head = current, is_head
        matmul.register_forward_hook(self)

    def __call__(self, matmul: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Called by torch after the matmul."""
        self.add_to(matmul, lambda: inputs[0], output)

    def add_to(self, matmul: nn.Module, inputs: Callable[[], Tensor], output: Tensor) -> None:
        """Add to `output` `[..., out]`, in place; `inputs` returns the matmul's input rows.

        Raises:
            ValueError: the matmul does not get every row of the pass, so the adapters of its rows are unknown.
        """
        rows = self._current()
        if rows is None:
            return
        rows.calls[matmul] += 1
        groups, count = (rows.logits, rows.num_logits) if self._is_head else (rows.tokens, rows.num_tokens)
        groups = [group for group in groups if matmul in group[0]]
        flat = output.view(-1, output.shape[-1])
        if not groups or not len(flat):
            return
        given = inputs()
        given = given.reshape(-1, given.shape[-1])
        if len(given) != count:
            raise ValueError(f"a layer with an adapter was called with {len(given)} rows; the pass has {count}")
        for products, where in groups:
            flat[where] = (flat[where] + products[matmul].of(given[where])).to(flat.dtype)


def add_products(matmul: nn.Module, inputs: Callable[[], Tensor], output: Tensor) -> None:
    """Add the adapters of `matmul`, for code that computes its result without calling `forward`.

    `inputs` returns its input rows; it is called only if a row has an adapter.
    """
    for hook in matmul._forward_hooks.values():  # noqa: SLF001 - torch has no other name for them
        if isinstance(hook, AdapterHook):
            hook.add_to(matmul, inputs, output)


def block_diagonal(parts: Seq[tuple[int, Tensor, Tensor]], outputs: int) -> tuple[Tensor, Tensor]:
    """Join the adapters of joined matmuls; each entry: the first output in the joined matmul, A and B.

    [(0, A1 [r1, in], B1 [o1, r1]), (o1, A2, B2)] -> A `[r1 + r2, in]` and B `[outputs, r1 + r2]`, which is zero where
    an output is not of a part's.
    """
    a = torch.cat([part for _, part, _ in parts])
    b = torch.zeros(outputs, len(a), dtype=a.dtype)
    rank = 0
    for start, down, up in parts:
        b[start : start + len(up), rank : rank + len(down)] = up
        rank += len(down)
    return a, b


def grouped(spans: Seq[tuple[Products, range]], device: torch.device) -> list[tuple[Products, RowIndex]]:
    """Group rows by adapter: X 0..1, Y 2..2, X 3..4 -> X [0, 1, 3, 4], Y 2..2."""
    by_adapter: dict[int, tuple[Products, list[range]]] = {}
    for products, span in spans:
        if len(span):
            by_adapter.setdefault(id(products), (products, []))[1].append(span)
    return [(products, _rows(found, device)) for products, found in by_adapter.values()]


def _rows(spans: list[range], device: torch.device) -> RowIndex:
    if len(spans) == 1:
        return slice(spans[0].start, spans[0].stop)
    return torch.tensor([row for span in spans for row in span], dtype=torch.int64, device=device)
