"""The folder in which processes keep what later ones can use. It holds numbers: nothing in it is ever run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path


def cache_folders(*, writable: bool = False) -> Generator[int, None, None]:
    """Yield a descriptor of each folder, the preferred one first; each is closed when the next one is asked for.

    Never a folder that another user owns or can write into, and never one behind a link. Whoever opens names by the
    descriptor stays in the folder that was checked.

    Raises:
        FileNotFoundError: there is no further one that can be written to, and `writable` was asked for.
    """
    home = os.environ.get("PILOTFISH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    own = Path(home) if home else Path.home() / ".cache"
    for folder in (own / "pilotfish", Path(tempfile.gettempdir()) / f"pilotfish-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            found = os.fstat(opened)
            is_ours = found.st_uid == os.getuid() and not found.st_mode & 0o022
            if is_ours and (not writable or os.access(".", os.W_OK, dir_fd=opened)):
                yield opened
        finally:
            os.close(opened)
    if writable:
        raise FileNotFoundError("no folder of ours can be written to")
