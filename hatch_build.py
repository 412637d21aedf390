"""Compiles our C when the package is built or installed: hatchling's hook around `engine/native/build.py`."""

from __future__ import annotations

import os
import platform
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FOLDER = Path("engine", "native")
INSTALLED = Path("pilotfish") / FOLDER


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install gets its libraries beside their sources, a wheel has them inside and is of their platform."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._native = runpy.run_path(str(Path(self.root) / FOLDER / "build.py"))
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """A compiler where the machine has none."""
        return [] if self._native["compiler"]() or _is_unwanted() else [self._native["ZIG"]]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / FOLDER
        if version != "editable" and (self._native["PORTABLE"] or not self._native["is_current"]()):
            self._scratch = tempfile.TemporaryDirectory()
            folder = Path(self._scratch.name)
        if _is_unwanted():
            return
        self._native["build"](folder)
        manifest = self._native["MANIFEST"]
        if version == "editable" or not (folder / manifest).exists():  # there was no compiler
            return
        files = [built.file for built in self._native["read_manifest"](folder).libraries.values()]
        for name in (*files, manifest):
            build_data["force_include"][str(folder / name)] = str(INSTALLED / name)
        tag = _platform([folder / name for name in files], self._native["PORTABLE"])
        build_data |= {"pure_python": False, "tag": f"py3-none-{tag}"}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


def _is_unwanted() -> bool:
    return os.environ.get("PILOTFISH_NATIVE") == "0"


def _platform(libraries: list[Path], portable: str) -> str:
    """The oldest platform on which the libraries load: that of the newest symbol of glibc that they ask for."""
    ours = list(platform_tags())
    needed = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    oldest = f"manylinux_2_{max([17, *needed])}_{portable or platform.machine()}"
    if portable or oldest in ours:
        return oldest
    return next((tag for tag in ours if tag.startswith("musllinux")), ours[0])
