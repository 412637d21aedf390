"""One file of a checkpoint, from a local folder or from the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from engine.errors import ModelError
from engine.model.bounded import bounded
from engine.model.gguf.files import gguf_file


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
        return Path(hf_hub_download(str(source), name, revision=revision))
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:  # no such repository, no network, no valid name
        raise ModelError(f"{source} is no local folder, and no such checkpoint came from the hub: {error}") from error
