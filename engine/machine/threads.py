"""Sets how many threads compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass
class _Pool:
    """The number of threads of our C: at most `most` if it adapts, else exactly `most`."""

    most: int = 1
    adapts: bool = True


_POOL = _Pool()  # one per process, like torch's thread pool


def use_threads(threads: int | None) -> int:
    """Compute on `threads` threads, default one per available core; returns the number.

    torch uses all of them. Our C (`native/pool.c`) uses the number that is fastest.
    """
    count = threads or cores()
    torch.set_num_threads(count)
    _POOL.most, _POOL.adapts = count, True
    # Passes are sequential, so a second pool would only take cores from the first. Torch has one setting per process.
    if torch.get_num_interop_threads() != 1:
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
    return count


def leave_to_pool() -> None:
    """Limit torch to one thread: the work left to it is small, and its threads would wait for each other."""
    torch.set_num_threads(1)


@contextmanager
def exactly(threads: int) -> Iterator[None]:
    """Compute on exactly `threads` threads inside the block, in torch and in our C, even if fewer are faster."""
    torchs, most, adapts = torch.get_num_threads(), _POOL.most, _POOL.adapts
    torch.set_num_threads(threads)
    _POOL.most, _POOL.adapts = threads, False
    try:
        yield
    finally:
        torch.set_num_threads(torchs)
        _POOL.most, _POOL.adapts = most, adapts


def most_threads() -> int:
    """The larger of torch's and our number of threads."""
    return max(torch.get_num_threads(), _POOL.most)


def pool_threads() -> int:
    """The number for `pool_enter`: n for at most n threads, -n for exactly n."""
    return _POOL.most if _POOL.adapts else -_POOL.most


def cores() -> int:
    """The number of cores in our affinity mask, or of whole cores in our control group's quota, if that is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = quota()
    return affinity if allowed is None else max(1, min(affinity, int(allowed)))


def quota(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> float | None:
    """The number of cores that the quotas of our control groups (version 1 or 2) allow; None without a limit."""
    found = [limit for folder in _folders(root, membership) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _folders(root: Path, membership: Path) -> list[Path]:
    """The folders of our control groups and of their parents, as far as this process can see them.

    `0::/a/b` (version 2) -> root/a/b, root/a, root; `3:cpu,cpuacct:/c` (version 1) -> root/cpu/c, root/cpu. In a
    container the path may be that of the host, and then only the root exists.
    """
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    folders = [root, root / "cpu", root / "cpu,cpuacct"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in (root / "cpu", root / controllers) if controllers else (root,):
            own = base / path.lstrip("/")
            folders += [own, *(above for above in own.parents if above.is_relative_to(base))]
    return folders


def _limit(folder: Path) -> float | None:
    """`100000 50000` in cpu.max, or two files in version 1 -> 2.0; None where there is no limit."""
    v2 = _read(folder / "cpu.max").split()
    quota, period = v2 if len(v2) == 2 else (_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None  # "max", "-1" or no such file
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""
