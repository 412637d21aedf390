"""Row kernels, the 4-bit matmul and experts compiled as for a card."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pilotfish.engine.kernels import experts, rows, w4
from pilotfish.engine.kernels.args import GROUP, WORDS
from pilotfish.engine.kv.arena import SCALE_BYTES
from pilotfish.engine.model.linear.experts import FusedExperts
from pilotfish.engine.native.experts import ExpertGate
from tests.no_gpu.stand_in import Specialised, StandIn

SIZES = (2048, 29568)  # of rows: a small model's hidden size, and the largest MLP that is common
MATRICES = ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 28672))  # in and out, of an 8B model


def row_kernels() -> None:
    dtype = torch.bfloat16
    for size in SIZES:
        x, scale, both = torch.zeros(3, size, dtype=dtype), torch.zeros(size), torch.zeros(3, 2 * size, dtype=dtype)
        rows.add_norm(x, x, scale, 1e-5)
        rows.add_norm_round(x, x, scale, 1e-5, (scale, 1e-5))
        rows.gate_round(both, "gelu_tanh")
        rows.round_rows(x)
    x, scale = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096)
    rows.add_norm(x, None, scale, 1e-5)
    rows.add_norm_round(x, None, scale, 1e-5)
    rows.gate(torch.zeros(3, 8192, dtype=dtype), "silu")
    arena, cos = torch.zeros(9, 2, 128, dtype=dtype), torch.zeros(3, 128, dtype=dtype)
    norms = torch.zeros(128), torch.zeros(128)
    where = torch.zeros(3, dtype=torch.int64)
    codes = torch.zeros(9, 2, SCALE_BYTES + 128, dtype=torch.int8)
    for stored in (arena, codes):
        scaled = SCALE_BYTES if stored is codes else 0
        rows.rotate_and_write(
            torch.zeros(3, 8 * 128, dtype=dtype), cos, cos, where, stored, stored, norms, scaled=scaled
        )


def matmuls() -> None:
    counts = torch.zeros(999, dtype=torch.int32)
    for inputs, outputs in MATRICES:
        words = torch.zeros(inputs // GROUP, outputs, WORDS, dtype=torch.int16)
        scale = torch.zeros(inputs // GROUP, outputs, dtype=torch.float16)
        for num_rows in (1, 2, 7, 15, 16, 17, 32, 33, 40, 64, 65, 128, 200):
            w4.w4_matmul(torch.zeros(num_rows, inputs, dtype=torch.bfloat16), words, scale, None, counts)


def mixtures() -> None:
    """As Qwen3-30B-A3B has them, but fewer."""
    up, down = torch.zeros(16, 2 * 768, 2048, dtype=torch.bfloat16), torch.zeros(16, 2048, 768, dtype=torch.bfloat16)
    mixture = FusedExperts(up, down, None, ExpertGate(), experts.mix)
    for num_rows in (1, 17, 300):
        chosen = torch.zeros(num_rows, 8, dtype=torch.int64)
        mixture(torch.zeros(num_rows, 2048, dtype=torch.bfloat16), chosen, chosen.bfloat16())


def compiled(new: Iterable[Specialised]) -> Iterator[dict[str, Any]]:
    for each in new:
        used, code = each.resources, each.kernel.asm["ptx"]
        copies = {int(size, 16) for size in re.findall(r"cp\.async\.\w+\.shared\.global.*?, 0x(\w+)", code)}
        yield {
            "name": each.name, "registers": used.registers, "stack": used.stack, "shared": used.shared,
            "copies": sorted(copies), "tensor_cores": "wgmma" in code, "wide_loads": "ld.global.v4.b32" in code,
        }  # fmt: skip


def facts(stand_in: StandIn) -> dict[str, Any]:
    """Of the row kernels and of the matmul, and how many specialisations a mixture of experts has of each kernel."""
    row_kernels()
    found = {"rows": list(compiled(stand_in.newest()))}
    matmuls()
    found["w4"] = list(compiled(stand_in.newest()))
    mixtures()
    return found | {"experts": Counter(each.name for each in stand_in.newest())}
