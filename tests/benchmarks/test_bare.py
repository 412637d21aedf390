"""A GPU machine may have nothing but torch, transformers, triton, pytest and hypothesis: what runs there starts so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.cuda.catalogue import COMMANDS
from benchmarks.harness.bare import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES, MOST_BYTES = 8, 16 << 20  # that come back from a lent machine
BARE = """
    import sys
    from importlib.machinery import PathFinder
    LACKING = {
        "pydantic", "pydantic_core", "pydantic_settings", "llguidance", "msgspec", "prometheus_client", "rich",
        "fastapi", "uvicorn", "uvloop", "starlette", "jsonschema", "google", "grpc", "grpc_status", "openai",
        "pytest_asyncio", "pytest_timeout", "xdist", "execnet", "scipy", "psutil", "pandas", "sklearn",
        "matplotlib", "opentelemetry", "playwright", "typer", "locust",
    }
    class Bare(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in LACKING else super().find_spec(name, path, target)
    sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
    import torch
"""


def in_a_bare_environment(script: str, **environment: str) -> str:
    """What a fresh Python prints that has only what a GPU machine has."""
    ours = ("TRITON_INTERPRET", "PYTEST_XDIST")
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    found |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BARE) + textwrap.dedent(script)], cwd=ROOT, env=found,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    return told.stdout


@pytest.mark.slow
def test_what_test_cuda_runs_is_collected_as_if_there_were_a_card():
    """With the arguments of `make test-cuda`; and each test of tests/cuda says that it needs a card.

    A test there that does not would hand tensors of the CPU to kernels that a card's machine does not interpret.
    """
    told = in_a_bare_environment(
        """
        torch.cuda.is_available = lambda: True
        import pytest
        from tests.cuda.__main__ import arguments
        class Count:
            def pytest_collection_finish(self, session):
                names = [item.nodeid for item in session.items]
                print("COLLECTED", sum("tests/kernels" in n for n in names), sum("tests/cuda" in n for n in names))
                print("NO CARD", [item.nodeid for item in session.items
                                  if "tests/cuda" in item.nodeid and not item.get_closest_marker("cuda")])
        assert not {"-n", "--timeout"} & set(arguments()), "options of plugins that are not there"
        strict = ["-W", "error::pytest.PytestConfigWarning"]
        status = pytest.main(["--collect-only", "-q", *strict, *arguments()], [Count()])
        assert status == 0, status
        """
    )
    kernels, on_a_card = next(line for line in told.splitlines() if line.startswith("COLLECTED")).split()[1:]
    assert int(kernels) > 20
    assert int(on_a_card) > 30
    assert "NO CARD []" in told


@pytest.mark.slow
def test_a_dry_run_of_first_light_writes_every_section(tmp_path):
    """Every part of both commands, in one process that loads the libraries for all of them."""
    told = in_a_bare_environment(
        f"""
        from benchmarks.cuda import __main__
        from benchmarks.cuda.catalogue import COMMANDS
        statuses = []
        for command in COMMANDS:
            sys.argv[1:] = [command, "--device", "cpu", "--out", {str(tmp_path)!r}]
            statuses.append(__main__.main())
        print("STATUSES", statuses)
        """,
        OMP_NUM_THREADS="1",
    )
    assert "STATUSES [0, 0]" in told, told
    for command, parts in COMMANDS.items():
        page, numbers = (tmp_path / f"{command}.md").read_text(), json.loads((tmp_path / f"{command}.json").read_text())
        assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [part.title for part in parts] + ["Parts"]
        for part in parts:
            said = page.partition(f"## {part.title}\n")[2].partition("\n## ")[0]
            assert numbers[part.name]["outcome"] == "ended", said
            assert "|---" in said or "needs a card" in said, f"{part.name} has no table, and does not say why"
    files = list(tmp_path.iterdir())
    assert len(files) <= MOST_FILES
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", file.name) and file.stat().st_size < MOST_BYTES for file in files)


def test_bare_options_are_those_of_the_engine() -> None:
    config = pytest.importorskip("pilotfish.engine.config", reason="the engine's options need pydantic")
    fields = {
        name: field.get_default(call_default_factory=True)
        for name, field in config.EngineConfig.model_fields.items()
        if name != "target"
    }
    assert fields == DEFAULTS
