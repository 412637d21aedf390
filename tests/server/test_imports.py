"""What a command has imported before it does anything: nobody waits for the libraries of models who runs none."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODELS = {"torch", "transformers"}
HEAVY = MODELS | {"fastapi", "uvicorn", "numpy", "tokenizers", "llguidance", "huggingface_hub"}


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import pilotfish.server.cli", HEAVY | {"grpc", "pydantic"}),
        ("from pilotfish.server import cli; cli.main(['--help'])", HEAVY | {"grpc", "pydantic"}),
        ("from pilotfish.server import cli; cli.main(['version'])", HEAVY),
        ("from pilotfish.server import cli; cli.main(['health', '127.0.0.1:1', '--timeout', '0.01'])", HEAVY),
        ("import pilotfish.server.commands.check", HEAVY),
        # Small, so that it starts before all other imports.
        ("import pilotfish.server.worker.fork_server", HEAVY | {"grpc", "pydantic"}),
        ("import pilotfish.server.app", MODELS),  # the front ends: they answer while the engine's process imports these
    ],
)
def test_what_is_imported(program: str, absent: set[str]) -> None:
    told = f"{program}\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert absent.isdisjoint(done.stderr.split())
