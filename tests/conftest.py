"""What holds for all tests: an async test must not leave tasks behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import runpy
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from pilotfish.server.worker.garbage import freeze_loaded
from tests.features import FeatureTable

# These mostly wait, for clients, clocks and processes: others compute meanwhile.
WAITING = Path(__file__).parent / "server"
ENDING = 1.0  # seconds that a task may take to end once its test is over: gRPC's wait for the library to tell them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", type=Path, help="write the table of features to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: what `make test` leaves out and `make test-all` runs")
    config.addinivalue_line("markers", "cuda: needs a GPU; `make test-cuda` runs them")
    config.addinivalue_line("markers", "feature: a cell of docs/features.md, with parameters (row, column)")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        prepare()
    if not hasattr(config, "workerinput"):
        refuse_stale_c()
    if config.getoption("--features"):
        config.pluginmanager.register(FeatureTable(config.getoption("--features")))


def refuse_stale_c() -> None:
    """Test no C that is older than its sources. `build.py` is run as a script, because the package imports torch."""
    build = runpy.run_path(str(Path(__file__).parents[1] / "engine" / "native" / "build.py"))
    is_built = (build["HERE"] / build["MANIFEST"]).exists()
    if (
        os.environ.get("PILOTFISH_NATIVE") != "0"
        and (is_built or build["compiler"]())
        and not build["is_current"](names=())
    ):
        raise pytest.UsageError("engine/native has no libraries of its present sources: run `make install`")


def prepare() -> None:
    """Set up a process that runs tests. The one that hands them out to others starts sooner without torch."""
    import torch
    from hypothesis import settings

    # Without a GPU, Triton's kernels are interpreted. It asks when it is first imported, which a later import may do.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # The models here are so small that a second thread only waits for the first, and fights the server's event loop.
    torch.set_num_threads(1)
    # Machines are shared: how long an example takes says nothing of the code.
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: nobody looks through it for garbage, neither now nor while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        freeze_loaded()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    places = spread(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: places[item.path])
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, "no_leaked_tasks")  # set up first, so torn down last


def spread(files: Iterable[Path]) -> dict[Path, float]:
    """Where in a run a file comes, from 0 to 1: those that wait lie evenly among the others, last names first."""
    kinds: tuple[list[Path], list[Path]] = ([], [])
    for file in files:
        kinds[WAITING in file.parents].append(file)
    kinds[True].reverse()  # tests/server/worker
    return {file: (i + 0.5) / len(kind) for kind in kinds for i, file in enumerate(kind)}


def pytest_runtest_call(item: pytest.Item) -> None:
    import torch

    torch.set_num_threads(1)  # an engine that was built without `threads` has set it for the whole process


@pytest.fixture
async def no_leaked_tasks():
    """Fail if a task that was started during the test is still alive after it and its fixtures."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    leaked = (await asyncio.wait(left, timeout=ENDING))[1] if left else set()
    assert not leaked, f"left running: {sorted(map(repr, leaked))}"
