"""Bounds on untrusted files, checked before they are read: a pipe never ends, a large file takes all memory."""

from __future__ import annotations

import stat
from pathlib import Path

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.container import file_from_hub, gguf_file

_MOST = 1 << 22  # bytes of configs and chat templates; published ones have at most a quarter
_LARGER = {  # twice those of the largest published, or more
    "tokenizer.json": 1 << 26,
    "model.safetensors.index.json": 1 << 25,
    "adapter_model.safetensors": 1 << 33,
}
_READ_WHOLE = ("*config.json", "*tokenizer.json", "*.index.json", "*_map.json", "*.jinja")


def bounded(path: Path) -> Path:
    """The path, whose file may be missing. Raises ModelError if it is not a regular file, or too large."""
    try:
        status = path.stat()
    except OSError:  # opening it raises the error
        return path
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file")
    if status.st_size > (most := _LARGER.get(path.name, _MOST)):
        raise ModelError(f"{path} has {status.st_size} bytes; expected at most {most}")
    return path


def check_folder(folder: Path) -> None:
    """Check the files of a checkpoint that libraries read as a whole; ModelError as `bounded`."""
    for pattern in _READ_WHOLE:
        for path in folder.glob(pattern):
            bounded(path)


def find_file(source: str | Path, name: str, revision: str | None = None) -> Path | None:
    """The path of one file of a local folder or hub id; None if there is no file of that name, as in a GGUF file.

    Raises:
        ModelError: there is no such checkpoint.
    """
    if gguf_file(source, revision) is not None:
        return None
    folder = Path(source)
    if folder.is_dir():
        path = bounded(folder / name)
        return path if path.is_file() else None
    try:
        return file_from_hub(str(source), name, revision)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # no such repository, no network, no valid name
        raise ModelError(f"{source} is neither a local folder nor a checkpoint on the hub: {error}") from error
