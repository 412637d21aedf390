"""Makes a model with torch matmuls batch-invariant (`reproducible`).

A matmul library selects its kernel, and thereby the order of its sums, by the shape of the operands. So each matmul
runs in tiles of `TILE` rows, the last padded with zeros, with constant shapes. Its bits can still depend on a row's
position in the tile, on the other rows and on the number of threads. So matmuls are tested at load, by shape; those
that fail run row by row. Then the whole model is tested. All results are compared with a run on one thread, so that a
later start with more threads gives the same bits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.attention import choose
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena, KVLayout
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.model.decoder.decoder import is_batch_invariant
from pilotfish.engine.model.decoder.experts import RowProducts
from pilotfish.engine.model.decoder.latent import HeadProducts
from pilotfish.engine.model.linear.cuda import Fp8Linear, W4Linear
from pilotfish.engine.model.linear.experts import FusedExperts
from pilotfish.engine.model.runner import ModelRunner
from pilotfish.engine.recurrent.arena import StateArena

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import Model

log = logging.getLogger(__name__)

TILE = 16
_SHIFTS = (1, 6, TILE - 5)
_TILED = (nn.Linear, Fp8Linear, W4Linear, FusedExperts, RowProducts)


class Tiled(nn.Module):
    """A row-independent module, computed `rows` rows at a time; otherwise like `inner`."""

    def __init__(self, inner: nn.Module, rows: int = TILE) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows

    def __getattr__(self, name: str) -> Any:
        """Attributes of `inner`: sizes, weights, and those that adapters read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *inputs: Tensor) -> Tensor:
        """`[..., n]` -> `[..., out]`; tiles are copied, so that all have the same alignment."""
        rows = [x.flatten(0, -2) for x in inputs]
        count = len(rows[0])
        filled = (F.pad(x, (0, 0, 0, -count % self.rows)) for x in rows)
        tiles = zip(*(x.split(self.rows) for x in filled), strict=True)
        made = [self.inner(*(x.clone(memory_format=torch.contiguous_format) for x in tile)) for tile in tiles]
        return torch.cat(made)[:count].view(*inputs[0].shape[:-1], made[0].shape[-1])


@torch.inference_mode()
def ensure_batch_invariance(model: Model, layout: KVLayout) -> None:
    """Ensure that a row's bits depend only on its own context; models with our C matmuls are unchanged.

    Raises:
        ModelError: the bits still depend on the batch.
    """
    if is_batch_invariant(model):
        return
    with exactly(torch.get_num_threads()):  # instead of the fastest number of threads
        tiled, rows = dict[nn.Module, Tiled](), dict[str, int]()
        for path, parent in list(model.named_modules()):
            if isinstance(parent, HeadProducts):
                parent.row_wise = True
            if isinstance(parent, Tiled):  # done by an earlier engine of this model
                continue
            for name, child in parent.named_children():
                if isinstance(child, _TILED):
                    tiled[child] = tiled.get(child) or _tiled(f"{path}.{name}".lstrip("."), child, rows)
                    setattr(parent, name, tiled[child])
        _check_whole(model, layout)


def _tiled(name: str, module: nn.Module, rows: dict[str, int]) -> Tiled:
    """`module` in tiles; `rows`: tile sizes by shape, extended by new ones."""
    if not isinstance(module, nn.Linear):  # our kernels, and matrices tested by `_check_whole`
        return Tiled(module)
    shape = shape_of(module)
    if shape not in rows:
        fitting = (size for size in (TILE, 1) if is_independent(Tiled(module, size)))
        rows[shape] = next(fitting, 0)
        if not rows[shape]:
            raise ModelError(f"reproducible: {name} ({shape}) is not batch-invariant on this machine")
    if rows[shape] == 1:
        log.warning("reproducible: %s (%s) runs row by row (slower)", name, shape)
    return Tiled(module, rows[shape])


def shape_of(module: nn.Module) -> str:
    """Describe a matmul by the properties that determine its kernel."""
    weight = cast("Tensor", module.weight)
    size = " x ".join(map(str, weight.shape))
    bias = " with bias" if isinstance(module.bias, Tensor) else ""
    return f"{type(module).__name__} {size} {str(weight.dtype).removeprefix('torch.')}{bias}"


def is_independent(matmul: Tiled) -> bool:
    """Whether a row gets the same bits at every position of a tile, with any other rows and number of threads."""
    weight, generator = matmul.weight, torch.Generator().manual_seed(0)
    mine, others = torch.randn(2, 1, TILE, weight.shape[1], generator=generator).to(weight)
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


def _check_whole(model: Model, layout: KVLayout) -> None:
    """Test the whole model: the logits of one sequence must have the same bits at any position in any batch.

    This covers norms, activations, attention, routers and heads.
    """
    arena = KVArena(layout, num_pages=TILE, page_size=TILE, device=model.device)
    states = StateArena.of(model, TILE + 1, TILE, model.device)
    runner = ModelRunner(model, arena, choose("fixed", model.device), states=states)
    tokens = [(7 * i + 3) % runner.vocab_size for i in range(2 * TILE)]
    mine, other = tokens[:TILE], tokens[TILE:]
    with exactly(1):
        want = runner.forward([Feed.begun(mine, 0, TILE)])
    _check_equal(model, runner.forward([Feed.begun(mine, 0, TILE)]), want, "the number of threads")
    for shift in _SHIFTS:
        got = runner.forward([Feed.begun(other[:shift], 1, 0), Feed.begun(mine, 0, TILE)])
        _check_equal(model, got, want, "other rows in the batch")
    everywhere = runner.forward([Feed.begun(mine[:1], page, 1) for page in range(TILE)])
    _check_equal(model, everywhere, want[:1].expand_as(everywhere), "its position in the batch")


def _check_equal(model: Model, got: Tensor, want: Tensor, on_what: str) -> None:
    if not torch.equal(got, want):
        raise ModelError(
            f"reproducible: in {type(model).__name__} ({model.dtype}, {torch.get_num_threads()} threads) a row's bits "
            f"depend on {on_what}; try fewer threads or another dtype"
        )
