"""A stand-in for the CUDA driver: Triton binds and specialises every launch as for a card, and runs nothing.

A specialisation is compiled once somebody asks what it takes. The kernels must have been defined without the
interpreter: a program that uses this removes `TRITON_INTERPRET` before Triton is imported. What a launch would have
written stays as it was; `meaning` writes it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that one block may have
_OF_ALL_BLOCKS = {80: 164 << 10, 90: 228 << 10}  # of a multiprocessor, with 1 KiB of the system's for each block
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


@dataclass(frozen=True)
class Specialised:
    """One specialisation of a kernel."""

    name: str
    key: str  # types, alignment, constants and options: what Triton compiles anew for
    source: Any  # triton.compiler.ASTSource
    options: dict[str, Any]

    @cached_property
    def kernel(self) -> Any:
        """Compiled for sm_90: a triton.compiler.CompiledKernel, with `asm` (ttgir, ptx, cubin) and `metadata`."""
        return triton.compile(self.source, GPUTarget("cuda", 90, 32), self.options)

    @cached_property
    def resources(self) -> Resources:
        """As the assembler reports them for its machine code."""
        return resources_of(self.kernel)

    def anew(self, capability: int) -> Resources:
        """What the same specialisation takes on another card."""
        options = {name: self.options[name] for name in ("num_warps", "num_stages")}
        return resources_of(triton.compile(self.source, GPUTarget("cuda", capability, 32), options))


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


@dataclass(frozen=True)
class _Unbuilt:
    """What Triton takes for a compiled kernel and launches."""

    run: Any
    function: None = None
    packed_metadata: None = None

    def launch_metadata(self, *_: Any) -> None:
        """Nobody traces launches here."""


class StandIn:
    """Triton's driver for a card of compute capability 9.0 that is not there."""

    def __init__(self) -> None:
        self.seen: dict[str, Specialised] = {}  # all that was launched, in order
        self.launches: list[str] = []  # names of kernels, in the order of their launches
        self.launched: set[str] = set()  # keys of `seen`; whoever looks at a part of a run clears it before
        self.utils = self
        self._told: set[str] = set()

    def install(self) -> StandIn:
        """Make it Triton's driver for the rest of the process."""
        driver.set_active(self)
        compile_ = JITFunction._do_compile

        def watched(function: JITFunction, key: str, *rest: Any) -> Any:
            function.compile = partial(self._specialised, function.__name__, key)
            return compile_(function, key, *rest)

        JITFunction._do_compile = watched
        return self

    def _specialised(self, name: str, key: str, source: Any, options: dict[str, Any], **_: Any) -> _Unbuilt:
        self.seen[f"{name} {key}"] = Specialised(name, key, source, options)
        return _Unbuilt(partial(self._launch, name, f"{name} {key}"))

    def newest(self) -> list[Specialised]:
        """What was launched for the first time since this was asked last."""
        found = [each for key, each in self.seen.items() if key not in self._told]
        self._told = set(self.seen)
        return found

    # What Triton asks of a driver and of its `utils`.

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[90], "multiprocessor_count": 132, "warpSize": 32}

    def _launch(self, name: str, key: str, *_: Any) -> None:
        self.launches.append(name)
        self.launched.add(key)
