"""The operations between matmuls on a GPU: our kernels, or their equivalents in plain torch.

All work between two matmuls is one kernel: a sum, the norm that follows it and, where the next matmul is in 8-bit
floats, the rounding of its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pilotfish.engine.kernels import faults, reference
from pilotfish.engine.kernels.args import Fp8Rows
from pilotfish.engine.model.linear.cuda import Multiply, W4Linear
from pilotfish.engine.model.linear.experts import Mix

log = logging.getLogger(__name__)

_SOME = (3, 40, 100)  # rows that get each size of tile of `kernels.w4`


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The functions of `engine.kernels.rows`, `.experts` and `.w4`, or of `.reference`, which compute the same."""

    rotate_and_write: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    add_norm_round: Callable[..., tuple[Fp8Rows, Tensor]]
    gate: Callable[..., Tensor]
    gate_round: Callable[..., Fp8Rows]
    round_rows: Callable[[Tensor], Fp8Rows]
    mix: Mix
    w4_matmul: Multiply

    @classmethod
    def of(cls, *modules: object) -> LayerOps:
        """Take the functions of modules, because a model with references to modules could not be copied."""
        found = {field.name: next(m for m in modules if hasattr(m, field.name)) for field in fields(cls)}
        return cls(**{name: getattr(module, name) for name, module in found.items()})

    @classmethod
    def kernels(cls) -> LayerOps:
        from pilotfish.engine.kernels import experts, rows, w4  # import Triton

        return cls.of(rows, experts, w4)

    def checked(self, sizes: tuple[int, int, int], like: Tensor, *, in_fp8: bool, in_w4: W4Linear | None) -> LayerOps:
        """These, with plain torch instead of each that cannot be compiled or does not fit on this GPU; logged.

        `sizes`: of rows, of the inner width of a feed-forward, and of a head. `like`: a tensor of the model's type and
        device. `in_w4`: the width of the widest 4-bit matrix, if any.
        """
        width, inner, head_dim = sizes
        dtype, device = like.dtype, like.device
        x, both = (torch.zeros(1, size, dtype=dtype, device=device) for size in (width, 2 * inner))
        scale, turned = torch.ones(width, device=device), torch.zeros(1, head_dim, dtype=dtype, device=device)
        heads = torch.zeros(1, 1, head_dim, dtype=dtype, device=device)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        tries: dict[str, Callable[[], object]] = {
            "rotate_and_write": lambda: self.rotate_and_write(
                turned.repeat(1, 3), turned, turned, row, heads, heads.clone()
            ),
            "add_norm": lambda: self.add_norm(x, x, scale, 1e-6),
            "gate": lambda: self.gate(both, "silu"),
        }
        if in_fp8:
            tries |= {
                "add_norm_round": lambda: self.add_norm_round(x, x, scale, 1e-6),
                "gate_round": lambda: self.gate_round(both, "silu"),
                "round_rows": lambda: self.round_rows(x),
            }
        if in_w4 is not None:
            held = in_w4.words, in_w4.scale, in_w4.bias, in_w4.arrived
            several = [like.new_zeros(count, in_w4.in_features) for count in _SOME]
            tries["w4_matmul"] = lambda: [self.w4_matmul(x, *held) for x in several]
        failed: dict[str, object] = {}
        for name, run in tries.items():
            try:
                run()
            except faults() as error:
                failed[name] = getattr(reference, name)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                log.warning("%s: falling back to torch, the kernel failed: %s", name, reason)
        return replace(self, **failed)  # type: ignore[arg-type]
