"""Our C for other processors than this one: the products are right, and a row's bits its own, by every instruction set.

An x86 processor runs the libraries for its ancestors; SIMDe emulates its descendants. ARM programs are made by
a cross compiler and run by qemu. Where one of these is not installed, or this processor is of another family, the tests
say so and are skipped.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pilotfish.engine.attention import reference
from pilotfish.engine.model.linear.grouped import PortableGrouped
from pilotfish.engine.native import PackedMatrix, build, compiled, library, matmul
from tests.drawn import int16s, numbers
from tests.drawn_codes import codes
from tests.engine.native.test_native import LATENT, Problem
from tests.engine.native.test_weights import parts_are_the_whole

NATIVE = build.HERE
SOURCES = build.sources()
X86 = {  # by level: what it must say of itself
    "sse2": ("SSE", "float32 products"),
    "sse4.2": ("SSE", "float32 products"),
    "avx2": ("AVX2", "float32 products"),
    "avx-vnni": ("AVX-VNNI", "float32 products"),
    "avx512": ("AVX-512", "float32 products"),
    "avx512-vnni": ("AVX-512 VNNI", "float32 products"),
    "avx512-bf16": ("AVX-512 VNNI", "AVX512-BF16"),
}
EMULATED = {  # by SIMDe on a processor with AVX2: what the sources are told that there is
    "avx-vnni": ("AVXVNNI",),
    "avx512": ("AVX512F", "AVX512BW"),
    "avx512-vnni": ("AVX512F", "AVX512BW", "AVX512VNNI"),
    "avx512-bf16": ("AVX512F", "AVX512BW", "AVX512VNNI", "AVX512BF16"),
}
ARM = {  # and qemu's name of a processor that has no more
    "armv8-a": ("NEON", "cortex-a53"),
    "armv8.2-a+dotprod": ("NEON dot product", "neoverse-n1"),
}
SIMDE = Path("/usr/include/simde/x86/avx512.h")
CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"

SIZES = (2, 3, 5, 8)  # of batches
SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[name if name == "avx2" else pytest.param(name, marks=SLOW) for name in X86])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Our C for another x86 processor multiplies and attends: one before this one, or one that is emulated."""
    runnable = {level.name for level in compiled.runnable()}
    if library() is None:
        pytest.skip("no C kernels here")
    if request.param in runnable:
        other = compiled.load(build.read_manifest().libraries[request.param])
    elif request.param in EMULATED and "avx2" in runnable and SIMDE.exists():
        other = emulated(EMULATED[request.param], tmp_path_factory.mktemp("x86") / "native.so")
    else:
        pytest.skip(f"needs a processor with {request.param}, or one with AVX2 and SIMDe (tests/apt.txt)")
    for asked, says in zip(
        (other.pilotfish_integer_path, other.pilotfish_bfloat16_path), X86[request.param], strict=True
    ):
        asked.restype = ctypes.c_char_p
        assert asked().decode() == says
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: other)
        forget()
        yield
    forget()


def emulated(instructions: tuple[str, ...], made: Path) -> ctypes.CDLL:
    """Compile our C for instructions that SIMDe has."""
    told = [f"-D__{name}__" for name in instructions]
    words = ["gcc", "-O0", "-march=haswell", f"-I{Path(__file__).parent / 'emulated'}", *told, *build.FLAGS[1:]]
    subprocess.run([*words, "-o", made, *SOURCES, "-lm"], check=True)
    return ctypes.CDLL(str(made))


def forget() -> None:
    """What was asked of the library before."""
    for asked in (compiled.function, matmul.panel, matmul.codes_from):
        asked.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_floats(path: None, dtype: torch.dtype) -> None:
    outputs, inputs = 150, 192
    weight = numbers(outputs, inputs).to(dtype)
    packed = PackedMatrix.of(weight)
    for rows in (1, 2, 3, 4, 7, 40):
        x = numbers(rows, inputs, seed=3).to(dtype)
        got = packed.multiply(x, None, torch.float32)
        assert torch.allclose(got, (x.double() @ weight.double().t()).float(), rtol=1e-4, atol=1e-3)
    parts_are_the_whole(packed, x[:13], counts=SIZES)


def rows_of(count: int, inputs: int, high: str) -> Tensor:
    """Rows of which the first and the last are extremes: each product is as large as it can be."""
    x = int16s(count, inputs, high, seed=count)
    most = 127 if high == "no" else 32512
    x[0], x[-1] = most, -128 if high == "no" else -most
    if count > 2:
        x[1, ::2], x[1, 1::2] = most, -128
    return x


