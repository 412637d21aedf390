"""Threads by what the process may really use: affinity, and quotas of control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pilotfish.engine.machine import threads
from pilotfish.engine.machine.threads import cores, exactly, pool_threads, quota, use_threads


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "want"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "100000 100000"}, 1.0),
        ("0::/docker/of/the/host\n", {"cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/c\n1:memory:/m\n",
            {"cpu/c/cpu.cfs_quota_us": "400000", "cpu/c/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu,cpuacct:/c\n", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {}, None),
        (None, {}, None),
    ],
)
def test_quota(membership: str | None, files: dict[str, str], want: float | None, tmp_path: Path) -> None:
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    assert quota(write(tmp_path / "root", files), tmp_path / "membership") == want


@pytest.mark.parametrize(("limit", "want"), [(None, 4), (2.9, 2), (0.5, 1), (64.0, 4)])
def test_cores(limit: float | None, want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(threads, "quota", lambda: limit)
    assert cores() == want


def test_torch_and_the_pool_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    before, mine = torch.get_num_threads(), pool_threads()
    try:
        assert use_threads(3) == torch.get_num_threads() == pool_threads() == 3
        with exactly(4):
            assert (torch.get_num_threads(), pool_threads()) == (4, -4)
        assert use_threads(None) == torch.get_num_threads() == pool_threads() == 2
    finally:
        use_threads(mine)
        torch.set_num_threads(before)
