"""Which model names mean a GGUF file."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelError
from engine.model.gguf.container import Container, names_of_parts
from engine.model.hub import file_from_hub

_SUFFIX = ".gguf"
_CHECKPOINT = ("config.json", "*.safetensors")  # what a folder holds that is another kind of checkpoint


def gguf_file(name: str | Path, revision: str | None = None) -> Path | None:
    """The GGUF file that a model name means; None if it means another kind of checkpoint.

    The name is that of a file, of a folder that holds one such file and no other checkpoint, or of a file on the hub,
    `owner/model/file.gguf`. Of a model in several files it is that of any, or of a folder with all of them.

    Raises:
        ModelError: there is no such file, or the folder holds several.
    """
    path = Path(name)
    if path.is_dir():
        return _only_one(path)
    if path.suffix != _SUFFIX:
        return None
    if path.is_file():
        return path
    owner, _, rest = str(name).partition("/")
    model, _, file = rest.partition("/")
    if not file or owner in ("", ".", "..", "~"):
        raise ModelError(f"cannot load model {str(name)!r}: there is no such file")
    try:
        folder, slash, last = file.rpartition("/")
        parts = [f"{folder}{slash}{part}" for part in names_of_parts(last)]
        first, *_ = [file_from_hub(f"{owner}/{model}", part, revision) for part in parts]
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(name)!r} is no local file, and no such file came from the hub: {error}") from error
    return first


def open_gguf(name: str | Path, revision: str | None = None) -> Container | None:
    """The opened file of `gguf_file`; None if the name means another kind of checkpoint.

    Raises:
        ModelError: there is no such file, or it cannot be read.
    """
    path = gguf_file(name, revision)
    return None if path is None else Container.open(path)


def _only_one(folder: Path) -> Path | None:
    found = sorted(folder.glob(f"*{_SUFFIX}"))
    if not found or any(any(folder.glob(pattern)) for pattern in _CHECKPOINT):
        return None
    if [path.name for path in found] != names_of_parts(found[0].name):
        names = ", ".join(path.name for path in found)
        raise ModelError(f"{str(folder)!r} holds {len(found)} GGUF files: name one of {names}")
    return found[0]
