"""The worker side of a peer's process: it reads orders and writes turns, one line of JSON each.

Uses only the standard library: a peer's Python need not have Pilotfish's dependencies installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from benchmarks.harness.turns import Turn

Prompts = Sequence[Sequence[int]]


class PeerProgram(Protocol):
    """A peer program with a loaded model."""

    version: str

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """Continue all prompts greedily by `tokens`; `k` drafts per round, 0 for plain decoding."""
        ...


def serve(load: Callable[[dict[str, Any]], PeerProgram]) -> None:
    """Load with the settings in the first argument, report the version, and run orders until the input ends."""
    # Output that libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        program = load(json.loads(sys.argv[1]))
        _say(answers, {"version": program.version})
        for line in sys.stdin:
            order = json.loads(line)
            _say(answers, asdict(program.run(order["prompts"], order["tokens"], order["k"])))
    except Exception as error:
        # Report any error on the page; the other programs continue.
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
