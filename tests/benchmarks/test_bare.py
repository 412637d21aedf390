"""A GPU machine may have nothing but torch, transformers, triton, pytest and hypothesis: what runs there starts so."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.harness.bare import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
BARE = """
    import sys
    from importlib.machinery import PathFinder
    LACKING = {
        "pydantic", "pydantic_core", "pydantic_settings", "llguidance", "msgspec", "prometheus_client", "rich",
        "fastapi", "uvicorn", "uvloop", "starlette", "jsonschema", "google", "grpc", "grpc_status", "openai",
        "pytest_asyncio", "pytest_timeout", "xdist", "execnet", "accelerate", "scipy", "psutil", "pandas", "sklearn",
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
def test_first_light_starts():
    """Each part of both commands is loaded, as on a card; and one of them decodes with a whole engine."""
    told = in_a_bare_environment(
        """
        from benchmarks.cuda import __main__
        from benchmarks.cuda.catalogue import COMMANDS
        for part in [part for parts in COMMANDS.values() for part in parts]:
            part.load()
        import tempfile
        sys.argv[1:] = ["first-light", "--device", "cpu", "--out", tempfile.mkdtemp(), "--only", "plain"]
        sys.exit(__main__.main())
        """,
        OMP_NUM_THREADS="1",
    )
    assert "plain: ended" in told


def test_bare_options_are_those_of_the_engine() -> None:
    config = pytest.importorskip("engine.config", reason="the engine's options need pydantic")
    fields = {
        name: field.get_default(call_default_factory=True)
        for name, field in config.EngineConfig.model_fields.items()
        if name != "target"
    }
    assert fields == DEFAULTS
