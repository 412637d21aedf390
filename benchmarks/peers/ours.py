"""Pilotfish as one of the peers: the same engine that the server runs, in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.timing import run_turn, way
from benchmarks.harness.turns import Turn
from benchmarks.peers.worker import Prompts, serve
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.startup.build import build_engine
from pilotfish.engine.startup.warm import make_ready
from pilotfish.server import version


class Pilotfish:
    """Uses a real draft model with its own weights; no drafts are replayed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = f"pilotfish {version()}"
        self._engine = build_engine(EngineConfig.model_validate(settings))
        make_ready(self._engine, self._engine.config.warm_up_seconds, uses_saved_calibration=True)  # as in the server

    def run(self, prompts: Prompts, tokens: int, k: int | str) -> Turn:
        """See `PeerProgram`."""
        return run_turn(self._engine, [_ids(prompt) for prompt in prompts], tokens, way(k, "model" if k else None))


def _ids(prompt: Sequence[int]) -> tuple[int, ...]:
    return tuple(prompt)


if __name__ == "__main__":
    serve(Pilotfish)
