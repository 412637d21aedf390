"""A stand-in for the CUDA driver: Triton binds, specialises and compiles every launch as for a card, and runs nothing.

The kernels must have been defined without the interpreter: a program that uses this removes `TRITON_INTERPRET` before
Triton is imported. What a launch would have written stays as it was; `meaning` writes it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that one block may have
_OF_ALL_BLOCKS = {
    80: 164 << 10,
    90: 228 << 10,
}  # and all blocks of a multiprocessor, with 1 KiB of the system's for each
_REGISTERS, _WARPS, _BLOCKS = 65536, 64, 32  # of a multiprocessor
_CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes of a multiprocessor."""

    registers: int  # of a thread
    stack: int  # bytes of a thread in local memory: what was spilled, and arrays that no register holds
    shared: int  # bytes of a block
    warps: int  # of a block

    def blocks(self, capability: int = 90) -> int:
        """Blocks that stand on one multiprocessor together. Registers are given to a warp by 256."""
        of_warp = -(-self.registers * 32 // 256) * 256
        return min(
            _REGISTERS // (of_warp * self.warps),
            _OF_ALL_BLOCKS[capability] // (self.shared + 1024),
            _WARPS // self.warps,
            _BLOCKS,
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """One specialisation of a kernel."""

    name: str
    key: str  # types, alignment, constants and options: what Triton compiles anew for
    kernel: Any  # triton.compiler.CompiledKernel, with `asm` (ttir, ttgir, llir, ptx, cubin) and `metadata`
    seconds: float  # that compiling it took

    def resources(self) -> Resources:
        """As the assembler reports them for its machine code."""
        return resources_of(self.kernel)

    def anew(self, capability: int) -> Resources:
        """What the same specialisation takes on another card."""
        options = {name: getattr(self.kernel.metadata, name) for name in ("num_warps", "num_stages")}
        return resources_of(triton.compile(self.kernel.src, GPUTarget("cuda", capability, 32), options))


def resources_of(kernel: Any) -> Resources:
    """Of a `triton.compiler.CompiledKernel`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # In newer code spills are LOCAL, in older code STACK holds them too.
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    stack = max(found["STACK"], found.get("LOCAL", 0))
    return Resources(found["REG"], stack, int(kernel.metadata.shared), int(kernel.metadata.num_warps))


class StandIn:
    """Triton's driver for a card of this compute capability (80, 90) that is not there."""

    def __init__(self, capability: int = 90) -> None:
        self.seen: dict[str, Compiled] = {}  # all that was compiled, in order
        self.launches: list[str] = []  # names of kernels, in the order of their launches
        self.launched: set[str] = set()  # keys of `seen`; whoever looks at a part of a run clears it before
        self._names: dict[int, str] = {}  # keys of `seen`, by the source that was compiled
        self._capability = capability
        self.utils, self.launcher_cls = self, self._launcher

    def install(self) -> StandIn:
        """Make it Triton's driver for the rest of the process."""
        driver.set_active(self)
        compile_ = JITFunction._do_compile

        def watched(function: JITFunction, key: str, *rest: Any) -> Any:
            began = time.perf_counter()
            kernel = compile_(function, key, *rest)
            name = function.__name__
            self.seen[f"{name} {key}"] = Compiled(name, key, kernel, time.perf_counter() - began)
            self._names[id(kernel.src)] = f"{name} {key}"
            return kernel

        JITFunction._do_compile = watched
        return self

    # What Triton asks of a driver and of its `utils`.

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self._capability], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), name, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        """Nothing was loaded."""

    def _launcher(self, src: Any, metadata: Any) -> Callable[..., None]:
        return partial(self._launch, src)

    def _launch(self, src: Any, *args: Any) -> None:
        self.launches.append(src.fn.__name__)
        self.launched.add(self._names[id(src)])
