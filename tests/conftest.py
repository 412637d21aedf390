"""What holds for all tests: an async test must not leave tasks behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.features import FeatureTable

# These wait for processes that start and end: at the end of a run nothing would be left to do meanwhile.
WAITING = Path(__file__).parent / "server" / "worker"
ENDING = 1.0  # seconds that a task may take to end once its test is over: gRPC's wait for the library to tell them

# Without a GPU, Triton's kernels are interpreted. It asks when it is first imported, which a later import may do.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The models here are so small that a second thread only waits for the first, and fights the server's event loop.
torch.set_num_threads(1)
# Machines are shared: how long an example takes says nothing of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", type=Path, help="write the table of features to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: what `make test` leaves out and `make test-all` runs")
    config.addinivalue_line("markers", "cuda: needs a GPU; `make test-cuda` runs them")
    config.addinivalue_line("markers", "feature: a cell of docs/features.md, with parameters (row, column)")
    if config.getoption("--features"):
        config.pluginmanager.register(FeatureTable(config.getoption("--features")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: nobody looks through it for garbage, neither now nor while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: WAITING not in item.path.parents)
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, "no_leaked_tasks")  # set up first, so torn down last


def pytest_runtest_call(item: pytest.Item) -> None:
    torch.set_num_threads(1)  # an engine that was built without `threads` has set it for the whole process


@pytest.fixture
async def no_leaked_tasks():
    """Fail if a task that was started during the test is still alive after it and its fixtures."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    leaked = (await asyncio.wait(left, timeout=ENDING))[1] if left else set()
    assert not leaked, f"left running: {sorted(map(repr, leaked))}"
