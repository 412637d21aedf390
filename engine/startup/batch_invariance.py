"""Tests batch invariance at load, for a model that will run in fixed-shape passes (`engine.model.fixed_shape`).

A tile fixes every shape. A row's bits can still depend on its place in the tile, on its neighbours and on the number of
threads, and no library promises that they do not. So the model's matmuls are tested, one shape at a time, and then the
whole model. Every result is compared with a run on one thread, so that a later start with more threads gives the same
bits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.attention import choose
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed
from engine.machine.threads import exactly
from engine.model.fixed_shape import TILE, FixedShapeRunner
from engine.model.linear.experts import RoutedExperts
from engine.model.runner import ModelRunner
from engine.recurrent.states import StateArena

if TYPE_CHECKING:
    from engine.model.decoder.decoder import Model

log = logging.getLogger(__name__)

_SHIFTS = (1, 6, TILE - 5)


class RowByRow(nn.Module):
    """A matmul that computes one row at a time: slow, but its rows are always independent."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        """The matrix of the inner matmul, for callers that need its size."""
        found = self.inner.weight
        assert isinstance(found, Tensor)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """`[..., rows, in]` -> `[..., rows, out]`; each row is copied, so that all are aligned alike."""
        return torch.cat([self.inner(row.clone()) for row in x.split(1, -2)], -2)


@torch.inference_mode()
def ensure_batch_invariance(model: Model, layout: KVLayout) -> None:
    """Ensure that a row's bits depend only on its own context; matmuls that need it are computed row by row.

    Raises:
        ModelError: the bits still depend on something else.
    """
    with exactly(torch.get_num_threads()):  # instead of the number of threads that is fastest
        _hold_bits(model, layout)


def _hold_bits(model: Model, layout: KVLayout) -> None:
    _take_experts_row_by_row(model)
    sound: dict[str, bool] = {}
    for name, module in list(model.named_modules()):
        if isinstance(model.get_submodule(name.rpartition(".")[0]), RowByRow):
            continue  # an earlier engine of this model has replaced it
        if isinstance(module, nn.Linear):
            shape = shape_of(module)
            if shape not in sound:
                sound[shape] = is_independent(module)
            if not sound[shape]:
                _replace(model, name, _row_by_row(name, module, shape))
                log.warning("reproducible: %s (%s) is computed row by row", name, shape)
    _check_whole(model, layout)


def _take_experts_row_by_row(model: Model) -> None:
    """Give each row of a mixture products of its own: no tile fixes how many rows meet an expert.

    Raises:
        ModelError: a row's bits still depend on its place.
    """
    shapes: set[str] = set()
    for name, experts in [(name, m) for name, m in model.named_modules() if isinstance(m, RoutedExperts)]:
        for matmuls in (experts.ups, experts.downs):
            for index, matmul in enumerate(matmuls):
                if isinstance(matmul, nn.Linear):  # else it is in int8, or an earlier engine of this model replaced it
                    shape = shape_of(matmul)
                    matmuls[index] = RowByRow(matmul) if shape in shapes else _row_by_row(name, matmul, shape)
                    shapes.add(shape)


def shape_of(module: nn.Module) -> str:
    """Describe a matmul by the properties that decide which kernel runs it."""
    assert isinstance(module.weight, Tensor)
    size = " x ".join(map(str, module.weight.shape))
    bias = " with bias" if isinstance(module.bias, Tensor) else ""
    return f"{type(module).__name__} {size} {str(module.weight.dtype).removeprefix('torch.')}{bias}"


def is_independent(matmul: nn.Module) -> bool:
    """Whether a row gets the same bits at every place of a tile, beside any rows, with one thread and with all."""
    assert isinstance(matmul.weight, Tensor)
    weight, generator = matmul.weight, torch.Generator().manual_seed(0)
    width = weight.shape[1]
    mine, others = torch.randn(2, 1, TILE, width, generator=generator).to(weight)
    with exactly(1):
        want = matmul(mine)[0]
    moved = [matmul(mine.roll(shift, 1))[0].roll(-shift, 0) for shift in (0, *_SHIFTS)]
    everywhere = matmul(mine[:, :1].repeat(1, TILE, 1))[0]
    beside_others = matmul(torch.cat([mine[:, : TILE // 2], others[:, TILE // 2 :]], 1))[0]
    return (
        all(torch.equal(out, want) for out in moved)
        and torch.equal(everywhere, want[:1].expand_as(want))
        and torch.equal(beside_others[: TILE // 2], want[: TILE // 2])
    )


def _row_by_row(name: str, module: nn.Module, shape: str) -> RowByRow:
    slow = RowByRow(module)
    if not is_independent(slow):
        raise ModelError(f"reproducible: {name} ({shape}) gives a row other bits beside other rows, or on more threads")
    return slow


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _check_whole(model: Model, layout: KVLayout) -> None:
    """Test the whole model: the logits of one sequence must have the same bits wherever it is in its tiles.

    This covers norms, activations, attention, routers and heads.
    """
    arena = KVArena(layout, num_pages=TILE, page_size=TILE, device=model.device, spare_rows=TILE)
    attend = choose("fixed", model.device)
    inner = ModelRunner(model, arena, attend, states=StateArena.of(model, TILE + 2, TILE, model.device))
    runner = FixedShapeRunner(inner, scratch=TILE, scratch_state=TILE + 1)
    tokens = [(7 * i + 3) % runner.vocab_size for i in range(2 * TILE)]
    mine, other = tokens[:TILE], tokens[TILE:]
    with exactly(1):
        want = runner.forward([Feed.begun(mine, 0, TILE)])
    _check_equal(model, runner.forward([Feed.begun(mine, 0, TILE)]), want, "the number of threads")
    for shift in _SHIFTS:
        got = runner.forward([Feed.begun(other[:shift], 1, 0), Feed.begun(mine, 0, TILE)])
        _check_equal(model, got, want, "its neighbours in a tile")
    everywhere = runner.forward([Feed.begun(mine[:1], page, 1) for page in range(TILE)])
    _check_equal(model, everywhere, want[:1].expand_as(everywhere), "its place in a tile")


def _check_equal(model: Model, got: Tensor, want: Tensor, on_what: str) -> None:
    if not torch.equal(got, want):
        raise ModelError(
            f"reproducible: in {type(model).__name__} ({model.dtype}, {torch.get_num_threads()} threads) a row's bits "
            f"depend on {on_what}; fewer threads or another dtype may help"
        )
