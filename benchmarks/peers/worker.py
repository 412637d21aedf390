"""The inner side of a peer's process: orders come in and turns go out, one line of JSON each.

Knows the standard library alone: a peer's Python need have nothing of ours installed.
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
    """A peer with a model loaded."""

    version: str

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """Continue all prompts greedily by `tokens`; `k` drafts per round, 0 for plain decoding."""
        ...


def serve(load: Callable[[dict[str, Any]], PeerProgram]) -> None:
    """Load with the settings in the first argument, say so, and run what is ordered until nobody orders any more."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        program = load(json.loads(sys.argv[1]))
        _say(answers, {"version": program.version})
        for line in sys.stdin:
            order = json.loads(line)
            _say(answers, asdict(program.run(order["prompts"], order["tokens"], order["k"])))
    except Exception as error:
        # Whatever it is, it belongs on the page, and the other programs go on.
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