@pytest.mark.parametrize(
    ("form", "bits", "group", "dtype"),
    [
        ("scale", 4, 32, torch.float16),
        ("offset", 8, 16, torch.float16),
        ("zeros", 4, 64, torch.bfloat16),
        ("two levels", 8, 96, torch.float32),
        ("two levels and offset", 5, 32, torch.float16),
        ("two levels", 6, 16, torch.float16),
        ("scale", 8, 32, torch.float16),
        ("offset", 5, 96, torch.bfloat16),
        ("zeros", 6, 48, torch.float32),
    ],
)
def test_codes_in_groups(path: None, form: str, bits: int, group: int, dtype: torch.dtype) -> None:
    drawn = codes(100, 192, form, bits, group, dtype)
    packed, portable = PackedMatrix.of_groups(drawn), PortableGrouped(drawn)
    for rows, high in ((1, "all"), (2, "some"), (5, "no"), (5, "all"), (19, "no"), (19, "some"), (19, "all")):
        x, step = rows_of(rows, 192, high), numbers(rows, 1).abs()
        assert torch.equal(packed.multiply(x, step, torch.float32), portable.multiply(x, step, torch.float32))
    x[::3] %= 128  # rows without high bytes among others
    parts_are_the_whole(packed, x[-13:], step[-13:], SIZES)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(2, 3, 48), (2, 1, 192, 128), LATENT])
def test_attention(path: None, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    for int8, options in ((False, {}), (True, {"sinks": True, "chunk": 50})):
        p = Problem([(1, 100), (40, 0), (3, 63)], 16, shape, dtype, int8=int8)
        want = reference.attend(p.query.float(), *p.numbers(), p.batch, p.spec(**options))
        assert torch.allclose(p.solve(**options).float(), want, atol=tolerance)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=SLOW) for name in ARM])
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that multiplies on such an ARM (`native_main.c`)."""
    if not (shutil.which(CROSS) and shutil.which(QEMU)):
        pytest.skip(f"needs {CROSS} and {QEMU} (tests/apt.txt)")
    says, cpu = ARM[request.param]
    made = tmp_path_factory.mktemp("arm") / "products"
    sources = [Path(__file__).parent / "native_main.c", *SOURCES]
    command = [CROSS, "-O0", f"-march={request.param}", "-std=gnu11", "-static", "-pthread", f"-I{NATIVE}", "-o", made]
    subprocess.run([*map(str, (*command, *sources)), "-lm"], check=True)
    told = subprocess.run([QEMU, "-cpu", cpu, made, "path"], capture_output=True, text=True, check=True).stdout
    assert told == f"16 {says}\n"
    return [QEMU, "-cpu", cpu, str(made)]


def multiplied_by(command: list[str], packed: PackedMatrix, x: Tensor, step: Tensor | None) -> Tensor:
    """`PackedMatrix.multiply` in another process."""
    panels, rows = packed._panels, len(x)
    sizes = packed.matrix.bits, packed.in_features, packed.out_features, rows, panels.nbytes, x.nbytes
    told = struct.pack("<6q", *sizes) + bytes(packed.matrix.groups)
    told += raw(panels) + raw(torch.ones(rows) if step is None else step) + raw(x)
    done = subprocess.run(command, input=told, capture_output=True, check=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(rows, packed.out_features)


def raw(x: Tensor) -> bytes:
    return bytes(x.contiguous().flatten().view(torch.uint8).numpy())


def test_products_on_arm(arm: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "panel", lambda: 16)
    monkeypatch.setattr(matmul, "codes_from", lambda: 0)
    outputs, inputs, rows = 70, 128, 19
    for dtype in (torch.float32, torch.bfloat16):
        floats, row = numbers(outputs, inputs).to(dtype), numbers(rows, inputs, seed=3).to(dtype)
        packed = PackedMatrix.of(floats)
        together = multiplied_by(arm, packed, row, None)
        assert torch.allclose(together, (row.double() @ floats.double().t()).float(), rtol=1e-4, atol=1e-3)
        assert torch.equal(multiplied_by(arm, packed, row[3:5], None), together[3:5])
    for form, bits, high in (
        ("scale", 4, "no"), ("offset", 8, "some"), ("zeros", 5, "all"), ("two levels", 6, "some"),
        ("two levels and offset", 4, "all"), ("scale", 8, "all"), ("zeros", 6, "no"),
    ):  # fmt: skip
        drawn, x, step = codes(outputs, inputs, form, bits), rows_of(rows, inputs, high), numbers(rows, 1).abs()
        packed = PackedMatrix.of_groups(drawn)
        together = multiplied_by(arm, packed, x, step)
        assert torch.equal(together, PortableGrouped(drawn).multiply(x, step, torch.float32))
        assert torch.equal(multiplied_by(arm, packed, x[4:5], step[4:5]), together[4:5])
