"""A plugin for pytest (`-p tests.no_gpu.pretending`): collect as where there are two GPUs, tell what would run."""

from __future__ import annotations

import json

import pytest
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2


class _Told:
    """Modules that are skipped as a whole, and why."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        found = {item.nodeid: _why_not(item) for item in session.items}
        print("collected", json.dumps({"tests": found, "modules": self.skipped}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Told())


def _why_not(item: pytest.Item) -> str | None:
    """Why a test would be skipped."""
    timer = [mark for mark in item.iter_markers() if mark.name == "skip" or (mark.name == "skipif" and mark.args[0])]
    return str(timer[0].kwargs["reason"]) if timer else None
