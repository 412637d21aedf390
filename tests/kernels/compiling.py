"""Calls every kernel's launcher with CPU tensors and, instead of running, compiles what it would launch for a GPU.

A program of its own: kernels must be defined without the interpreter. Prints one line per kernel that was compiled.
What it finds is what the interpreter lets pass: types, shapes that are no power of two, operations without a lowering.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
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


def launches() -> Iterator[None]:
    from engine.kernels import attention
    from engine.kernels.paging import Paging

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for group, dim, window, softcap, spread in (
            (1, 64, None, None, False), (4, 128, None, None, True), (7, 96, 30, 5.0, True), (2, 256, None, None, False),
        ):  # fmt: skip
            paging = Paging.of([3, 1], [600, 9000], [[1, 2], [3]], 32, group, torch.device("cpu"))
            query = torch.zeros(4, group, dim, dtype=dtype)
            k = torch.zeros(64, 1, dim, dtype=dtype)
            yield attention.attend(query, k, k, paging, 0.1, window, softcap, spread=spread)


if __name__ == "__main__":
    JITFunction.run = compile_only
    for _ in launches():
        pass
