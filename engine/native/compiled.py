"""The C sources of this folder as a shared library, compiled by the machine's own compiler and kept in a cache.

No code requires the library: where there is no compiler, `library` returns None and callers use torch's operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-std=gnu11", "-Wno-psabi")
_FASTER = {
    "AVX-512": "AVX-512 VNNI",
    "AVX2": "AVX-VNNI or AVX-512 VNNI",
    "SSE": "AVX2",
    "NEON": "dot products (ARMv8.2)",
    "plain C": "vectors (AVX2, NEON)",
}
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 120  # seconds
SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))


def library() -> ctypes.CDLL | None:
    """The compiled sources; or None, and the log says why."""
    found = loaded()
    return found if isinstance(found, ctypes.CDLL) else None


@cache
def loaded() -> ctypes.CDLL | str:
    """The compiled sources, or the reason why there are none."""
    if os.environ.get("PILOTFISH_NATIVE") == "0":
        why = "PILOTFISH_NATIVE is 0"
    else:
        try:
            return ctypes.CDLL(str(_compiled()))
        except (OSError, subprocess.SubprocessError) as error:
            why = f"not available ({str(getattr(error, 'stderr', None) or error).strip()[-400:]})"
    log.info("native code: %s; torch's operations serve instead", why)
    return why


@cache
def function(name: str, arguments: tuple[type, ...]) -> Callable[..., None]:
    """Return `pilotfish_name` of the compiled sources, which must exist; it takes these arguments, returns nothing."""
    found = getattr(library(), f"pilotfish_{name}")
    found.argtypes, found.restype = arguments, None
    return found  # type: ignore[no-any-return]


def threads_in_use() -> int:
    """Threads of our C in its last pass; 0 if it is not loaded yet or not available."""
    found = library() if loaded.cache_info().currsize else None
    return 0 if found is None else int(found.pool_threads())


def instructions() -> str:
    """Describe the instructions that our C multiplies with here, and faster ones; or the reason why it does not run."""
    found = loaded()
    if isinstance(found, str):
        return f"torch's, several times slower: our C is {found}; it takes a C compiler (gcc or clang)"
    for function in (found.pilotfish_integer_path, found.pilotfish_bfloat16_path):
        function.restype = ctypes.c_char_p
    integers, bfloat16 = (path().decode() for path in (found.pilotfish_integer_path, found.pilotfish_bfloat16_path))
    told = f"our C: int8 and int4 by {integers}, bfloat16 by {bfloat16}"
    return f"{told}; a processor with {_FASTER[integers]} would be faster" if integers in _FASTER else told


def _compiled() -> Path:
    """Return the library's path; compile it first if the cache has none for these sources and this kind of processor.

    Raises:
        OSError: there is no compiler, or no folder to write to.
        subprocess.SubprocessError: the compiler reports an error or exceeds the time limit.
    """
    name = f"native-{fingerprint()}.so"
    for folder in cache_folders():
        if (folder / name).exists():
            return folder / name
    folder = next(cache_folders(writable=True))
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), *COMPILERS))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        _compile(compiler, made)
        return made.replace(folder / name)  # atomic, even if several processes start at the same time


def _compile(compiler: str, made: Path) -> None:
    command = [compiler, *FLAGS, "-o", str(made), *map(str, SOURCES), "-lm"]
    subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)  # noqa: S603  # our own words


def fingerprint() -> str:
    """A hash of everything that the result depends on, because different machines may share a home folder."""
    info = Path("/proc/cpuinfo")
    flags = next((line for line in _lines(info) if line.startswith(("flags", "Features"))), "")
    parts = [platform.machine(), platform.processor(), flags, *FLAGS]
    parts += [path.read_text("utf-8") for path in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines() if path.exists() else []


def cache_folders(*, writable: bool = False) -> Iterator[Path]:
    """The folders for the library, the preferred one first. Never a folder into which another user can write."""
    home = os.environ.get("PILOTFISH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    own = Path(home) if home else Path.home() / ".cache"
    for folder in (own / "pilotfish", Path(tempfile.gettempdir()) / f"pilotfish-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and (not writable or os.access(folder, os.W_OK)):
            yield folder
    if writable:
        raise FileNotFoundError("no folder to keep the compiled code in")
