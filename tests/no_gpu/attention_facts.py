"""What the compiler makes of the attention kernel for a card that is not there.

A shape is `bfloat16/4/128`: type, query heads to a K/V head, size of a key, and of a value where that is another one:
with `within` behind it, the beginning of the key; with `windowed`, in a layer with a window and softcaps; with
`int8`, both as codes with scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from pilotfish.engine.attention import paged
from pilotfish.engine.kernels import attention
from pilotfish.engine.kernels.paging import Paging
from pilotfish.engine.kv.arena import SCALE_BYTES
from tests.no_gpu.stand_in import Specialised, StandIn

KV_HEADS = 8


def facts(compiled: Specialised) -> dict[str, object]:
    """Registers, bytes of stack and of shared memory, and how K and V come."""
    resources, asm = compiled.resources, compiled.kernel.asm
    return {
        "kernel": compiled.name,
        "registers": resources.registers,
        "stack": resources.stack,
        "shared": resources.shared,
        "warps": compiled.kernel.metadata.num_warps,
        "buffers": buffers(asm["ttgir"]),
        "in_flight": max(map(int, re.findall(r"async_wait\b.*\bnum = (\d+)", asm["ttgir"])), default=0),
        "tensor_cores": "mma" in asm["ptx"],
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global.*, 0x10\b", asm["ptx"])),
        "other_copies": len(re.findall(r"cp\.async\.ca\.", asm["ptx"])),
        "wide_loads": len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", asm["ptx"])),
    }


def buffers(ttgir: str) -> list[str]:
    """Blocks that the pipeline keeps in shared memory: 2x64x128 is two of 64 keys."""
    return re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<([\dx]+)x\w+, #\w+, #\w+, mutable>", ttgir)


def attend(
    dtype: torch.dtype, group: int, dim: int, num_rows: list[int], starts: list[int], value_dim: int = 0,
    kind: str = "",
) -> None:  # fmt: skip
    """As a layer would, over pages of 32."""
    kv_heads = 1 if "within" in kind else KV_HEADS
    limits = {"window": 100, "softcap": 50.0} if "windowed" in kind else {}
    scaled = SCALE_BYTES if "int8" in kind else 0
    tables = [list(range(-(-(n + start) // 32))) for n, start in zip(num_rows, starts, strict=True)]
    paging = Paging.of(num_rows, starts, tables, 32, group, torch.device("cpu"))
    query = torch.zeros(sum(num_rows), group * kv_heads, dim, dtype=dtype)
    arena = torch.zeros(32, kv_heads, scaled + dim, dtype=torch.int8 if scaled else dtype)
    values = arena[..., : scaled + (value_dim or dim)]
    values = values if "within" in kind else values.clone(memory_format=torch.contiguous_format)
    attention.attend(query, arena, values, paging, 0.1, scaled=scaled, **limits)


def shapes(stand_in: StandIn, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Of each kernel of these shapes."""
    for name in names:
        dtype, group, dim, *of_value = name.split("/")
        value_dim, special = int(of_value[0]) if of_value else 0, "".join(of_value[1:])
        for kind, num_rows in (("decode", 5), ("prompt", 40)):
            before = set(stand_in.seen)
            if kind == "prompt" and (dtype == "float32" or max(int(dim), value_dim) > paged.WIDEST_IN_PROMPTS):
                continue
            attend(getattr(torch, dtype), int(group), int(dim), [num_rows], [9000], value_dim, special)
            for key in set(stand_in.seen) - before:
                if "_attend_kernel" in key:
                    yield {"shape": name, "kind": kind} | facts(stand_in.seen[key])
