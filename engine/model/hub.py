"""Files of checkpoints on the hub. Knows names, and nothing of what is in a file."""

from __future__ import annotations

from pathlib import Path


def file_from_hub(checkpoint: str, name: str, revision: str | None) -> Path:
    """The path of a file, downloaded or kept from before.

    Raises:
        FileNotFoundError: the checkpoint has no such file.
        OSError, ValueError: there is no such checkpoint, no network, or the name is none.
    """
    # Importing the client takes a quarter of a second and 18 MB, which a local checkpoint need not wait for.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(checkpoint, name, revision=revision))
    except EntryNotFoundError as error:
        raise FileNotFoundError(str(error)) from error
