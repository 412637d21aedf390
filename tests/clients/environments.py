"""Environments of clients, which `make test-clients` installs in build/clients, and their programs as subprocesses.

Nothing here imports a client: each has a Python of its own, whose packages need not agree with ours.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "clients"
PROGRAMS = Path(__file__).parent / "programs"
TOKENIZER = ROOT / "models" / "target"
MODEL = "pilotfish-embedded"

# No client may send anything to anyone but our server, or look for models and prices elsewhere.
_ALONE = {
    "ANONYMIZED_TELEMETRY": "false",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
}


def python(environment: str) -> str:
    return str(BUILD / environment / "bin" / "python")


def tool(environment: str, name: str) -> str:
    return str(BUILD / environment / "bin" / name)


def run(*command: str, home: Path, timeout: float = 240, **variables: str) -> str:
    """What a client prints. It sees `home` and no variable of ours; a failure shows all that it said."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)} | _ALONE | variables
    done = subprocess.run(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )
    said = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, f"{command[:4]} ended with {done.returncode}:\n{said}"
    return done.stdout


def run_each(environment: str, name: str, runs: list[list[str]], *, home: Path, **variables: str) -> None:
    """Run a command of an environment with each of these lists of arguments."""
    program = str(PROGRAMS / "commands.py")
    run(python(environment), program, name, json.dumps(runs), home=home, **variables)


def answers(program: str, **arguments) -> dict:
    """What a program of `programs/` prints as JSON in its last line, run by the Python of the SDKs with `arguments`."""
    with TemporaryDirectory(prefix="client-") as home:
        printed = run(python("sdk"), str(PROGRAMS / f"{program}.py"), json.dumps(arguments), home=Path(home))
    return json.loads(printed.splitlines()[-1])
