"""Calls every kernel's launcher with CPU tensors and, instead of running, compiles what it would launch for a GPU.

A program of its own: kernels must be defined without the interpreter. Prints one line per kernel that was compiled.
What it finds is what the interpreter lets pass: types, shapes that are no power of two, operations without a lowering.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
TARGET = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
OPTIONS = ("num_warps", "num_stages")


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(self.arg_names, args, strict=False)) | kwargs
    constants = {p.name for p in self.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in self.arg_names}
    source = ASTSource(self, signature, constexprs={name: values[name] for name in constants})
    compiled = triton.compile(source, target=TARGET, options=options)
    print(self.__name__, len(compiled.asm["ptx"]), "bytes of PTX,", sorted(set(signature.values()) - {"constexpr"}))


def attention_launches() -> None:
    from engine.kernels import attention
    from engine.kernels.paging import Paging

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for group, dim, window, softcap, spread in (
            (2, 8, None, None, True), (1, 80, None, None, False), (4, 128, None, None, True), (7, 96, 30, 5.0, True),
            (2, 256, None, None, False),
        ):  # fmt: skip
            paging = Paging.of([3, 1], [600, 9000], [[1, 2], [3]], 32, group, torch.device("cpu"))
            query = torch.zeros(4, group, dim, dtype=dtype)
            k = torch.zeros(64, 1, dim, dtype=dtype)
            attention.attend(query, k, k, paging, 0.1, window, softcap, spread=spread)


def row_launches() -> None:
    from engine.kernels import rows

    for dtype in (torch.float32, torch.bfloat16):
        arena, cos, scale = torch.zeros(9, 2, 80, dtype=dtype), torch.zeros(3, 40, dtype=dtype), torch.zeros(80)
        for norms in (None, (scale, scale)):
            projected, where = torch.zeros(3, 8 * 80, dtype=dtype), torch.zeros(3, dtype=torch.int64)
            rows.rotate_and_write(projected, cos, cos, where, arena, arena, norms, 1e-5)
        x = torch.zeros(3, 80, dtype=dtype)
        rows.add_norm(x, None, scale, 1e-5)
        rows.add_norm(x, x, scale, 1e-5)
        rows.gate(torch.zeros(3, 4096, dtype=dtype), "silu")
        rows.gate(torch.zeros(3, 4096, dtype=dtype), "gelu_tanh")


def token_launches() -> None:
    from engine.kernels import commit, sampling
    from engine.kernels.args import Laws, Tracks

    whole, real = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(3, 128256, dtype=dtype)
        sampling.choose(logits, Laws(real.float(), whole, real, real, whole, whole, whole))
        sampling.choose(logits, Laws(real.float(), whole, real, real, whole, whole, whole), cuts=False)
    tracks = Tracks(torch.zeros(3, 99, dtype=torch.int64), whole, whole, torch.zeros(3, 2, dtype=torch.int64), whole)
    drawn = torch.zeros(3, 5, dtype=torch.int64)
    commit.commit(drawn, drawn[:, 1:], whole, whole, tracks)


if __name__ == "__main__":
    JITFunction.run = compile_only
    attention_launches()
    row_launches()
    token_launches()
