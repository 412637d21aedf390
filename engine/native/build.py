"""Compiles the C of this folder: one library per instruction set of the processor's family, and a manifest.

The build of the package (`hatch_build.py`) and `make install` run this file; a server never does. It imports only the
standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
MANIFEST = "native.json"
# For wheels that others install: the machine to compile for, which may be another one. Only ziglang is used then.
PORTABLE = os.environ.get("PILOTFISH_BUILD_MACHINE", "")
MACHINE = PORTABLE or platform.machine()
FLAGS = ("-O3", "-shared", "-fPIC", "-pthread", "-std=gnu11", "-Wno-psabi")
# Instruction scheduling that is never slower on Zen than -march=native's; GCC's generic one is, in float32.
TUNING = ("-mtune=skylake",) if MACHINE == "x86_64" else ()
COMPILERS = ("cc", "gcc", "clang")
ZIG = "ziglang>=0.13,<1"  # a PyPI package with a C compiler for many machines
GLIBC = "2.28"  # the oldest that torch runs with
PATIENCE = 600  # seconds for a library
MOST_BYTES = 1 << 28  # maximum bytes of a library: a hundred times the actual size


class Level(NamedTuple):
    """An instruction set."""

    name: str
    processor: str  # to compile for; "": the compiler's default
    needs: frozenset[str]  # flags in /proc/cpuinfo that it requires


class BuiltLibrary(NamedTuple):
    """A built file."""

    file: str
    size: int  # bytes
    sha256: str


class Manifest(NamedTuple):
    """The result of a build."""

    sources: str  # their fingerprint
    compiler: str
    levels: list[str]  # requested and not failed; the compiler may not support some
    libraries: dict[str, BuiltLibrary]  # by level


def _levels(*rows: tuple[str, str, str]) -> tuple[Level, ...]:
    """A family's levels, best first, from rows of (name, processor to compile for, needs), worst first."""
    return tuple(Level(name, processor, frozenset(needs.split())) for name, processor, needs in reversed(rows))


_AVX2 = "ssse3 sse4_1 sse4_2 popcnt avx avx2 fma f16c bmi1 bmi2 abm movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
# A row per code path of the sources (`registers.h`). `needs` includes instructions that compilers may use on their own.
LEVELS = {
    "x86_64": _levels(
        ("sse2", "x86-64", ""),
        ("sse4.2", "nehalem", "ssse3 sse4_1 sse4_2 popcnt"),
        ("avx2", "haswell", _AVX2),
        ("avx-vnni", "alderlake", f"{_AVX2} avx_vnni gfni vaes vpclmulqdq"),
        ("avx512", "skylake-avx512", _AVX512),
        ("avx512-vnni", "cascadelake", f"{_AVX512} avx512_vnni"),
        ("avx512-bf16", "cooperlake", f"{_AVX512} avx512_vnni avx512_bf16"),
    ),
    "aarch64": _levels(
        ("neon", "armv8-a", ""),
        ("dotprod", "armv8.2-a+dotprod", "asimddp asimdrdm atomics crc32"),
    ),
}.get(MACHINE, (Level("baseline", "", frozenset()),))


ALL = tuple(level.name for level in LEVELS)


def sources(folder: Path = HERE) -> list[Path]:
    """The files to compile; missing in an installed package."""
    return sorted(folder.glob("*.c"))


