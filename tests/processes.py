"""The processes of a group, read from /proc of Linux."""

from __future__ import annotations

import contextlib
from pathlib import Path


def alive_in(group: int) -> list[str]:
    """The command lines of a process group, without those that have ended and whose parent has yet to wait for them.

    A process whose parent ended first is waited for by process 1, at its own time; a signal to the group reaches it.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # proc(5), after the name: fields 3 (state) and 5 (process group)
                state, _, its_group = (
                    (folder / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[:3]
                )
                if int(its_group) == group and state not in "ZX":
                    found.append((folder / "cmdline").read_text("utf-8", errors="replace").replace("\0", " "))
    return found
