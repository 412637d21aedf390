"""What control has learned, kept from one start to the next: costs and acceptance.

One file for each pair of models, machine and set of options, in the cache folder. It holds only numbers. A file that is
damaged, of another version or of another user is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Generator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pilotfish.engine.control.controller import Control
from pilotfish.engine.machine.threads import most_threads
from pilotfish.engine.native.compiled import fingerprint

if TYPE_CHECKING:  # only its values are read: a GPU machine without pydantic passes benchmarks/harness/bare.py
    from pilotfish.engine.config import EngineConfig

log = logging.getLogger(__name__)

VERSION = 3
MOST_BYTES = 4 << 20  # of a file; a pair with four proposers takes a tenth of that
MOST_FILES = 32  # in a folder; the least recently used are deleted


def recall(config: EngineConfig, controls: dict[str, Control]) -> bool:
    """Restore every control from what an earlier process learned; False where there is nothing to restore."""
    name = _name(config)
    for folder in cache_folders():
        try:
            state = _read(name, folder)
            for key, control in controls.items():
                control.restore(state[key])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("what was learned at an earlier start cannot be used: %s: %r", name, error)
            continue
        return True
    return False


def keep(config: EngineConfig, controls: dict[str, Control]) -> None:
    """Write what the controls have learned, atomically. A failure is logged: the next start then calibrates again."""
    state = {"version": VERSION} | {key: control.state() for key, control in controls.items()}
    made = f"learned-{secrets.token_hex(8)}"
    try:
        with closing(cache_folders(writable=True)) as folders:
            folder = next(folders)
            with open(made, "x", opener=partial(os.open, mode=0o600, dir_fd=folder)) as file:
                json.dump(state, file, allow_nan=False)
            os.replace(made, _name(config), src_dir_fd=folder, dst_dir_fd=folder)
            found = [name for name in os.listdir(folder) if name.startswith("learned-")]
            with suppress(FileNotFoundError):  # another process has removed it
                for old in sorted(found, key=lambda name: os.lstat(name, dir_fd=folder).st_mtime)[:-MOST_FILES]:
                    os.unlink(old, dir_fd=folder)
    except (OSError, ValueError) as error:
        log.info("what was learned is not kept: %s", error)


def cache_folders(*, writable: bool = False) -> Generator[int, None, None]:
    """Yield a descriptor of each folder, the preferred one first; each is closed when the next one is asked for.

    Never a folder that another user owns or can write into, and never one behind a link. Names that are opened by the
    descriptor are in the folder that was checked.

    Raises:
        FileNotFoundError: `writable`, and there is no further folder that can be written to.
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


def _read(name: str, folder: int) -> dict[str, Any]:
    """Read a file, and mark it as used."""
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
        content = file.read(MOST_BYTES + 1)
        os.utime(file.fileno())
    if len(content) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    state = json.loads(content)
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"expected version {VERSION}")
    return state


def _name(config: EngineConfig) -> str:
    """The name of the file: a hash of everything that costs and acceptance depend on."""
    parts = [repr(config), fingerprint(), str(most_threads()), torch.__version__]
    for model in (config.target, *config.draft):
        folder = Path(model)
        if folder.is_dir():  # a model of the hub is identified by name and revision
            files = ((file.name, file.stat()) for file in sorted(folder.iterdir()))
            parts += [f"{name} {found.st_size} {found.st_mtime_ns}" for name, found in files]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return f"learned-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"
