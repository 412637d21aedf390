"""Are a row's bits its own? Asked once, at load, of a model that is to be run in tiles (`engine.model.fixed_shape`).

A tile fixes every shape. What is left is a row's place in the tile, its neighbours and the number of threads, and no
library promises that those change nothing. So activations are taken in pieces that cannot differ, the model's own
matmuls are tried one shape at a time, and then the model as a whole; everything is held against one thread, so that
a later start with more finds the same bits.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, activations
from transformers.pytorch_utils import Conv1D

from engine.attention import choose
from engine.errors import ModelError
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed
from engine.machine.threads import exactly
from engine.model.fixed_shape import TILE, FixedShapeRunner
from engine.model.runner import ModelRunner

log = logging.getLogger(__name__)

_SHIFTS = (1, 6, TILE - 5)
_PIECE = 16384  # torch hands elementwise work of 32,768 numbers to several threads; a multiple of all vector lengths
_VECTOR = 64  # numbers in two registers of the widest kind and the shortest type
_ACTIVATIONS = frozenset(
    found[0] if isinstance(found, tuple) else found for found in dict.values(activations.ACT2CLS)
) | {nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid}


class RowByRow(nn.Module):
    """A matmul that takes one row at a time: slow, and its rows cannot help being independent."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        """The matrix of the matmul within, for those who ask its size."""
        found = self.inner.weight
        assert isinstance(found, Tensor)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """`[..., rows, in]` -> `[..., rows, out]`; each row is copied, so that all are aligned alike."""
        return torch.cat([self.inner(row.clone()) for row in x.split(1, -2)], -2)


class Piecewise(nn.Module):
    """An activation that every number goes through alike.

    torch works on whole vectors and then on what is left at the end of a thread's part, where exp is another
    function and may round otherwise. Here nothing is ever left, and there is one thread.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, any shape."""
        flat = F.pad(x.flatten(), (0, -x.numel() % _VECTOR))
        return torch.cat([self.inner(piece) for piece in flat.split(_PIECE)])[: x.numel()].view(x.shape)


@torch.inference_mode()
def hold_bits(model: PreTrainedModel, layout: KVLayout) -> None:
    """Make sure that a row's bits depend on nothing but its own context, taking matmuls row by row where they must.

    Raises:
        ModelError: they depend on something else all the same.
    """
    with exactly(torch.get_num_threads()):  # not as many as are fastest
        _hold_bits(model, layout)


def _hold_bits(model: PreTrainedModel, layout: KVLayout) -> None:
    _refuse_experts(model)
    sound: dict[str, bool] = {}
    for name, module in list(model.named_modules()):
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Piecewise | RowByRow):
            continue  # taken care of by an earlier engine on this model
        if type(module) in _ACTIVATIONS:
            _replace(model, name, Piecewise(module))
        elif isinstance(module, nn.Linear | Conv1D):
            shape = shape_of(module)
            if shape not in sound:
                sound[shape] = is_independent(module)
            if not sound[shape]:
                _take_row_by_row(model, name, module, shape)
    _check_whole(model, layout)


def _refuse_experts(model: PreTrainedModel) -> None:
    """Stacked matrices: each is used on as many rows as a router sends there, and no tile fixes that shape."""
    for name, weight in model.named_parameters():
        if weight.ndim > 2:
            raise ModelError(
                f"reproducible: {name} has {weight.ndim} dimensions, as of a mixture of experts; how many rows meet "
                "each expert hangs on the batch, and with it their bits"
            )


def shape_of(module: nn.Module) -> str:
    """A matmul's kind: what decides which kernel it gets."""
    assert isinstance(module.weight, Tensor)
    size = " x ".join(map(str, module.weight.shape))
    bias = " with bias" if isinstance(module.bias, Tensor) else ""
    return f"{type(module).__name__} {size} {str(module.weight.dtype).removeprefix('torch.')}{bias}"


def is_independent(matmul: nn.Module) -> bool:
    """Whether a row of a tile gets the same bits at every place, beside any rows, with one thread and with all."""
    assert isinstance(matmul.weight, Tensor)
    weight, generator = matmul.weight, torch.Generator().manual_seed(0)
    inner = matmul.inner if isinstance(matmul, RowByRow) else matmul
    width = weight.shape[0 if isinstance(inner, Conv1D) else 1]
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


def _take_row_by_row(model: PreTrainedModel, name: str, module: nn.Module, shape: str) -> None:
    slow = RowByRow(module)
    if not is_independent(slow):
        raise ModelError(f"reproducible: {name} ({shape}) gives a row other bits beside other rows, or on more threads")
    log.warning("reproducible: %s (%s) is computed row by row", name, shape)
    _replace(model, name, slow)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _check_whole(model: PreTrainedModel, layout: KVLayout) -> None:
    """Norms, activations, attention, routers, heads: the logits of one sequence wherever it lies in its tiles."""
    arena = KVArena(layout, num_pages=TILE, page_size=TILE, device=model.device, spare_rows=TILE)
    attend = choose("fixed", model.device)
    runner = FixedShapeRunner(ModelRunner(model, arena, attend), scratch=TILE)
    tokens = [(7 * i + 3) % runner.vocab_size for i in range(2 * TILE)]
    mine, other = tokens[:TILE], tokens[TILE:]
    with exactly(1):
        want = runner.forward([Feed(mine, 0, [0], TILE)])
    _check_equal(model, runner.forward([Feed(mine, 0, [0], TILE)]), want, "the number of threads")
    for shift in _SHIFTS:
        got = runner.forward([Feed(other[:shift], 0, [1], 0), Feed(mine, 0, [0], TILE)])
        _check_equal(model, got, want, "its neighbours in a tile")
    everywhere = runner.forward([Feed(mine[:1], 0, [page]) for page in range(TILE)])
    _check_equal(model, everywhere, want[:1].expand_as(everywhere), "its place in a tile")


def _check_equal(model: PreTrainedModel, got: Tensor, want: Tensor, on_what: str) -> None:
    if not torch.equal(got, want):
        raise ModelError(
            f"reproducible: in {type(model).__name__} ({model.dtype}, {torch.get_num_threads()} threads) a row's bits "
            f"depend on {on_what}; fewer threads or another dtype may help"
        )
