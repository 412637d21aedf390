"""The parent's handle of a peer's process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.harness.meter import CpuUsage
from benchmarks.harness.turns import Turn

_ROOT = Path(__file__).resolve().parents[2]


class NotMeasured(Exception):
    """Expected: this program is not installed, or cannot run this; the text gives the reason."""


class Remote:
    """One program with one model, in a process that waits without load between turns."""

    def __init__(self, python: str, module: str, settings: Mapping[str, Any], log: Path) -> None:
        """Start the process, which begins to load; `ready` waits for it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("w")
        paths = os.pathsep.join([str(_ROOT), str(_ROOT / "proto")])
        threads = {"OMP_NUM_THREADS": str(settings["threads"])} if settings.get("threads") else {}
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_ROOT,
            env=os.environ | threads | {"PYTHONPATH": paths},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> str:
        """Return the program's version once the model is loaded.

        Raises:
            NotMeasured: The model cannot be loaded.
        """
        return str(self._answer()["version"])

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, k: int | str) -> Turn:
        """Run one turn.

        Raises:
            NotMeasured: The program cannot run it.
        """
        assert self._process.stdin is not None, "a pipe was asked for"
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens, "k": k}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NotMeasured(f"ended with code {self._process.wait()}; see {self._log.name}") from None
        answer = self._answer()
        return Turn(**answer | {"usage": CpuUsage(**answer["usage"])})

    def close(self) -> None:
        """Close the process's input; it then ends by itself."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the process ended before it read the last line
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise NotMeasured(f"ended with code {self._process.wait()}; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotMeasured(answer["error"])
        return answer