def fingerprint(folder: Path = HERE) -> str:
    """A hash of the sources, the headers and the flags."""
    parts = [repr((FLAGS, TUNING, [level[:2] for level in LEVELS])).encode()]
    parts += [
        path.name.encode() + b"\n" + path.read_bytes() for path in (*sources(folder), *sorted(folder.glob("*.h")))
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_manifest(folder: Path = HERE) -> Manifest:
    """Read the manifest. Raises OSError if it is missing or damaged."""
    text = (folder / MANIFEST).read_bytes()
    try:
        read = json.loads(text)
        libraries = {
            str(level): BuiltLibrary(str(found["file"]), int(found["size"]), str(found["sha256"]))
            for level, found in read["libraries"].items()
        }
        return Manifest(str(read["sources"]), str(read["compiler"]), list(map(str, read["levels"])), libraries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise OSError(f"{MANIFEST} is damaged: {error!r}") from error


def read_library(built: BuiltLibrary, folder: Path = HERE) -> bytes:
    """Read a library. Raises OSError if it cannot be read, or differs from the manifest."""
    if not built.file.isprintable() or not 0 < built.size <= MOST_BYTES:
        raise OSError(f"{MANIFEST} is damaged: invalid size {built.size} of {built.file!r}")
    with (folder / built.file).open("rb") as file:
        content = file.read(built.size + 1)
    if len(content) != built.size:
        found = len(content) if len(content) < built.size else "more"
        raise OSError(f"{built.file} is damaged: {found} bytes, expected {built.size}")
    if hashlib.sha256(content).hexdigest() != built.sha256:
        raise OSError(f"{built.file} is damaged: its SHA-256 differs from the manifest")
    return content


def is_current(folder: Path = HERE, names: Iterable[str] = ALL) -> bool:
    """Whether intact libraries of these sources exist, including those of `names`."""
    try:
        manifest = read_manifest(folder)
        for built in manifest.libraries.values():
            read_library(built, folder)
    except OSError:
        return False
    return manifest.sources == fingerprint() and set(names) <= set(manifest.levels)


def compiler() -> list[str] | None:
    """The C compiler: $CC, cc, gcc, clang, or that of the package ziglang; None if there is none."""
    for command in () if PORTABLE else (os.environ.get("CC", ""), *COMPILERS):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return [*words, *TUNING]
    if importlib.util.find_spec("ziglang") is None:
        return None
    libc = f"gnu.{GLIBC}" if PORTABLE or platform.libc_ver()[0] else "musl"
    target = f"{MACHINE}-linux-{libc}"
    return [sys.executable, "-m", "ziglang", "cc", "-s", "-target", target]  # without a target: this exact processor


def build(folder: Path = HERE, names: Sequence[str] = ALL, report: Callable[[str], None] = print) -> bool:
    """Compile the levels of `names` into a folder, unless they exist. False if a source has an error.

    Concurrent readers see either all old libraries or all new ones.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # one build at a time
        if is_current(folder, names):
            os.utime(folder / MANIFEST)  # make compares times
            return True
        command = compiler()
        if command is None:
            report("no C kernels: no C compiler found ($CC, cc, gcc, clang, ziglang); torch is used, which is slower")
            return True
        with tempfile.TemporaryDirectory(dir=folder, prefix="native-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            failures = _compile_all(command, names, made, report)
            _publish(made, folder)
        os.fsync(descriptor)
        return not failures
    finally:
        os.close(descriptor)


def _compile_all(command: list[str], names: Sequence[str], to: Path, report: Callable[[str], None]) -> int:
    """Compile levels and write their manifest; return the number of failures."""
    levels = [level for level in LEVELS if level.name in names and _is_supported(command, level, to, report)]
    words = [*command, *FLAGS, *map(str, sources()), "-lm"]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        errors = threads.map(
            lambda level: _run([*words, *_flags(command, level), "-o", str(to / level.name)], to), levels
        )
    manifest = Manifest(fingerprint(), shlex.join(command), list(names), {})
    for level, error in zip(levels, errors, strict=True):
        if error:
            report(f"C kernels for {level.name} are not built: {error}")
            manifest.levels.remove(level.name)
            continue
        content = (to / level.name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        built = BuiltLibrary(f"native-{level.name}-{digest[:12]}.so", len(content), digest)
        (to / level.name).rename(to / built.file)
        manifest.libraries[level.name] = built
    table = manifest._asdict() | {"libraries": {level: built._asdict() for level, built in manifest.libraries.items()}}
    (to / MANIFEST).write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    return len(names) - len(manifest.levels)


def _flags(command: list[str], level: Level) -> list[str]:
    """The compiler flag for a processor; Zig has its own names."""
    if "ziglang" not in command or not level.processor:
        return [f"-march={level.processor}"] if level.processor else []
    arm = {"armv8-a": "generic", "armv8.2-a+dotprod": "generic+v8_2a+dotprod"}
    return [f"-mcpu={arm.get(level.processor, level.processor.replace('-', '_'))}"]


def _is_supported(command: list[str], level: Level, to: Path, report: Callable[[str], None]) -> bool:
    error = _run([*command, *_flags(command, level), "-E", "-x", "c", os.devnull], to)
    if error:
        report(f"C kernels for {level.name} are not built: the compiler does not support {level.processor}: {error}")
    return not error


def _run(command: list[str], to: Path) -> str:
    """Run a compiler; return its errors, or "" on success."""
    caches = {f"ZIG_{kind}_CACHE_DIR": str(to.parent) for kind in ("GLOBAL", "LOCAL")}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE, "env": os.environ | caches}
    try:
        done = subprocess.run(command, check=False, **options)  # noqa: S603  # our own arguments
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stderr.strip()[-2000:] or f"its status is {done.returncode}") if done.returncode else ""


def _publish(scratch: Path, folder: Path) -> None:
    """Move the new files into the folder, the manifest last, and remove obsolete ones."""
    try:
        needed = {built.file for built in read_manifest(folder).libraries.values()}
    except OSError:
        needed = set()
    for path in sorted(scratch.iterdir(), key=lambda path: path.name == MANIFEST):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.replace(folder / path.name)
        needed.add(path.name)
    for path in folder.glob("native-*.so"):
        if path.name not in needed:
            path.unlink()


if __name__ == "__main__":
    sys.exit(0 if build(names=sys.argv[1:] or ALL) else 1)
