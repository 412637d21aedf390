"""Loads the best library built by `build.py` that this processor supports. Compiles nothing.

The library is optional: without it, `library` returns None and callers use torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from pilotfish.engine.native import build

log = logging.getLogger(__name__)

_FASTER = {
    "AVX-512": "AVX-512 VNNI",
    "AVX2": "AVX-VNNI or AVX-512 VNNI",
    "SSE": "AVX2",
    "NEON": "dot products (ARMv8.2)",
    "plain C": "vectors (AVX2, NEON)",
}
REMEDY = "reinstall Pilotfish; in a checkout, `make install`"
CPUINFO = Path("/proc/cpuinfo")
FOLDER = build.HERE
OFF = "PILOTFISH_NATIVE is 0"


class Loaded(NamedTuple):
    """The library, its file, and why it is missing or not the best one."""

    library: ctypes.CDLL | None
    file: str = ""
    problem: str = ""  # the first


def library() -> ctypes.CDLL | None:
    """The compiled library; None, with the reason in the log, if there is none."""
    return loaded().library


@cache
def loaded() -> Loaded:
    """Load the best intact library that this processor supports. Problems are logged."""
    if os.environ.get("PILOTFISH_NATIVE") == "0":
        log.info("C kernels disabled: %s; using torch (several times slower)", OFF)
        return Loaded(None, problem=OFF)
    found = _best()
    if found.library is None:
        log.warning("no C kernels: %s; using torch (several times slower); fix: %s", found.problem, REMEDY)
    elif found.problem:
        log.warning("C kernels: %s; using the slower %s; fix: %s", found.problem, found.file, REMEDY)
    elif is_stale():
        log.warning(
            "C kernels: the sources have changed since %s was built; run `make install` to rebuild",
            found.file,
        )
    return found


def _best() -> Loaded:
    problem = ""
    try:
        libraries = build.read_manifest(FOLDER).libraries
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        return Loaded(None, problem=f"no libraries in {FOLDER}" if is_missing else str(error))
    for level in runnable():
        try:
            built = libraries[level.name]
            return Loaded(load(built), built.file, problem)
        except KeyError:
            problem = problem or f"no library for {level.name}"
        except OSError as error:
            problem = problem or str(error)
    return Loaded(None, problem=problem)


def load(built: build.BuiltLibrary) -> ctypes.CDLL:
    """Load a library from exactly the bytes that were verified, even if the file changes.

    Raises:
        OSError: it is damaged, or cannot be loaded.
    """
    content = build.read_library(built, FOLDER)
    try:
        # It stays open: the loader identifies libraries by path, and would confuse it with another of the same number.
        descriptor = os.memfd_create(built.file)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:  # some systems do not load code without a file
        return ctypes.CDLL(str(FOLDER / built.file))


def runnable() -> list[build.Level]:
    """The levels supported by all processors of this machine, best first."""
    lists = [set(line.split(":", 1)[1].split()) for line in _cpuinfo() if line.startswith(("flags", "Features"))]
    flags = set.intersection(*lists) if lists else set()
    return [level for level in build.LEVELS if level.needs <= flags]


def _cpuinfo() -> list[str]:
    return CPUINFO.read_text("utf-8").splitlines() if CPUINFO.exists() else []


def is_stale() -> bool:
    """Whether the sources exist and differ from those of the libraries."""
    try:
        return bool(build.sources(FOLDER)) and build.read_manifest(FOLDER).sources != build.fingerprint(FOLDER)
    except OSError:
        return False


# Argument types of the functions: `p` an address, `n` an int64_t, `i` an int, `f` a float.
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_ARGUMENTS = {
    "attend": "pii", "layers": "ppni", "experts": "ppi", "multiply": "pnpi", "scan": "pii",
    "round": "pinnnppi", "gate_round": "pinnffppi", "gate": "pinnffpi", "norm": "pinnnpfpi", "rotate": "pinpppp",
    "uniform": "pppnnp", "uniform_at": "ppppnnp", "round_symmetric": "pinnnnpp", "round_asymmetric": "pinnnnnppppp",
    "panels": "pnnnnp", "codes": "pnnnnnnnnnnp", "numbers": "pnnnnnnnpn", "blocks": "pnnppppp",
    "panel": "", "codes_from": "", "most_keys": "",
}  # fmt: skip


@cache
def function(name: str) -> Callable[..., int]:
    """Return `pilotfish_name` of the library, which must be loaded.

    It returns a number, or whether an allocation failed; other return values have no meaning.
    """
    found = getattr(library(), f"pilotfish_{name}")
    found.argtypes = [_TYPES[letter] for letter in _ARGUMENTS[name]]
    return found  # type: ignore[no-any-return]


def threads_in_use() -> int:
    """Threads of our C in its last pass; 0 if it is not loaded or not available."""
    found = library() if loaded.cache_info().currsize else None
    return 0 if found is None else int(found.pool_threads())


def instructions() -> str:
    """Describe the library, its instructions and faster ones, or why there is no library."""
    found = loaded()
    if found.library is None:
        remedy = "" if found.problem == OFF else f"; fix: {REMEDY}"
        return f"torch (several times slower): C kernels not loaded ({found.problem}){remedy}"
    paths = (found.library.pilotfish_integer_path, found.library.pilotfish_bfloat16_path)
    for function in paths:
        function.restype = ctypes.c_char_p
    integers, bfloat16 = (path().decode() for path in paths)
    parts = [f"C ({found.file}, verified): int8 and int4 by {integers}, bfloat16 by {bfloat16}"]
    if found.problem:
        parts.append(f"a faster library is not loaded ({found.problem}); fix: {REMEDY}")
    elif integers in _FASTER:
        parts.append(f"a processor with {_FASTER[integers]} would be faster")
    if is_stale():
        parts.append("the C sources have changed since: run `make install` to rebuild")
    return "; ".join(parts)


def fingerprint() -> str:
    """A hash of processor and libraries, which determine the time of our operations."""
    flags = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    try:
        libraries = str(build.read_manifest(FOLDER).libraries)
    except OSError:
        libraries = ""
    parts = [platform.machine(), platform.processor(), flags, libraries, os.environ.get("PILOTFISH_NATIVE", "")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


BITS = {torch.float32: 32, torch.bfloat16: 16}


def fields(kind: str, names: str) -> Iterator[tuple[str, type]]:
    """Fields of a C structure, all of one type of `_TYPES`."""
    return ((name, _TYPES[kind]) for name in names.split())


class AttentionArgs(ctypes.Structure):
    """`Args` of attention.h."""

    _fields_ = (
        *fields("p", "query key value out first_rows kv_lens tables sinks"),
        *fields("n", "query_stride key_stride value_stride sequences width page_size heads kv_heads"),
        *fields("n", "dim value_dim window chunk rounded"),
        *fields("f", "scale softcap"),
    )
